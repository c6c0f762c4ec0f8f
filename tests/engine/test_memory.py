"""The counted bytes of a generation are the sums worked out by hand."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_speculation import CascadeDraft, PrefixCache, SpeculativeGenerator
from mlx_speculation.caches import SlidingKVCache, Speculation, array_bytes
from mlx_speculation.caches.journals.ring import SAVED_ROWS
from mlx_speculation.engine import memory
from mlx_speculation.engine.memory import CacheSize
from mlx_speculation.errors import InvalidRequestError
from support.drafters.batch_heads import eagle_on
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = [(5 * i * i + 3) % 256 for i in range(21)]
HEADS, DIM = 2, 32
ROW = HEADS * 2 * DIM * 4  # keys and values of one position, float32


def write(cache: Any, rows: int) -> None:
    keys = mx.random.normal((1, HEADS, rows, DIM))
    shown = cache.update_and_fetch(keys, keys + 1)
    mx.eval(shown)


# A cache, the number of rows of each write, and the bytes that it then holds.
KINDS: dict[str, tuple[Any, list[int], int]] = {
    "kv": (KVCache, [250, 9], (250 + 256) * ROW),
    "concatenate": (ConcatenateKVCache, [5, 3], 8 * ROW),
    "ring": (lambda: RotatingKVCache(16), [1] * 20, 16 * ROW),
    "slack": (lambda: SlidingKVCache(16, 8), [5], 24 * ROW),
    # 8 bits a number, and a scale and a bias for each 32 of them.
    "quantized": (
        lambda: QuantizedKVCache(group_size=32, bits=8),
        [5],
        256 * (HEADS * 2 * (DIM + 2 * 4)),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_counts_as_it_is_allocated(kind: str) -> None:
    make, writes, expected = KINDS[kind]
    cache = make()
    assert array_bytes(cache) == 0
    for rows in writes:
        write(cache, rows)
    assert array_bytes(cache) == expected
    assert array_bytes([cache, cache], CacheList(make(), cache)) == expected


def test_recurrent_slots_count_with_what_stands_beside_them() -> None:
    cache: Any = ArraysCache(2, left_padding=[0])
    cache[0] = mx.zeros((1, 3, 8))
    cache.lengths = mx.array([3])
    assert array_bytes(cache) == 3 * 8 * 4 + 4 + 4


def test_a_round_holds_what_it_undoes() -> None:
    """A round holds old rows of a ring and old states, but nothing of a `KVCache`."""

    def held_in_a_round(cache: Any, rows: int) -> int:
        with Speculation([cache]) as speculation:
            write(speculation.caches[0], rows)
            return speculation.nbytes

    cache, ring = KVCache(), RotatingKVCache(16)
    write(cache, 5)
    for _ in range(20):
        write(ring, 1)
    assert held_in_a_round(cache, 4) == 0
    assert held_in_a_round(ring, 4) == 16 * ROW  # the arrays before the round
    assert held_in_a_round(ring, 1) == min(SAVED_ROWS, 16 - ring._idx) * ROW
    state: Any = ArraysCache(1)
    state[0] = mx.zeros((1, 3, 8))
    with Speculation([state], whole=True) as speculation:
        speculation.caches[0][0] = mx.ones((1, 3, 8))
        assert speculation.nbytes == 3 * 8 * 4


def weights(model: nn.Module) -> int:
    arrays: Any = tree_flatten(model.parameters())
    return sum(array.size * 4 for _, array in arrays)


def generator(name: str, draft: Any, **options: Any) -> SpeculativeGenerator:
    return SpeculativeGenerator(build(name), byte_tokenizer(), draft=draft, **options)


def test_a_result_counts_target_and_draft_apart() -> None:
    draft = build("llama", seed=7)
    made = generator("llama", draft, draft_length=3)
    memory = made.generate(PROMPT, max_tokens=20).memory
    layers, row = kv_shape(draft)
    assert memory.target_weights == weights(made.model)
    assert memory.draft_weights == weights(draft)
    assert memory.target_caches == memory.draft_caches == layers * 256 * row
    assert memory.rounds == memory.prefix_cache == 0
    parts = memory.target_weights + memory.draft_weights
    assert memory.total == parts + memory.target_caches + memory.draft_caches


def kv_shape(model: Any) -> tuple[int, int]:
    """Return the number of a model's layers, and the bytes of a position in a layer."""
    args = model.args
    dim = args.head_dim or args.hidden_size // args.num_attention_heads
    return args.num_hidden_layers, args.num_key_value_heads * dim * 2 * 4


