"""What the comparison is asked for, and how it came out: one line for each case."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmark_case import Case, Series
from benchmark_plain import PlainRatio
from benchmark_report import console
from compare_target import SAME_PAIR, best_of
from rich.markup import escape
from rich.table import Table

from mlx_speculation.cli.measure import Spread

DEFINITIONS = """\
Words: drafted tokens are proposed by the drafter; accepted ones are confirmed by the
target, always a prefix; correction and bonus are the target's own token behind them.
"accepted" is accepted over drafted tokens, those behind a rejected one included;
"length" is 1 + accepted / drafts, with the bonus; by position, the share of all drafts
in which position i was accepted. Ours are counted before the cut at the budget.
mlx-lm marks each token that it emits as drafted or not, and what its users count is
marked over emitted tokens, where k right drafts are k / (k + 1); here its rounds are
rebuilt from the marks. Above temperature 0 it draws draft and target apart, and accepts
equal tokens. transformers reports no acceptance; its candidates and what it streams are
counted, cut at the budget. It accepts equal tokens at temperature 0, and by rejection
sampling above; "auto" is its own choice: at most 20, until the draft is unsure.
"""

PLAIN = 0.97
ADAPTIVE = 0.97
FIRST_TOKEN = 1.05
MLX_LM = 1.25
CODE = 2.0


@dataclass(frozen=True, slots=True)
class Demand:
    """A ratio that is asked for.

    Attributes:
        what: the ratio.
        where: of which target, text and temperature.
        value: as it was measured: a median.
        low: the smallest of the passes, or the lower quartile of the slices.
        high: likewise.
        least: it has to be at least this; None: no bound.
        most: it has to be at most this; None: no bound.
        note: what was compared.
    """

    what: str
    where: str
    value: float
    low: float
    high: float
    least: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether it is as asked for."""
        above = self.least is None or self.value >= self.least
        return above and (self.most is None or self.value <= self.most)

    @property
    def bound(self) -> str:
        """What is asked for."""
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"

    def as_json(self) -> dict[str, Any]:
        """Return the values of the JSON object."""
        return {**asdict(self), "holds": self.holds}


def demands_of(cases: Sequence[Case], plain: Sequence[PlainRatio]) -> list[Demand]:
    """Return everything that is asked for of these cases, in the order of the kinds."""
    found = [
        Demand(
            "our plain over mlx-lm's",
            f"{ratio.target}, temperature {ratio.temperature:g}",
            ratio.median,
            ratio.lower,
            ratio.upper,
            least=PLAIN,
            note=f"{ratio.slices} slices by turns, quartiles",
        )
        for ratio in plain
    ]
    for kind in (_over_mlx_lm, _adaptive, _first_token, _code):
        found += [demand for case in cases for demand in kind(case)]
    return found


def _demand(what: str, case: Case, spread: Spread, note: str, **bound: float) -> Demand:
    return Demand(
        what, str(case), spread.median, spread.low, spread.high, note=note, **bound
    )


def _over_mlx_lm(case: Case) -> Iterator[Demand]:
    """Our best arm with the draft model over mlx-lm's best with the same pair."""
    ours, theirs = best_of(case, "ours", SAME_PAIR), best_of(case, "mlx-lm")
    if case.target != "dense" or ours is None or theirs is None:
        return
    ratio = ours.over(theirs)
    assert ratio is not None
    note = f"{ours.arm.name} over {theirs.arm.name}"
    yield _demand("over mlx-lm's speculation", case, ratio, note, least=MLX_LM)


def _adaptive(case: Case) -> Iterator[Demand]:
    """Lengths by measurement over the best fixed length of the same drafter."""
    for auto in case.of("ours", auto=True):
        if not case.of("ours", draft=auto.arm.draft, auto=False):
            continue  # in a final, for its speed over mlx-lm's alone
        best = _best_fixed(case, auto)
        ratio = auto.over(best)
        assert ratio is not None
        note = f"{auto.arm.name} over {best.arm.name}, {auto.tokens} tokens"
        yield _demand(
            "adaptive over the best length", case, ratio, note, least=ADAPTIVE
        )


def _best_fixed(case: Case, auto: Series) -> Series:
    """Return the best fixed length of an adaptive arm's drafter; 0 is plain."""
    fixed = case.of("ours", draft=auto.arm.draft, auto=False)
    return max([case.series[0], *fixed], key=case.gain)


def _first_token(case: Case) -> Iterator[Demand]:
    """The time to the first token over that of the sooner plain decoding."""
    plain = min(case.series[:2], key=lambda s: median(r.first_seconds for r in s.runs))
    for auto in case.of("ours", auto=True):
        ratio = auto.first_over(plain)
        assert ratio is not None
        note = f"{auto.arm.name} over {plain.arm.name}"
        yield _demand("time to the first token", case, ratio, note, most=FIRST_TOKEN)


def _code(case: Case) -> Iterator[Demand]:
    """The best arm on greedy code over plain decoding."""
    best = best_of(case, "ours")
    if case.group != "code" or case.temperature > 0 or best is None:
        return
    ratio = best.over(case.plain)
    assert ratio is not None
    yield _demand("code over plain", case, ratio, best.arm.name, least=CODE)


def print_demands(demands: Sequence[Demand]) -> None:
    """Print the table of what was asked for."""
    table = Table(title="What is asked for", title_justify="left")
    for column in ("ratio", "case"):
        table.add_column(column)
    for column in ("asked for", "median", "spread"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("", "compared"):
        table.add_column(column)
    for demand in demands:
        missed = f"[red]missed by {_missed(demand):.1%}[/red]"
        table.add_row(
            demand.what,
            escape(demand.where),
            demand.bound,
            f"{demand.value:.3f}",
            f"{demand.low:.2f}..{demand.high:.2f}",
            "holds" if demand.holds else missed,
            escape(demand.note),
        )
    console().print(table)


def _missed(demand: Demand) -> float:
    bound = demand.least if demand.least is not None else demand.most
    assert bound is not None
    return abs(demand.value / bound - 1)
