"""Where the time of a round goes, part by part and beside the plain step.

Two views of the same rounds:

    as it runs     the parts of `engine.timing`, with `explain=True`: draft,
                   verify, sampler and host, the pipeline all but untouched
    taken apart    each piece is computed to its end before the next one is begun, so
                   that nothing overlaps: the draft, the target's forward, the sampler,
                   the commit of the target and of the drafter, and the replay that a
                   commit of recurrent layers leaves to the next forward; the rest is
                   the host's

What the pieces take together, less what the round takes as it runs, is what the
overlap saves. Rounds of all draft lengths are measured by turns.

The last line on standard output is one JSON object.

    python scripts/profile_round.py
    python scripts/profile_round.py --target hybrid --drafter mtp --length 4
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_speculation.blas import BlasName, use_blas
from mlx_speculation.cli import run
from mlx_speculation.demo import demo_models, demo_prompts

if TYPE_CHECKING:
    from rich.table import Table

    from mlx_speculation import SpeculativeGenerator
    from mlx_speculation.engine import Stream

ENOUGH = 1 << 20  # tokens; no stream here comes to its end
PARTS = ("draft", "verify", "sampler", "host")
PIECES = ("draft", "forward", "sampler", "commit", "replay", "host")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(slots=True)
class Pieces:
    """Seconds of the pieces of one round at a time, each computed to its end."""

    seconds: dict[str, float] = field(default_factory=dict)

    def take(self, piece: str, act: Callable[[], Any], *arrays: Any) -> Any:
        """Do something, compute what it gives and some arrays, and note the time."""
        import mlx.core as mx

        started = time.perf_counter()
        result = act()
        mx.eval([array for array in (result, *arrays) if isinstance(array, mx.array)])
        spent = time.perf_counter() - started
        self.seconds[piece] = self.seconds.get(piece, 0.0) + spent
        return result


@contextmanager
def taken_apart(pieces: Pieces) -> Iterator[None]:
    """Let rounds of all streams be computed piece by piece."""
    import mlx.core as mx

    from mlx_speculation.caches import states
    from mlx_speculation.engine.drafters.fault_guard import FaultGuard
    from mlx_speculation.engine.round.round import Rounds
    from mlx_speculation.models import Lane, LaneRound
    from mlx_speculation.samplers import Verifier

    lanes: list[Lane] = []  # whose round is running: the target's, or a draft model's
    propose, settle = FaultGuard.propose, FaultGuard.settle
    forward, commit = LaneRound.forward, LaneRound.commit
    verify, drafted = Verifier.verify, Rounds.drafted

    def proposed(self: Any, *args: Any) -> Any:
        def act() -> Any:
            draft = propose(self, *args)
            mx.eval(draft.tokens)
            return draft

        return pieces.take("draft", act)

    def forwarded(self: Any, tokens: Any) -> Any:
        if not lanes:
            return forward(self, tokens)
        return pieces.take("forward", lambda: forward(self, tokens))

    def verified(self: Any, *args: Any, **more: Any) -> Any:
        def act() -> Any:
            found = verify(self, *args, **more)
            mx.eval(found.arrays)
            return found

        return pieces.take("sampler", act)

    def committed(self: Any, keep: int) -> None:
        if not lanes:
            commit(self, keep)
            return
        lane = lanes[-1]
        pieces.take("commit", lambda: commit(self, keep))
        pieces.take("replay", lambda: mx.eval(states(lane.caches)))

    def settled(self: Any, accepted: int) -> None:
        lane, held = lanes.pop(), getattr(self.inner, "held", None)
        pieces.take("commit", lambda: settle(self, accepted))
        if held is not None:
            pieces.take("replay", lambda: mx.eval(_states(held)))
        lanes.append(lane)

    def round_of(self: Any, *args: Any) -> Any:
        lanes.append(self.request.target)
        try:
            return drafted(self, *args)
        finally:
            lanes.clear()

    changed = [
        (FaultGuard, "propose", proposed, propose),
        (FaultGuard, "settle", settled, settle),
        (LaneRound, "forward", forwarded, forward),
        (LaneRound, "commit", committed, commit),
        (Verifier, "verify", verified, verify),
        (Rounds, "drafted", round_of, drafted),
    ]
    try:
        for owner, name, other, _ in changed:
            setattr(owner, name, other)
        yield
    finally:
        for owner, name, _, own in changed:
            setattr(owner, name, own)


def _states(held: list[Any]) -> list[Any]:
    from mlx_speculation.caches import arrays_in

    return list(arrays_in(held).values())


def pieces_of_round(stream: "Stream") -> dict[str, float]:
    """Run one round of a stream taken apart; return the seconds of each piece."""
    stats, pieces = stream.stats, Pieces()
    rounds, seconds = stats.rounds, stats.decode_seconds
    with taken_apart(pieces):
        while stats.rounds == rounds:
            next(stream)
    found = {name: pieces.seconds.get(name, 0.0) for name in PIECES}
    rest = stats.decode_seconds - seconds - sum(found.values())
    return {**found, "host": max(0.0, rest)}


@dataclass(slots=True)
class Profile:
    """The rounds of one draft length.

    Attributes:
        length: tokens drafted in a round; 0 are plain steps.
        running: parts of each round, as it runs.
        apart: pieces of each round, taken apart.
        accepted: tokens accepted in each drafted round.
    """

    length: int
    stream: "Stream"
    other: "Stream"
    running: list[dict[str, float]] = field(default_factory=list)
    apart: list[dict[str, float]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def repeat(self, rounds: int) -> None:
        """Run some rounds as they run, and the same ones taken apart."""
        import mlx.core as mx

        for outcome in _rounds(self.stream, rounds):
            self.running.append(asdict(outcome.parts))
            self.accepted.append(outcome.accepted)
        mx.synchronize()
        if not self.length:
            return
        self.apart += [pieces_of_round(self.other) for _ in range(rounds)]

    def as_json(self) -> dict[str, Any]:
        """Return the values of the JSON object, in milliseconds."""
        return {
            "length": self.length,
            "rounds": len(self.running),
            "accepted": sum(self.accepted) / max(1, len(self.accepted)),
            "as_it_runs": _medians(self.running),
            "taken_apart": _medians(self.apart),
        }


def _rounds(stream: "Stream", rounds: int) -> list[Any]:
    """Run some rounds; return what became of them."""
    done = len(stream.decisions)
    while len(stream.decisions) < done + rounds:
        next(stream)
    return [outcome for _, outcome in stream.decisions[done:]]


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each part and of their sum, in milliseconds."""
    if not rounds:
        return {}
    names = list(rounds[0])
    found = {name: 1e3 * median(one[name] for one in rounds) for name in names}
    return {**found, "round": 1e3 * median(sum(one.values()) for one in rounds)}


