"""A batch's round on its way, and read: a verdict for each row, or what it failed with.

It is read with one evaluation for all rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.result import LogProb
from mlx_speculation.engine.round.outcome import Verdict
from mlx_speculation.errors import NonFiniteLogitsError
from mlx_speculation.models import BatchRound
from mlx_speculation.samplers import BatchVerified, Decided

Read = Verdict | Exception


@dataclass(frozen=True, slots=True, eq=False)
class BatchStep:
    """A forward over one token of every row, not read yet, that is kept whole.

    Attributes:
        lane_round: the transaction, committed.
        verified: what the target makes of the rows that were there.
        tokens: uint32 [rows], what each row that is still there chooses.
        places: where each of these stood.
    """

    lane_round: BatchRound
    verified: BatchVerified
    tokens: mx.array
    places: tuple[int, ...]

    def only(self, stay: Sequence[int]) -> "BatchStep":
        """Return the step without the rows that have left."""
        places = tuple(self.places[index] for index in stay)
        return replace(self, tokens=self.tokens[mx.array(list(stay))], places=places)

    def read(self) -> list[Read]:
        """Wait for it, and return a verdict for each row."""
        found = read_batch(self.verified)
        return [found[place] for place in self.places]


def read_batch(verified: BatchVerified) -> dict[int, Read]:
    """Wait for a round's verdicts: the one place where the host waits."""
    mx.eval(verified.arrays)
    found: dict[int, Read] = dict(verified.failed)
    for decided in verified.decided:
        found |= _read(decided)
    return found


def _read(decided: Decided) -> dict[int, Read]:
    """Return the verdicts of requests that were decided together."""
    verified, width = decided.verified, decided.width
    tokens: Any = verified.tokens.tolist()
    normals: Any = verified.normalizers.tolist()
    accepted: Any = [0] * len(decided.members)
    if verified.accepted is not None:
        accepted = verified.accepted.tolist()
    found: dict[int, Read] = {}
    for place, (index, count) in enumerate(zip(decided.members, accepted, strict=True)):
        start = place * width
        # Rows behind the first rejection mean nothing, and neither does padding.
        rows = normals[start : start + count + 1]
        if unusable := sum(not math.isfinite(value) for value in rows):
            found[index] = NonFiniteLogitsError(
                f"{unusable} of {len(rows)} rows of the target's logits hold a NaN or "
                "no finite largest value. This row of the batch ends, the others go "
                "on. Check the weights, load the model in float32, or see what logits "
                "processors leave of them, and whether a sampler chose an id without "
                "a row."
            )
            continue
        report = _listed(decided, start, count + 1)
        found[index] = Verdict(tokens[start : start + width], count, report)
    return found


def _listed(decided: Decided, start: int, count: int) -> list[LogProb]:
    """Return the report on `count` rows from `start` on as plain numbers."""
    report, stop = decided.verified.log_probs, start + count
    if report is None:
        return []
    values: Any = report.tokens[start:stop].tolist()
    ids: Any = report.top_ids[start:stop].tolist()
    top: Any = report.top[start:stop].tolist()
    return [
        LogProb(
            values[row],
            tuple(zip(ids[row], top[row], strict=True)),
            None if report.rows is None else report.rows[start + row],
        )
        for row in range(count)
    ]
