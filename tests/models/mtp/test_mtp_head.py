"""Heads of every family: pairing, history rows, caches, own ends."""

import io
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation.caches import Speculation, check_supported, leaves, with_slack
from mlx_speculation.models import HiddenStates
from mlx_speculation.models.checkpoints.convention import MtpConvention
from mlx_speculation.models.mtp.head import Mtp, MtpHead
from support.covering import others_slow
from support.models.mtp_checkpoints import EACH_KIND, LAYOUTS, family, flat, make

DIM, VOCAB = 64, 256
SLOTS = 21  # more than a window of 16

Build = Callable[[str], Mtp]


@pytest.fixture(name="built", scope="module")
def _built() -> Build:
    @cache
    def one(name: str) -> Mtp:
        _, target, head = make(name)
        head.convention = family(LAYOUTS[name]).convention
        return Mtp(head, HiddenStates(target, after_norm=True))

    return one


def rows(seed: int = 0) -> tuple[mx.array, mx.array]:
    """Return hidden states and tokens of some slots."""
    states, ids = mx.random.split(mx.random.key(seed))
    hidden = mx.random.normal((1, SLOTS, DIM), key=states)
    return hidden, mx.random.randint(0, VOCAB, (1, SLOTS), key=ids)


def content(caches: list[Any]) -> list[mx.array]:
    """Return the keys and values that caches hold."""
    held = [leaf.keys_and_values() for _, leaf in leaves(caches)]
    return [array for pair in held for array in pair]