def table_of(
    title: str, names: tuple[str, ...], rows: list[tuple[int, Any]]
) -> "Table":
    """Make a table of medians in milliseconds, with their shares of the round."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("k", *names, "round, ms", "x plain"):
        table.add_column(column, justify="right", no_wrap=True)
    plain = rows[0][1].get("plain", 0.0)
    for length, values in rows:
        whole = values["round"]
        cells = [f"{values[n]:.2f} ({values[n] / whole:.0%})" for n in names]
        table.add_row(str(length), *cells, f"{whole:.2f}", f"{whole / plain:.2f}")
    return table


def generator_of(target: str, drafter: str) -> "SpeculativeGenerator":
    """Load a target with a drafter."""
    from mlx_speculation import SpeculativeGenerator

    folders = demo_models()
    folder = folders.get(target, target)
    named = {"model": folders["draft"], "eagle": folders["eagle"]}
    return SpeculativeGenerator.from_pretrained(
        folder, draft=named.get(drafter, drafter)
    )


@app.command()
def main(
    target: Annotated[
        str, typer.Option(help="dense, sliding, hybrid, or a folder.")
    ] = "dense",
    drafter: Annotated[
        str, typer.Option(help="model, mtp, lookup, eagle, or a folder.")
    ] = "model",
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="By default 1 to 8.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=2)] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="In each repeat.")] = 6,
    group: Annotated[str, typer.Option(help="code, prose or edit.")] = "code",
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    blas: BlasName = "auto",
) -> None:
    """Print the parts of rounds by draft length."""
    chosen = use_blas(blas)
    from rich.console import Console

    from mlx_speculation import Sampling
    from mlx_speculation.environment import machine, versions

    generator = generator_of(target, drafter)
    prompt = next(p.text for p in demo_prompts() if p.group == group)

    def stream(draft_length: int) -> "Stream":
        made = generator.stream(
            prompt,
            max_tokens=ENOUGH,
            stop_tokens=(),
            draft_length=draft_length,
            sampling=Sampling(temperature=temperature, seed=0),
            explain=True,
        )
        next(made)  # the prompt
        return made

    lengths = [0, *(length or range(1, 9))]
    profiles = [Profile(n, stream(n), stream(n)) for n in lengths]
    for number in range(repeats + 1):
        for profile in profiles:
            if number == 1:  # the first was to warm up
                profile.running, profile.apart, profile.accepted = [], [], []
            profile.repeat(rounds)
    results = [profile.as_json() for profile in profiles]
    plain = results[0]["as_it_runs"]["round"]
    views = {"as_it_runs": PARTS, "taken_apart": PIECES}
    console = Console(highlight=False, width=130)
    for view, names in views.items():
        rows = [(one["length"], {**one[view], "plain": plain}) for one in results]
        rows = [(n, values) for n, values in rows if "round" in values]
        title = f"{target} with {drafter}, {view.replace('_', ' ')}, ms (share)"
        console.print(table_of(title, names, rows))
    report: dict[str, Any] = {
        "target": target,
        "drafter": drafter,
        "machine": machine(),
    }
    report |= {"versions": versions(), "blas": asdict(chosen), "results": results}
    print(json.dumps(report))


if __name__ == "__main__":
    run(app)
