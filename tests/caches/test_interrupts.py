"""Ctrl-C between any two lines of a round does not change the caches.

A signal can arrive anywhere, so a trace function raises the interrupt at one line after
another of mlx-lm's caches and the journals, until a round ends without an interrupt.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache
import mlx_lm.models.deepseek_v41
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.caches import Speculation, holds_trees, journal
from mlx_speculation.caches.types import tree_view
from mlx_speculation.models import ModelHooks
from support.caches.cache_twins import (
    Kind,
    KVKind,
    ListKind,
    RingKind,
    Rows,
    SlidingKind,
    assert_same,
    read,
)
from support.caches.contents import assert_same_content, content
from support.caches.rare_cache_twins import (
    ChunkedKind,
    ConcatenateKind,
    LayerKind,
    QuantizedKind,
    attentions,
)
from support.covering import covering
from support.models.tiny_models import build
from support.processes.interrupts import raised_at

TRACED = (
    mlx_lm.models.cache.__file__,
    mlx_lm.models.deepseek_v41.__file__,
    str(Path(journal.__file__).parent),
    tree_view.__file__,
)

PROBES = (2, 6)  # how many rows `content` writes to a copy of the cache
PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(20)]
(COMPRESSING, *_) = attentions()

KINDS: dict[str, tuple[Kind, list[int]]] = {
    "an empty KV cache": (KVKind(4), []),
    "a KV cache that grows": (KVKind(4), [7]),
    "an empty ring": (RingKind(5), []),
    "a ring that grows": (RingKind(5), [3]),
    "a ring about to wrap": (RingKind(5), [1, 1, 1, 1]),
    "a wrapped ring": (RingKind(5, keep=1), [1] * 7),
    "a ring longer than its window": (RingKind(5), [4, 4]),
    "an empty sliding cache": (SlidingKind(5, 2), []),
    "a sliding cache with room": (SlidingKind(5, 20), [7]),
    "a sliding cache without room": (SlidingKind(5, 1), [6]),
    "a list": (ListKind((KVKind(4), RingKind(5))), [1] * 7),
    "an empty quantized cache": (QuantizedKind(4, 8), []),
    "a quantized cache that grows": (QuantizedKind(4, 8), [7]),
    "an empty concatenated cache": (ConcatenateKind(), []),
    "a concatenated cache": (ConcatenateKind(), [3]),
    "an empty chunk": (ChunkedKind(5, 4), []),
    "a chunk that grows": (ChunkedKind(12, 4), [7]),
    "a chunk that is outgrown in the round": (ChunkedKind(5, 4), [4]),
    "a full chunk": (ChunkedKind(5, 4), [4, 4]),
    "an empty compressing layer": (LayerKind(COMPRESSING, 3), []),
    "a compressing layer": (LayerKind(COMPRESSING, 3), [1] * 7),
}


def leaving(frame: FrameType) -> bool:
    # No interrupt is raised there: the commit is complete, and stays.
    return frame.f_code.co_name == "__exit__"


def at_every_line(action: Callable[[], object]) -> Iterator[int]:
    """Interrupt an action at every line, and yield after each interrupt."""
    line, error = 1, KeyboardInterrupt()
    while raised_at(line, error, TRACED, action, leaving) is not None:
        yield line
        line += 1
    assert line > 10


def prepared(name: str) -> tuple[Kind, Any, int]:
    """Return a kind, a cache of it that holds rows, and their number."""
    kind, prefill = KINDS[name]
    cache = kind.make()
    position = 0
    for width in prefill:
        kind.forward(cache, rows(position, width, 0))
        position += width
    return kind, cache, position


def rows(position: int, width: int, serial: int) -> Rows:
    return Rows(position, tuple(range(serial, serial + width)))


def assert_all_same(by_line: dict[int, Any], expected: Any) -> None:
    """Require equal contents after an interrupt at each line, in one evaluation."""
    lines = read([expected, *by_line.values()])
    for line, each in zip(by_line, lines[1:], strict=True):
        assert_same(each, lines[0], f"interrupted at line {line}")


@pytest.fixture(autouse=True)
def _hooked() -> Iterator[None]:
    owner = ModelHooks(COMPRESSING)
    yield
    owner.remove()


# Rounds: the widths of the forwards, and the number of rows to keep.
ROUNDS = [
    ((1, 1, 1), 0),
    ((1, 1, 1), 2),
    ((3, 1), 2),
    ((1, 4), 3),
    ((1,) * 7, 1),
]
ISOLATED = [((1, 1), 1), ((1, 4), 3)]
# For each type of cache, the case with the most lines in a round.
BUSIEST = (
    *("a KV cache that grows", "a wrapped ring", "a sliding cache without room"),
    *("a list", "a quantized cache that grows", "a concatenated cache"),
    *("a chunk that is outgrown in the round", "a compressing layer"),
)


@pytest.mark.parametrize(
    ("name", "round_", "isolated"),
    [
        *covering(KINDS, ROUNDS, [False]),
        *covering(KINDS, ISOLATED, [True], quick=(0, BUSIEST)),
    ],
)
def test_an_interrupted_round_leaves_the_cache_as_it_was(
    name: str, round_: tuple[tuple[int, ...], int], isolated: bool
) -> None:
    widths, keep = round_
    kind, cache, position = prepared(name)
    before = [kind.content(cache, probe) for probe in PROBES]
    by_line: list[dict[int, Any]] = [{} for _ in PROBES]

    def action() -> None:
        with Speculation([cache], isolated=isolated) as speculation:
            at = position
            for width in widths:
                kind.forward(speculation.caches[0], rows(at, width, 500))
                at += width
            speculation.commit(keep)

    for line in at_every_line(action):
        # One width of `PROBES` for each line is enough: all lines interrupt rounds of
        # the same cache, so damage that one width does not show stays for the other.
        which = line % len(PROBES)
        by_line[which][line] = kind.content(cache, PROBES[which])
    for each, expected in zip(by_line, before, strict=True):
        assert_all_same(each, expected)


@pytest.mark.parametrize("name", KINDS)
def test_an_interrupted_round_with_a_tree_leaves_the_cache_as_it_was(name: str) -> None:
    kind, cache, position = prepared(name)
    if not holds_trees([cache]):
        return
    before = kind.content(cache, PROBES[0])

    def action() -> None:
        with Speculation([cache]) as speculation:
            kind.forward(speculation.caches[0], rows(position, 5, 500))
            speculation.move([0, 2, 4])
            speculation.commit(3)

    lines = at_every_line(action)
    assert_all_same({line: kind.content(cache, PROBES[0]) for line in lines}, before)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss"])
def test_an_interrupted_round_of_a_model_leaves_its_caches_as_they_were(
    name: str,
) -> None:
    """At some interrupts a part of the layers has committed; all are undone."""
    model = build(name)
    owner, caches = ModelHooks(model), make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=caches)

    def action() -> None:
        with Speculation(caches) as speculation:
            model(mx.array([PROMPT[:4]]), cache=speculation.caches)
            speculation.commit(2)

    before = content(caches)
    for _ in at_every_line(action):
        assert_same_content(before, content(caches))
    owner.remove()
