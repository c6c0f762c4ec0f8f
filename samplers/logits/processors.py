"""Logits processors for the rows of a round, with the results of plain decoding.

A processor of mlx-lm is a callable (tokens [n], logits [1, vocab]) -> logits. Plain
decoding calls it once per token. A round has a row for every drafted token, and many
drafted tokens are rejected. The kind of a processor decides when it may be called:

    pure        the result depends on the arguments alone: mlx-lm's own processors, and
                those wrapped by `pure`. Called for all rows; the host waits for none.
    forkable    can copy and restore its state, see `ForkableProcessor`. Called for all
                rows in order; then the state after the emitted tokens is restored.
    serial      every other callable. Called for a row only when the choice before it
                is known to be emitted, so exactly as often as in plain decoding.

Drafts call pure and forkable processors, the latter on a copy of the state.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.samplers.logits.penalties import Penalties
from mlx_speculation.samplers.logits.processor_kinds import is_forkable, is_serial
from mlx_speculation.samplers.row_context import KnownTokens, Rows
from mlx_speculation.samplers.sampling import LogitsProcessor, Sampling

States = tuple[Any, ...]  # of the forkable processors, in their order


@dataclass(frozen=True, slots=True)
class _Called:
    """Results of a row's calls, kept for a round that fails and runs again."""

    logits: mx.array
    states: States


