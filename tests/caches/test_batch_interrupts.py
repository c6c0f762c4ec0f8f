"""Ctrl-C between any two lines of a round of a batch does not change any row.

The interrupts are raised as in tests/caches/test_interrupts.py.
"""

from pathlib import Path
from typing import Any

import mlx_lm.models.cache
import pytest

from mlx_speculation.caches import Speculation, journal
from support.caches.batch_twins import AttentionKind, sees
from support.caches.cache_twins import Rows, assert_same, read
from support.covering import covering
from support.processes.interrupts import raised_at

TRACED = (mlx_lm.models.cache.__file__, str(Path(journal.__file__).parent))
RING = AttentionKind(window=5, step=2)

# (kind, number of positions of each row at first, number of single writes after that)
BATCHES: dict[str, tuple[AttentionKind, list[int], int]] = {
    "an empty batch": (AttentionKind(step=4), [0, 0, 0], 0),
    "a batch that grows": (AttentionKind(step=4), [7, 0, 2], 0),
    "an empty ring": (RING, [0, 0, 0], 0),
    "a ring that grows": (RING, [3, 1, 0], 0),
    "a ring about to wrap": (RING, [3, 1, 0], 2),
    "a wrapped ring": (RING, [4, 1, 0], 3),
    "a ring that was merged full": (RING, [9, 5, 2], 0),
}


def rows(starts: list[int], width: int, serial: int) -> list[Rows]:
    return [Rows(at, tuple(range(serial, serial + width))) for at in starts]


def prepared(name: str) -> tuple[AttentionKind, Any, list[int]]:
    """Return a kind, a batch cache of it, and the number of tokens of each row."""
    kind, lengths, singly = BATCHES[name]
    alone = [kind.single() for _ in lengths]
    for cache, length in zip(alone, lengths, strict=True):
        if length:
            kind.write(cache, rows([0], length, 1))
    batch = kind.merge(alone)
    for step in range(singly):
        kind.write(batch, rows([length + step for length in lengths], 1, 99))
    return kind, batch, [length + singly for length in lengths]


# Rounds: the widths of the forwards, and the number of tokens that each row keeps.
ROUNDS = [((1, 1, 1), [2, 0, 1]), ((1, 4), [3, 1, 0]), ((3, 1), [2, 2, 2])]


@pytest.mark.parametrize(("name", "round_"), covering(BATCHES, ROUNDS))
def test_an_interrupted_round_leaves_every_row_as_it_was(
    name: str, round_: tuple[tuple[int, ...], list[int]]
) -> None:
    widths, keep = round_
    kind, cache, starts = prepared(name)

    def contents() -> Any:
        return [kind.fields(cache), sees(kind, cache, starts, 2)]

    def action() -> None:
        with Speculation([cache]) as speculation:
            after = 0
            for width in widths:
                at = [start + after for start in starts]
                kind.write(speculation.caches[0], rows(at, width, 500))
                after += width
            speculation.commit(keep)

    def leaving(frame: Any) -> bool:
        return bool(frame.f_code.co_name == "__exit__")  # the commit is complete

    seen = [contents()]
    while (
        raised_at(len(seen), KeyboardInterrupt(), TRACED, action, leaving) is not None
    ):
        seen.append(contents())
    before, *after = read(seen)  # one evaluation
    for line, each in enumerate(after, 1):
        assert_same(each, before, f"interrupted at line {line}")
    assert len(after) > 50
