"""Measures what choosing costs, beside a whole round of the bundled dense target.

The verdict on five verify rows (k = 4) is built and evaluated on logits that are there
already, with the positions of successive rounds, so that noise drawn in blocks costs
its share. In turns with it a round is run: four draft steps, the target's forward, the
verdict, the commit. Figures are medians of slices; a share is that of one slice. The
bundled vocabulary is small, so the sampler gets random logits of the stated width.

The last line on standard output is one JSON object with everything.

    python scripts/benchmark_sampler.py
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median, quantiles
from typing import Annotated, Any, get_args

import typer

from mlx_speculation.blas import BlasName, use_blas
from mlx_speculation.cli import run
from mlx_speculation.demo import demo_models, demo_prompts

WIDTHS = [4096, 151_936]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "no filter": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k": {"temperature": 0.8, "top_k": 40},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "penalty": {"temperature": 0.8, "repetition_penalty": 1.1},
}
K, ROUNDS = 4, 8  # drafted tokens; rounds of a slice

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Cost:
    """What five rows cost.

    Attributes:
        width: token ids.
        options: of the sampling, by name.
        rule: how tokens are accepted.
        milliseconds: the median of a verdict.
        share: of the round, the median over slices; quartiles beside it.
        lower: a quarter of the slices lie below.
        upper: a quarter of the slices lie above.
    """

    width: int
    options: str
    rule: str
    milliseconds: float
    share: float
    lower: float
    upper: float


@app.command()
def main(
    slices: Annotated[int, typer.Option(min=4, help="Of each case.")] = 20,
    width: Annotated[list[int] | None, typer.Option(min=8)] = None,
    blas: Annotated[BlasName, typer.Option()] = "auto",
) -> None:
    """Compare the time of five rows' verdict with that of a round."""
    use_blas(blas)
    from mlx_speculation.samplers import Acceptance

    a_round = _rounds_of_demo_target()
    costs = []
    for ids, (name, options) in product(width or WIDTHS, OPTIONS.items()):
        rules = get_args(Acceptance) if name == "no filter" else ["keyed"]
        for rule in rules:
            cost = _measure(a_round, _verdicts(ids, options, rule), slices)
            costs.append(Cost(ids, name, rule, *cost))
            print(
                f"{ids:7} ids  {name:10} {rule:10} {cost[0]:8.3f} ms  "
                f"{cost[1]:6.1%} of a round ({cost[2]:.1%} to {cost[3]:.1%})",
                flush=True,
            )
    print(json.dumps([asdict(cost) for cost in costs]))


def _measure(
    a_round: Callable[[], None], a_verdict: Callable[[], None], slices: int
) -> tuple[float, float, float, float]:
    """Run both by turns; return the verdict's milliseconds and its share."""
    times, shares = [], []
    for number in range(slices + 2):
        verdict, whole = _timed(a_verdict), _timed(a_round)
        if number >= 2:  # the first ones warm up
            times.append(verdict / ROUNDS * 1e3)
            shares.append(verdict / whole)
    lower, _, upper = quantiles(shares, n=4)
    return median(times), median(shares), lower, upper


def _timed(one: Callable[[], None]) -> float:
    started = time.perf_counter()
    for _ in range(ROUNDS):
        one()
    return time.perf_counter() - started


def _rounds_of_demo_target() -> Callable[[], None]:
    """Return what runs one greedy round of four drafts with the bundled models."""
    from benchmark_arms import Models

    models = Models.load(demo_models()["dense"], demo_models()["draft"])
    prompt = models.encode(demo_prompts()[0].text)

    def streams() -> Any:
        while True:
            stream = models.speculative.stream(
                prompt, max_tokens=256, stop_tokens=(), draft_length=K
            )
            next(stream)
            rounds = stream.stats.rounds
            for _ in stream:
                if stream.stats.rounds > rounds:
                    rounds = stream.stats.rounds
                    yield

    running = streams()
    return lambda: next(running)


def _verdicts(width: int, options: dict[str, Any], rule: Any) -> Callable[[], None]:
    """Return what decides on five rows of the next round."""
    import mlx.core as mx

    from mlx_speculation import Sampling
    from mlx_speculation.samplers import Chooser, Rows, Verifier

    verifier = Verifier(Chooser(Sampling(seed=1, **options), width), rule)
    logits = 3 * mx.random.normal((K + 1, width), key=mx.random.key(0))
    drafted = mx.array([5, 6, 7, 8], dtype=mx.uint32)
    probs = mx.softmax(logits[:K], axis=-1) if rule != "keyed" else None
    known = list(range(200))
    mx.eval(logits, drafted, *([] if probs is None else [probs]))

    def decide() -> None:
        known.extend([1, 2, 3])  # the positions of the next round
        rows = Rows(known, drafted, K + 1)
        mx.eval(*verifier.verify(logits, rows, drafted, probs).arrays)

    return decide


if __name__ == "__main__":
    run(app)
