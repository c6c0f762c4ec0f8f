"""Results of a batch: a response for each token, and counts over all rows."""

from dataclasses import dataclass, field

from mlx_speculation.engine.result import Chunk


@dataclass(frozen=True, slots=True)
class BatchResponse:
    """One emitted token of one row, or the end of a row without a token.

    Attributes:
        chunk: the token and its text. None: the row ended without a token, by an error
            or because no token was allowed.
        finish_reason: "stop", "length" or "error" in the row's last response, else
            None.
        error: the error that ended this row; the other rows go on.
    """

    uid: int
    chunk: Chunk | None
    finish_reason: str | None = None
    error: Exception | None = None


@dataclass(slots=True)
class BatchStatistics:
    """Counts over all rows of a batch; those of one row are in its `Result`.

    Attributes:
        rounds: calls of `next` in which rows ran.
        forwards: forwards of the target over rows that run together; those of prefill
            are left out.
        row_rounds: the sum of the numbers of rows of these forwards.
        finished: rows that have ended, with an error or without, or were removed.
        failed: rows that ended with an error.
        alone: for each reason, how many rows share no forwards because of it.
    """

    rounds: int = 0
    forwards: int = 0
    row_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    finished: int = 0
    failed: int = 0
    alone: dict[str, int] = field(default_factory=dict)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_rows(self) -> float:
        """Mean number of rows that share a forward; 0 before the first forward."""
        return self.row_rounds / self.forwards if self.forwards else 0.0