def equal(left: list[mx.array], right: list[mx.array]) -> bool:
    """Return whether two lists of arrays are the same, bit for bit."""
    return all(mx.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", others_slow(LAYOUTS, EACH_KIND))
def test_rows_of_history_leave_what_whole_rows_leave(name: str, built: Build) -> None:
    """Whole rows, rows of history, and one batch that ends in a whole row."""
    mtp, (hidden, tokens) = built(name), rows()
    for layer in range(len(mtp.head.layers)):
        made = [mtp.head.new_caches()[layer] for _ in range(3)]
        whole = mtp.rows(hidden[:, :-1], tokens[:, :-1], made[0], layer)
        mx.eval(*whole)
        mtp.history(hidden[:, :-1], tokens[:, :-1], made[1], layer)
        last = [
            mtp.rows(hidden[:, -1:], tokens[:, -1:], caches, layer)
            for caches in made[:2]
        ]
        last.append(mtp.step(hidden, tokens, made[2], layer))
        assert last[0].logits.shape == (1, 1, VOCAB)
        assert last[0].recycled.shape == (1, 1, DIM)
        for other in (1, 2):
            assert equal(list(last[0]), list(last[other]))
            assert equal(content(made[0]), content(made[other]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_history_need_neither_attention_nor_mlp(
    name: str, built: Build
) -> None:
    mtp, (hidden, tokens) = built(name), rows()
    caches = mtp.head.new_caches()[0]
    mtp.history(hidden, tokens, caches)
    keys_and_values = _operations(*content(caches))
    whole = _operations(*mtp.rows(hidden, tokens, mtp.head.new_caches()[0]))
    heavy = {"ScaledDotProductAttention", "Softmax", "GatherMM", "Sigmoid"}
    assert not keys_and_values.keys() & heavy
    assert whole.keys() & heavy
    # The projection, and one or two for keys, values or latents, and an indexer.
    assert 2 <= _products(keys_and_values) <= 4
    assert _products(whole) >= _products(keys_and_values) + 3


def _products(operations: dict[str, int]) -> int:
    return operations.get("Matmul", 0) + operations.get("AddMM", 0)


def _operations(*arrays: mx.array) -> dict[str, int]:
    """Return how often each operation is in the graph of some arrays."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    counts: dict[str, int] = {}
    for line in text.getvalue().splitlines():
        if "label" in line and "rectangle" in line:
            name = line.split('label ="')[-1].split('"')[0]
            counts[name] = counts.get(name, 0) + 1
    return counts


@pytest.mark.parametrize("name", others_slow(LAYOUTS, EACH_KIND))
def test_slots_one_by_one_are_as_slots_at_once(name: str, built: Build) -> None:
    mtp, (hidden, tokens) = built(name), rows()
    for layer in range(len(mtp.head.layers)):
        together = mtp.rows(hidden, tokens, mtp.head.new_caches()[layer], layer)
        caches = mtp.head.new_caches()[layer]
        for slot in range(SLOTS):
            one = slice(slot, slot + 1)
            single = mtp.step(hidden[:, one], tokens[:, one], caches, layer)
            for apart, all_of_it in zip(single, together, strict=True):
                assert mx.allclose(apart, all_of_it[:, one], atol=2e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_half_of_the_projection_reads_its_own_input(
    name: str, built: Build
) -> None:
    """With one half of the columns zero, the other input alone matters."""
    mtp, (hidden, tokens) = built(name), rows()
    other_hidden, other_tokens = rows(1)
    first_is_embedding = mtp.head.convention.order == "embedding_first"
    assert first_is_embedding == (name != "mimo")
    layer = mtp.head.layers[0]
    whole = layer.proj.weight
    halves = {
        "token": slice(0, DIM) if first_is_embedding else slice(DIM, None),
        "hidden": slice(DIM, None) if first_is_embedding else slice(0, DIM),
    }
    try:
        for read, columns in halves.items():
            layer.proj.weight = mx.zeros_like(whole)
            layer.proj.weight[:, columns] = whole[:, columns]
            base = _logits(mtp, hidden, tokens)
            by_token = mx.array_equal(base, _logits(mtp, hidden, other_tokens))
            by_hidden = mx.array_equal(base, _logits(mtp, other_hidden, tokens))
            assert (bool(by_token), bool(by_hidden)) == (
                read != "token",
                read != "hidden",
            )
    finally:
        layer.proj.weight = whole


def _logits(mtp: Mtp, hidden: mx.array, tokens: mx.array) -> mx.array:
    return mtp.rows(hidden, tokens, mtp.head.new_caches()[0]).logits


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_caches_of_a_head_can_be_rolled_back(name: str, built: Build) -> None:
    mtp, (hidden, tokens) = built(name), rows()
    kept, seen = with_slack(mtp.head.new_caches()[0]), mtp.head.new_caches()[0]
    check_supported(kept)
    for start, stop, keep in ((0, 17, 17), (17, 21, 2), (19, 21, 1)):
        with Speculation(kept) as speculation:
            part = slice(start, stop)
            mtp.rows(hidden[:, part], tokens[:, part], speculation.caches)
            speculation.commit(keep)
        part = slice(start, start + keep)
        mtp.rows(hidden[:, part], tokens[:, part], seen)
    last = [mtp.step(hidden[:, 20:], tokens[:, 20:], each) for each in (kept, seen)]
    assert mx.allclose(last[0].logits, last[1].logits, atol=2e-4)


def test_the_state_that_is_recycled_is_the_convention_s(built: Build) -> None:
    mtp, (hidden, tokens) = built("glm4_moe"), rows()
    after = mtp.rows(hidden, tokens, mtp.head.new_caches()[0])
    before_head = MtpHead(mtp.head.layers, MtpConvention(recycled="before_norm"))
    other = Mtp(before_head, mtp._ends)
    before = other.rows(hidden, tokens, other.head.new_caches()[0])
    assert mx.array_equal(before.logits, after.logits)
    norm = mtp.head.layers[0].final
    assert mx.array_equal(norm(before.recycled), after.recycled)
    assert not mx.array_equal(before.recycled, after.recycled)
    assert mx.array_equal(mtp._ends.head(after.recycled), after.logits)


def test_a_head_without_a_last_norm_recycles_what_it_has(built: Build) -> None:
    mtp, (hidden, tokens) = built("ernie4_5_moe"), rows()
    found = mtp.rows(hidden, tokens, mtp.head.new_caches()[0])
    assert mx.array_equal(mtp._ends.head(found.recycled), found.logits)
    assert not any(".final." in name for name in flat(mtp.head))


class Refusing:
    """Ends that must not be asked."""

    def embed(self, tokens: mx.array) -> mx.array:
        """Refuse."""
        raise AssertionError("embed was asked")

    def head(self, hidden: mx.array) -> mx.array:
        """Refuse."""
        raise AssertionError("head was asked")


def test_ends_of_its_own_are_used(built: Build) -> None:
    hidden, tokens = rows()
    longcat, step = built("longcat_flash"), built("step3p5")
    with pytest.raises(AssertionError, match="head was asked"):
        Mtp(longcat.head, Refusing()).rows(hidden, tokens, longcat.head.new_caches()[0])
    with pytest.raises(AssertionError, match="embed was asked"):
        Mtp(step.head, Refusing()).rows(hidden, tokens, step.head.new_caches()[0])
    step_ends = step._ends

    class EmbeddingOnly(Refusing):
        def embed(self, tokens: mx.array) -> mx.array:
            """Embed as the target does."""
            return step_ends.embed(tokens)

    own = Mtp(step.head, EmbeddingOnly())
    for k, caches in enumerate(own.head.new_caches()):
        out = own.rows(hidden, tokens, caches, k)
        layer = own.head.layers[k]
        assert mx.array_equal(out.logits, layer.output(layer.final(out.recycled)))
    layers = step.head.layers
    logits = [
        step.rows(hidden, tokens, caches, k).logits
        for k, caches in enumerate(step.head.new_caches())
    ]
    assert len(layers) == len(logits) == 3
    assert not mx.array_equal(logits[0], logits[1])


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_are_of_the_kind_that_the_family_has(name: str, built: Build) -> None:
    head = built(name).head
    kinds = [type(block).__name__ for block in head.layers[0].blocks]
    caches = [type(cache).__name__ for cache in head.new_caches()[0]]
    names = flat(head)
    experts = any(".switch_mlp." in n for n in names)
    dense = {
        "qwen3_5", "mimo", "mimo_v2_flash", "ernie4_5_moe", "longcat_flash",
        "step3p5", "exaone_moe",
    }  # fmt: skip
    assert experts == (name not in dense)
    sliding = {"mimo_v2_flash", "step3p5", "exaone_moe"}
    pairs = {"deepseek_v32", "glm_moe_dsa"}
    expected = (
        "RotatingKVCache"
        if name in sliding
        else "CacheList"
        if name in pairs
        else "KVCache"
    )
    assert caches == [expected]
    if name in sliding:
        (made,) = head.new_caches()[0]
        assert made.max_size == 16
    assert len(kinds) == (2 if name == "nemotron_h" else 1)
    assert not any("linear_attn" in n or "conv1d" in n for n in names)


def test_a_module_of_a_head_is_a_module(built: Build) -> None:
    head = built("qwen3_5").head
    assert isinstance(head, nn.Module)
    assert len(flat(head)) == 15
