"""Results of a batch: a response for each token, and counts over all rows."""

from dataclasses import dataclass, field

from mlx_speculation.engine.result import Chunk


@dataclass(frozen=True, slots=True)
class BatchResponse:
    """One emitted token of one row, or how a row has ended without one.

    Attributes:
        uid: the row, as `insert` has named it.
        chunk: the token and its text, as `stream` gives them; None where the row ended
            without a token: with an error, or a budget of 0.
        finish_reason: "stop", "length" or "error" in the row's last response, else
            None.
        error: what ended the row, where that is "error". The other rows go on.
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
        forwards: forwards of the target for all rows that run together, prompts not
            counted.
        row_rounds: rows of those forwards: over `forwards`, the mean size of a batch.
        drafted: drafted tokens of all rows.
        accepted: those accepted.
        emitted: generated tokens.
        finished: rows that have ended, with an error or without, or were removed.
        failed: those that ended with an error.
        alone: why rows run alone, in turns, instead of together: reason -> rows.
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
        """Rows of a forward of those that run together; 0 before the first."""
        return self.row_rounds / self.forwards if self.forwards else 0.0
