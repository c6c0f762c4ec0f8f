"""Costs of choosing, as counts and sizes."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_speculation.samplers.noise import gumbel
from mlx_speculation.samplers.row_context import KnownTokens, Rows


def test_the_draw_of_a_width_is_traced_once() -> None:
    assert gumbel._gumbel(48) is gumbel._gumbel(48)


def test_a_growing_text_is_moved_seldom() -> None:
    tokens, text = KnownTokens(), [0] * 100
    buffers = [tokens._buffer]
    for token in range(5_000):
        text.append(token)
        tokens.since(text)
        if tokens._buffer is not buffers[-1]:
            buffers.append(tokens._buffer)
    assert len(buffers) <= 6


class Counting(KnownTokens):
    def __init__(self) -> None:
        super().__init__()
        self.read_counts: list[int] = []

    def since(self, known: Sequence[int], begin: int = 0) -> Any:
        tokens = super().since(known, begin)
        self.read_counts.append(len(tokens))
        return tokens


def test_a_window_reads_no_more_of_the_text_than_it_shows() -> None:
    counting = Counting()
    rows = Rows(list(range(1_000)), mx.array([1, 2, 3], mx.uint32), count=4)
    rows.windows(20, counting)
    rows.windows(0, counting)
    assert counting.read_counts == [20, 1_000]