def test_weights_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch rows end often, and listing the weights of an 8B model takes 4 ms."""
    made = generator("llama", build("llama", seed=7), draft_length=2)
    first = made.generate(PROMPT, max_tokens=8).memory
    looks: list[Any] = []
    monkeypatch.setattr(type(made.model), "parameters", lambda self: looks.append(self))
    assert made.generate(PROMPT, max_tokens=8).memory == first
    assert looks == []


def test_a_draft_weighs_what_it_has_beside_the_target() -> None:
    small, itself = build("llama", seed=7), build("llama")
    made = SpeculativeGenerator(itself, byte_tokenizer(), draft=itself, draft_length=2)
    assert made.generate(PROMPT, max_tokens=8).memory.draft_weights == 0
    memory = generator("llama", "lookup").generate(PROMPT, max_tokens=8).memory
    assert memory.draft_weights == memory.draft_caches == 0
    cascade = generator("llama", CascadeDraft("lookup", small), draft_length=2)
    memory = cascade.generate(PROMPT, max_tokens=8).memory
    assert memory.draft_weights == weights(small)
    assert memory.draft_caches > 0
    few = generator("llama", small, draft_length=2, draft_vocabulary=range(50))
    memory = few.generate(PROMPT, max_tokens=8).memory
    assert memory.draft_weights == weights(small) + 50 * small.args.hidden_size * 4


def test_rounds_of_recurrent_layers_hold_states_and_inputs() -> None:
    """Rounds hold states, and with drafts also inputs; a prefill holds no inputs."""
    model = build("qwen3_5")
    round_bytes = {}
    for length in (0, 1, 4):
        made = generator("qwen3_5", model, draft_length=length)
        round_bytes[length] = made.generate(PROMPT * 4, max_tokens=12).memory.rounds
    caches: Any = model.make_cache()
    model(mx.array([PROMPT]), cache=caches)
    states = array_bytes([c for c in caches if isinstance(c, ArraysCache)])
    assert round_bytes[0] == states
    assert (
        round_bytes[4] > round_bytes[1] > 2 * states
    )  # states of target and draft model


def test_a_prefix_cache_counts_what_it_keeps() -> None:
    prefixes = PrefixCache(1 << 24)
    made = generator("llama", None, prefix_cache=prefixes)
    assert made.generate(PROMPT, max_tokens=8).memory.prefix_cache == 0
    kept = prefixes.nbytes
    assert kept > 0
    assert made.generate(PROMPT, max_tokens=8).memory.prefix_cache == kept


def test_an_error_and_a_closed_stream_have_a_count_too() -> None:
    stream = generator("llama", None).stream(PROMPT)
    stream.close()
    assert stream.result.memory.target_caches == 0
    assert stream.result.memory.target_weights > 0


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
def test_what_a_prompt_needs_is_known_before_it_is_read(name: str) -> None:
    """The estimate is exact but for convolution states and growth blocks of caches."""
    model = build(name)
    size, caches = CacheSize.of(model), make_prompt_cache(model)
    for tokens in (512, 1024):
        model(mx.zeros((1, 512), mx.int32), cache=caches)
        used_bytes = array_bytes(caches)
        assert size.row * tokens + size.states <= used_bytes * 1.1
        assert (
            used_bytes <= (size.row * tokens + size.states) * 1.1 + 512 * size.row * 2
        )


@pytest.mark.parametrize("drafter", ["none", "model", "head"])
def test_a_prompt_that_does_not_fit_is_refused_with_numbers(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("qwen3_5", layers=4)
    draft: Any = None
    sizes = [CacheSize.of(model)]
    if drafter == "model":
        draft = build("qwen3_5", seed=7)
        sizes.append(CacheSize.of(draft))
    elif drafter == "head":
        draft = eagle_on(model, "specforge")
        sizes.append(CacheSize(row=sizes[0].layer))
    ours = SpeculativeGenerator(
        model,
        byte_tokenizer(),
        draft=draft,
        draft_length=2 if draft else None,
        prefix_cache=PrefixCache(50_000, every=64),
    )
    before = mx.get_active_memory()
    needed = sum(size.row * 1000 + size.states for size in sizes) + 50_000
    for free in (needed, needed - 1):
        monkeypatch.setattr(memory, "free_memory", lambda free=free: free)
        if free == needed:
            ours.stream([1] * 1000).close()
            continue
        with pytest.raises(InvalidRequestError, match=r"1000 tokens.* GB are free"):
            ours.stream([1] * 1000)
    assert mx.get_active_memory() - before < 10_000
    assert ours.generate([1] * 30, max_tokens=2).tokens
