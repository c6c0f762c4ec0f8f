"""After many requests of all kinds a batch holds no more memory than at its start."""

import gc
import random
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import BatchGenerator, Sampling
from support.drafters.batch_heads import head_bench
from support.drafters.batches import LONGEST, SAMPLINGS, Bench, bench
from support.identity import prompt_of


def play(made: Bench, batch: BatchGenerator, requests: int, seed: int) -> int:
    rng = random.Random(seed)
    most, left = 0, requests
    while left or batch.waiting or batch.running:
        if left and rng.random() < 0.5:
            left -= 1
            options: dict[str, Any] = {
                "max_tokens": rng.randint(0, LONGEST),
                "sampling": rng.choice(SAMPLINGS),
                "draft_length": rng.choice([None, 0, 3]),
                "logprobs": rng.choice([None, None, 2]),
                "prefill_step_size": rng.choice([7, 2048]),
            }
            if rng.random() < 0.2:
                options["sampling"] = Sampling(logits_processors=[lambda t, x: x])
            options["explain"] = rng.random() < 0.2  # runs alone
            batch.insert(prompt_of(rng.randint(1, 90)), **options)
        for response in batch.next():
            if response.finish_reason is not None:
                batch.remove(response.uid)
        started = (*batch.running, *batch.waiting[:1])
        if started and rng.random() < 0.1:
            batch.remove(rng.choice(started))
        most = max(most, batch.memory)
    return most


@pytest.mark.parametrize(
    ("name", "kind", "requests", "sizes"),
    [
        ("llama", "model", 8, True),
        ("llama", "random", 8, False),  # a head with random weights
        *(
            pytest.param(name, kind, 150, sizes, marks=pytest.mark.slow)
            for name in ("llama", "gemma3_text", "qwen3_5")
            for kind in ("model", "lookup", "random")
            for sizes in (False, True)
        ),
    ],
)
def test_bytes_return_to_the_start(
    name: str, kind: str, requests: int, sizes: bool
) -> None:
    made = head_bench(name) if kind == "random" else bench(name)
    generator = made.generator(kind)
    with BatchGenerator(generator, max_rows=6, row_sizes=sizes) as batch:
        play(made, batch, 6, seed=0)  # allocate what stays allocated
        gc.collect()
        mx.clear_cache()
        start = mx.get_active_memory()
        most = play(made, batch, requests, seed=1)
        assert most > 0
        assert batch.memory == 0
        assert batch.stats.alone
        gc.collect()
        mx.synchronize()
        # Rates and counts are plain numbers, so no array is left.
        assert mx.get_active_memory() <= start + 4096


@pytest.mark.parametrize("sizes", [False, True])
def test_caches_are_as_wide_as_the_longest_row(sizes: bool) -> None:
    """Rows accept different numbers of tokens, but few columns stay spare."""
    made, most = bench("llama"), 6 if sizes else 3
    generator = made.generator("model")
    with BatchGenerator(generator, max_rows=most, row_sizes=sizes) as batch:
        long = batch.insert(prompt_of(30), max_tokens=50, stop_tokens=())
        spare = 0
        for number in range(1000):
            if long not in batch.running and long not in batch.waiting:
                break
            if len(batch.running) + len(batch.waiting) < most:
                options: dict[str, Any] = {"max_tokens": 5 + number % 17}
                batch.insert(prompt_of(4 + number % 9), stop_tokens=(), **options)
            batch.next()
            caches = batch._groups[None]._lane.caches
            rows = batch._groups[None].rows
            if caches:
                known = max(len(row.tokens) for row in rows)
                longest = known if not sizes else -(-known // 256) * 256
                assert caches[0].columns <= longest
                spare = max(spare, caches[0].keys.shape[2] - known)
        assert len(batch.result(long).tokens) == 50
        assert spare <= 256
