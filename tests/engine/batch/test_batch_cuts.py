"""A row that ends inside a round leaves in the prefix cache what a stream leaves."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache

from mlx_speculation import (
    BatchGenerator,
    LookupDraft,
    PrefixCache,
    SpeculationError,
    SpeculativeGenerator,
)
from mlx_speculation.caches import KVQuantization, Snapshot
from mlx_speculation.caches.snapshots.per_kind import arrays_of
from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.detokenizer import ChunkQueue
from mlx_speculation.engine.result import Result
from mlx_speculation.models.lanes.batch import BatchRound
from support.covering import covering
from support.drafters.batches import SAMPLINGS, Bench, bench
from support.identity import ROUNDING, prompt_of
from support.models.tiny_models import TINY_MODELS, build_tiny
from support.models.tiny_tokenizer import byte_tokenizer

EVERY = 8
PROMPTS = (23, 17, 6)
LENGTH = 18  # tokens of a text
STOPS = (6, 8, 10)  # two inside a round of 5 tokens, one at a round's end


def options_of(made: Bench, prompt: int, stop: int | None) -> dict[str, Any]:
    """Return options; the token at index `stop` of the text ends the request."""
    text = made.text(prompt, SAMPLINGS[0])
    ends = () if stop is None else (text[stop],)
    return {"max_tokens": LENGTH, "stop_tokens": ends}


def opened(
    made: Bench, kind: str, **options: Any
) -> tuple[SpeculativeGenerator, PrefixCache]:
    """Return a generator whose drafts are mostly right, and its prefix cache."""
    prefixes = PrefixCache(64 << 20, every=EVERY)
    draft: Any = made.model
    if kind == "lookup":
        draft = LookupDraft(corpus=made.corpus(PROMPTS[:1]))  # wrong at times
    generator = SpeculativeGenerator(
        made.model,
        byte_tokenizer(),
        draft=draft,
        draft_length=4,
        prefix_cache=prefixes,
        **options,
    )
    return generator, prefixes


def left(prefixes: PrefixCache, tokens: Sequence[int]) -> dict[int, Snapshot]:
    """Return what is cached of a text, by the length of each reusable prefix."""
    by_stop: dict[int, Snapshot] = {}
    for stop in range(1, len(tokens) + 1):
        taken = prefixes.lookup(0, tokens[:stop])
        if taken is not None:
            by_stop[taken.stop] = taken
    return by_stop


def assert_same(one: dict[int, Snapshot], other: dict[int, Snapshot]) -> None:
    assert [*one] == [*other]
    for stop, taken in one.items():
        for mine, its in zip(taken.leaves, other[stop].leaves, strict=True):
            assert (mine.kind, mine.settings) == (its.kind, its.settings)
            pairs = [(in_order(mine), in_order(its))]
            assert [rows.stop for rows in mine.rows[-1:]] == [
                rows.stop for rows in its.rows[-1:]
            ]
            pairs += [
                ([mx.concatenate(x, axis=-2)], [mx.concatenate(y, axis=-2)])
                for x, y in zip(slices(mine), slices(its), strict=True)
            ]
            for a, b in pairs:
                for x, y in zip(a, b, strict=True):
                    assert x.shape == y.shape
                    assert mx.allclose(x, y, rtol=ROUNDING, atol=ROUNDING).item()


def in_order(leaf: Any) -> list[mx.array]:
    """Return the arrays of a leaf's state, with rows of a full ring in text order."""
    arrays = arrays_of(leaf.state)
    if leaf.kind is RotatingKVCache and leaf.state["offset"] >= arrays[0].shape[2]:
        arrays = [mx.roll(array, -leaf.state["_idx"], 2) for array in arrays]
    return arrays


def slices(leaf: Any) -> list[list[mx.array]]:
    return [[*each] for each in zip(*(rows.arrays for rows in leaf.rows), strict=True)]


KINDS = {
    "llama": {},
    "gemma3_text": {},
    "gpt_oss": {"sliding": "native"},
    "qwen3_5": {},
    "mamba": {},
}
QUICK = ("llama", "gpt_oss", "qwen3_5")  # full attention, rings, recurrent states


@pytest.mark.parametrize(
    ("name", "kind"), covering(KINDS, ["model", "lookup"], quick=(0, QUICK))
)
def test_a_request_leaves_what_its_stream_leaves(name: str, kind: str) -> None:
    made, cut = bench(name), 0
    # Rounds of lookups can begin at any token.
    for stop in (*(STOPS[:2] if kind == "model" else (5, 7, 8)), None):
        # The lookups' corpus has texts of the first prompt only.
        prompts = PROMPTS[:1] if kind == "lookup" else PROMPTS
        places = [stop, None, None if stop is None else 16 - stop]
        requests = [
            (prompt, options_of(made, prompt, place))
            for prompt, place in zip(prompts, places, strict=False)
        ]
        generator, batched = opened(made, kind, **KINDS[name])
        with BatchGenerator(generator) as batch:
            uids = [batch.insert(prompt_of(p), **options) for p, options in requests]
            assert [batch.why_alone(uid) for uid in uids] == [None] * len(uids)
            while batch.running or batch.waiting:
                batch.next()
            results = [batch.result(uid) for uid in uids]
        for (prompt, options), result in zip(requests, results, strict=True):
            generator, streamed = opened(made, kind, **KINDS[name])
            alone = generator.generate(prompt_of(prompt), **options)
            assert result.tokens == alone.tokens
            assert result.cached_tokens == alone.cached_tokens
            known = prompt_of(prompt) + alone.tokens
            assert_same(left(batched, known), left(streamed, known))
            cut += inside_a_draft(alone)
    assert cut > 0


