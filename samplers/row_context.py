"""Tokens before each row of logits, and the position of the token that it chooses.

A row of logits chooses the token after a prefix of one sequence. The token's position
decides the noise, and the prefix decides how processors change the row. Some tokens of
the prefix are on the device only: drafted tokens, and a chosen token not yet read.

    known   t_0 .. t_n      committed, on the host
    ahead   d_1 d_2 d_3     on the device, not read
    count   4               rows follow t_n, d_1, d_2, d_3: the positions n + 1 .. n + 4
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


class KnownTokens:
    """The known tokens of one sequence as an array, each converted once.

    Converting 100,000 Python integers takes milliseconds. So this copy grows with its
    list, whose earlier tokens must not change. Another list object starts a new copy.
    """

    def __init__(self) -> None:
        self._source: Sequence[int] = ()
        self._buffer: NDArray[np.int32] = np.empty(256, dtype=np.int32)
        self._count = 0

    def since(self, known: Sequence[int], begin: int = 0) -> NDArray[np.int32]:
        """Return `known[begin:]`, int32; valid until the next call."""
        count = len(known)
        if known is not self._source:
            self._source, self._count = known, 0
        if count > len(self._buffer):
            larger = np.empty(2 * count, dtype=np.int32)
            larger[: self._count] = self._buffer[: self._count]
            self._buffer = larger
        self._buffer[self._count : count] = known[self._count :]
        self._count = count
        return self._buffer[begin:count]


@dataclass(frozen=True, slots=True)
class Windows:
    """The last tokens before each row."""

    # uint32 [count, size], the latest token last; any id where `valid` is false
    tokens: mx.array
    valid: mx.array  # bool [count, size], false before the start of the row's prefix


@dataclass(frozen=True, slots=True)
class Rows:
    """The last `count` prefixes of `known` and `ahead` together, one for each row."""

    known: Sequence[int]  # the token ids that the host knows
    # uint32 [m], the tokens after the known ones, not read; None: no tokens
    ahead: mx.array | None = None
    # The number of rows, at least 1 and at most the number of prefixes; the empty
    # prefix is one of them only if `start` is above 0
    count: int = 1
    start: int = 0  # how many tokens precede the known ones; their ids are unknown
    # bool [count, ids], which ids each row may choose; None: all
    allowed: mx.array | None = None

    @property
    def lead(self) -> int:
        """Number of tokens in `ahead`."""
        return 0 if self.ahead is None else self.ahead.shape[0]

    @property
    def positions(self) -> range:
        """The position of the token that each row chooses, counted from 0."""
        stop = self.start + len(self.known) + self.lead + 1
        return range(stop - self.count, stop)

    @property
    def round_start(self) -> int:
        """The position of the first token that the host does not know."""
        return self.start + len(self.known)

    @property
    def lengths(self) -> range:
        """Number of tokens of `known` and `ahead` before each row."""
        stop = len(self.known) + self.lead + 1
        return range(stop - self.count, stop)

    def some(self, index: int, count: int = 1) -> "Rows":
        """Return `count` of the rows, from `index` on."""
        length = self.lengths[index + count - 1]
        mask = self.allowed
        allowed = None if mask is None else mask[index : index + count]
        more = length - len(self.known)
        known = self.known if more >= 0 else self.known[:length]
        ahead = self.ahead[:more] if self.ahead is not None and more > 0 else None
        return Rows(known, ahead, count, self.start, allowed)

    def windows(self, size: int, known: KnownTokens | None = None) -> Windows:
        """Return the last `size` tokens before each row, or all of them for size 0."""
        first = self.lengths[0]
        size = size or max(self.lengths[-1], 1)
        begin = max(first - size, 0)
        tail = self._since(begin, known)
        offset = first - size - begin  # of the first row's window in the tail, <= 0
        steps = mx.arange(offset, offset + size)[None]
        index = steps + mx.arange(self.count)[:, None]
        return Windows(tail[mx.maximum(index, 0)].astype(mx.uint32), index >= 0)

    def prefixes(self, known: KnownTokens | None = None) -> list[mx.array]:
        """Return the tokens before each row, int32 [n] as in mlx-lm."""
        whole = self._since(0, known)
        return [whole[:length] for length in self.lengths]

    def _since(self, begin: int, tokens: KnownTokens | None) -> mx.array:
        """Return all tokens from `begin` on, int32; a single 0 if there are none."""
        known: Any
        if tokens is not None:
            known = tokens.since(self.known, begin)
        else:
            known = np.array(self.known[begin:], dtype=np.int32)
        if self.ahead is None:
            return mx.array(known if len(known) else np.zeros(1, dtype=np.int32))
        ahead = self.ahead.astype(mx.int32)[max(begin - len(self.known), 0) :]
        return mx.concatenate([mx.array(known), ahead]) if len(known) else ahead