class Processors:
    """The processors of one request: bias and penalties, then the user's in order.

    Calls of a round:

        before = processors.fork()
        logits = processors.apply(logits, rows)       # or next() of serial() for a row
        processors.keep(emitted)                      # the number of emitted tokens
        processors.restore(before)                    # instead, if the round has failed

    A plain step has one row, whose token is always emitted, so it needs no `keep`. The
    user's processors get logits of the target's `width`, also from a draft.

    Raises:
        InvalidRequestError: the logit bias or XTC's special tokens name an id that
            the target does not have.
    """

    def __init__(self, sampling: Sampling, width: int) -> None:
        _check_ids("logit_bias", [token for token, _ in sampling.biases], width)
        _check_ids("xtc_special_tokens", sampling.xtc_special_tokens, width)
        self._width = width
        self._penalties = Penalties(sampling)
        self._users = sampling.logits_processors
        # Whether logits are changed at all
        self.active = self._penalties.active or bool(self._users)
        self._forkable: list[Any] = [user for user in self._users if is_forkable(user)]
        # Whether all rows can be processed at once. If not, plain steps use `serial`
        # too, after the host has read the last token.
        self.parallel = not any(is_serial(processor) for processor in self._users)
        # Whether a failed round or a rejected draft can change a processor's state
        self.has_state = bool(self._forkable) or not self.parallel
        self._known = KnownTokens()
        self._after: dict[int, States] = {}  # by position, after its row
        self._drafted: dict[int, States] = {}  # by position, after its drafted token
        self._last = range(0)  # the positions of the rows processed last
        # By the tokens between the known text and the row
        self._called: dict[tuple[int, ...], _Called] = {}
        self._called_after = 0  # the length of that known text

    def apply(self, logits: mx.array, rows: Rows) -> mx.array:
        """Process all rows [rows, vocab], without writing to them. Needs `parallel`.

        The state is then that after the last row; call `keep` or `restore` next.
        """
        assert self.parallel, "serial processors go row by row"
        self._begin(rows)
        return self._apply(logits, rows, self._users, self._after)

    def for_draft(self, logits: mx.array, rows: Rows) -> mx.array:
        """Process a draft's logits with all but the serial processors.

        The state does not change. Within a round, a row starts from the state after the
        row drafted before it.
        """
        users = [user for user in self._users if not is_serial(user)]
        if not self._forkable:
            return self._apply(logits, rows, users, {})
        live, first = self.fork(), rows.positions[0]
        drafted = self._drafted
        if first <= rows.round_start:  # `live` can be the state after a step in flight
            drafted = self._drafted = {}
            self.restore(self._after.get(first - 1, live))
        else:
            self.restore(drafted.get(first - 1, live))
        try:
            return self._apply(logits, rows, users, drafted)
        finally:
            self.restore(live)

    def serial(self, logits: mx.array, rows: Rows) -> Iterator[mx.array]:
        """Process row after row: processors are called when their row is asked for.

        Ask for a row only when the choice before it is known to be emitted and does not
        end the text. If the round fails and runs again, the results of its calls are
        used again. Each row yields [1, vocab]; the logits [rows, vocab] are not written
        to. Reads the drafted tokens once. All known tokens must precede each row.
        """
        drafted: Any = [] if rows.ahead is None else rows.ahead.tolist()
        self._forget_committed(rows.known)
        self._begin(rows)
        logits = self._penalties.apply(logits, rows, self._known)
        for index, prefix in enumerate(rows.prefixes(self._known)):
            between = tuple(drafted[: rows.lengths[index] - len(rows.known)])
            if between in self._called:
                self.restore(self._called[between].states)
            else:
                processed = self._call(self._users, prefix, logits[index : index + 1])
                self._called[between] = _Called(processed, self.fork())
            self._after[rows.positions[index]] = self._called[between].states
            yield self._called[between].logits

    def fork(self) -> States:
        """Return the state of every forkable processor."""
        return tuple([processor.copy_state() for processor in self._forkable])

    def restore(self, states: States) -> None:
        """Restore the states from `fork`."""
        for processor, state in zip(self._forkable, states, strict=True):
            processor.restore_state(state)

    def keep(self, count: int) -> None:
        """Restore the state after the first `count` of the rows processed last.

        0: the state before all of them.
        """
        if self._forkable:
            last = self._last[count - 1] if count else self._last[0] - 1
            self.restore(self._after[last])

    def _forget_committed(self, known: Sequence[int]) -> None:
        """Keep only the results of calls whose tokens start with the new known ones."""
        new = tuple(known[self._called_after :])
        self._called_after = len(known)
        self._called = {
            between[len(new) :]: called
            for between, called in self._called.items()
            if between[: len(new)] == new
        }

    def _begin(self, rows: Rows) -> None:
        """Remember the positions of the rows, and the state before them."""
        self._last, self._drafted = rows.positions, {}
        if self._forkable:
            self._after = {self._last[0] - 1: self.fork()}

    def _apply(
        self,
        logits: mx.array,
        rows: Rows,
        users: Sequence[LogitsProcessor],
        after: dict[int, States],
    ) -> mx.array:
        logits = self._penalties.apply(logits, rows, self._known)
        if not users:
            return logits
        processed = []
        for index, prefix in enumerate(rows.prefixes(self._known)):
            # A slice for each call, since processors write in place.
            processed.append(self._call(users, prefix, logits[index : index + 1]))
            if self._forkable:
                after[rows.positions[index]] = self.fork()
        return mx.concatenate(processed) if len(processed) > 1 else processed[0]

    def _call(
        self, users: Sequence[LogitsProcessor], tokens: mx.array, logits: mx.array
    ) -> mx.array:
        """Call these processors for one row, [1, vocab], at the target's width."""
        width = logits.shape[-1]
        logits = _fitted(logits, self._width)
        for processor in users:
            result = processor(tokens, logits)
            if not isinstance(result, mx.array) or result.shape != logits.shape:
                value = result.shape if isinstance(result, mx.array) else result
                raise InvalidRequestError(
                    f"The logits processor {_name(processor)} returned {value}, but "
                    f"has to return logits [1, {self._width}]. Correct the processor."
                )
            logits = result
        return logits[:, :width]


def _fitted(logits: mx.array, width: int) -> mx.array:
    """Return the logits at the target's width; missing ids get -inf."""
    lacking = width - logits.shape[-1]
    if lacking <= 0:
        return logits[:, :width] if lacking else logits
    nothing = mx.full((logits.shape[0], lacking), -mx.inf, dtype=logits.dtype)
    return mx.concatenate([logits, nothing], axis=-1)


def _name(processor: LogitsProcessor) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


def _check_ids(name: str, ids: Sequence[int], width: int) -> None:
    wrong = next((token for token in ids if token >= width), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"{name} has the id {wrong}, but the target's ids go up to {width - 1}. "
            "Take ids of the target's tokenizer."
        )