def inside_a_draft(result: Result) -> bool:
    return result.finish_reason == "stop" and result.origins[-1].writer == "accepted"


@pytest.mark.parametrize("start", [0, 25])
def test_a_request_with_quantized_caches_leaves_nothing_as_its_stream(
    start: int,
) -> None:
    tiny = TINY_MODELS["llama"]
    model = build_tiny(replace(tiny, args={**tiny.args, "head_dim": 32}))
    text = SpeculativeGenerator(model, byte_tokenizer()).generate(
        prompt_of(23), max_tokens=LENGTH, stop_tokens=()
    )
    for stop in STOPS:
        lefts = []
        for batched in (False, True):
            prefixes = PrefixCache(64 << 20, every=EVERY)
            generator = SpeculativeGenerator(
                model,
                byte_tokenizer(),
                draft=model,
                draft_length=4,
                prefix_cache=prefixes,
            )
            options: dict[str, Any] = {
                "max_tokens": LENGTH,
                "stop_tokens": (text.tokens[stop],),
                "kv_quantization": KVQuantization(8, 32, start=start),
            }
            if batched:
                (result,) = generator.generate_batch([prompt_of(23)], **options)
            else:
                result = generator.generate(prompt_of(23), **options)
            assert result.finish_reason == "stop"
            lefts.append([*left(prefixes, prompt_of(23) + result.tokens)])
        assert lefts == [[], []]


@pytest.mark.parametrize(
    ("error", "calls"), covering([ValueError, MemoryError, KeyboardInterrupt], [1, 4])
)
def test_a_cut_that_raises_ends_its_request_alone(
    error: type[BaseException], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, plain, left_calls = bench("qwen3_5"), ChunkQueue.cut, [calls]
    generator, _ = opened(made, "model")
    with BatchGenerator(generator) as batch:
        first, second = (
            batch.insert(prompt_of(p), **options_of(made, p, None)) for p in PROMPTS[:2]
        )

        def cut(self: ChunkQueue, outcome: Any) -> Any:
            if self is batch._rows[first].generation.chunks:
                left_calls[0] -= 1
                if left_calls[0] == 0:
                    raise error("no text")
            return plain(self, outcome)

        monkeypatch.setattr(ChunkQueue, "cut", cut)
        raised = 0
        while batch.running or batch.waiting:
            try:
                batch.next()
            except KeyboardInterrupt:
                raised += 1
        assert raised == (error is KeyboardInterrupt)
        failed = SpeculationError if error is KeyboardInterrupt else error
        assert isinstance(batch.error(first), failed)
        assert batch.error(second) is None
        for uid, prompt in zip((first, second), PROMPTS, strict=False):
            text = made.text(prompt, SAMPLINGS[0])
            result = batch.result(uid)
            assert result.tokens == text[: len(result.tokens)]
            known = prompt_of(prompt) + text
            assert result.cached_tokens == known[: len(result.cached_tokens)]
        assert len(batch.result(second).tokens) == LENGTH


@pytest.mark.parametrize(("method", "calls"), covering(["prepare", "commit"], [1, 3]))
def test_a_round_that_fails_after_its_cut_runs_again(
    method: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, left_calls = bench("qwen3_5"), [calls]
    plain: Any = getattr(BatchRound, method)
    generator, _ = opened(made, "model")
    with BatchGenerator(generator) as batch:
        uids = [
            batch.insert(prompt_of(p), **options_of(made, p, place))
            for p, place in zip(PROMPTS, (None, 7, 12), strict=True)
        ]

        def fails(self: BatchRound, keep: Any) -> None:
            if isinstance(keep, list) and self._lane is batch._groups[None]._lane:
                left_calls[0] -= 1
                if left_calls[0] == 0:
                    raise MemoryError("no room")
            plain(self, keep)

        monkeypatch.setattr(BatchRound, method, fails)
        raised = 0
        while batch.running or batch.waiting:
            try:
                batch.next()
            except MemoryError:
                raised += 1
        assert raised == 1
        for uid, prompt, place in zip(uids, PROMPTS, (None, 7, 12), strict=True):
            generator, _ = opened(made, "model")
            alone = generator.generate(
                prompt_of(prompt), **options_of(made, prompt, place)
            )
            assert batch.result(uid).text == alone.text
            assert batch.result(uid).tokens == alone.tokens


def test_a_request_without_a_prefix_cache_takes_no_restore_points() -> None:
    made = bench("qwen3_5")
    with BatchGenerator(made.generator("model")) as batch:
        uid = batch.insert(prompt_of(17), **options_of(made, 17, None))
        batch.next()
        row: BatchRequest = batch._rows[uid]
        assert row.request.target.points is None
