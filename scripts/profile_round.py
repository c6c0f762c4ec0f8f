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
overlap saves. Rounds of all draft lengths take turns; figures are medians in
milliseconds, `share` is that of the round, and `x plain` is over the plain step.

    python scripts/profile_round.py
    python scripts/profile_round.py --target hybrid --draft mtp --draft-length 4
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.options import Blas, DraftModel, Json, Lengths, Repeats, Target, Temperature
from bench.prompts import bundled
from bench.report import reported
from bench.turns import in_turns
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from mlx_speculation.engine import Stream

ENOUGH = 1 << 20  # tokens; no stream here comes to its end
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
class Rounds:
    """Rounds of one draft length: seconds of the parts of each, and of its pieces."""

    running: list[dict[str, float]] = field(default_factory=list)
    apart: list[dict[str, float]] = field(default_factory=list)


def rounds_of(
    stream: "Stream", other: "Stream", length: int, count: int, _: int
) -> Rounds:
    """Run some rounds of a stream as they run, and of another one taken apart."""
    import mlx.core as mx

    done = len(stream.decisions)
    while len(stream.decisions) < done + count:
        next(stream)
    mx.synchronize()
    return Rounds(
        [asdict(outcome.parts) for _, outcome in stream.decisions[done:]],
        [pieces_of_round(other) for _ in range(count if length else 0)],
    )


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each part and of their sum, in milliseconds."""
    found = {name: 1e3 * median(one[name] for one in rounds) for name in rounds[0]}
    return {**found, "round": 1e3 * median(sum(one.values()) for one in rounds)}


@app.command()
def profile(
    context: typer.Context,
    target: Target = "dense",
    draft_model: DraftModel = "draft",
    draft: Annotated[str, typer.Option(help="As in the other benchmarks.")] = "model",
    draft_length: Lengths = None,
    group: Annotated[str, typer.Option(help="code, prose or edit.")] = "code",
    temperature: Temperature = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="In each repeat.")] = 6,
    repeats: Repeats = 8,
    blas: Blas = "auto",
    json_file: Json = None,
) -> None:
    """Print the parts of rounds by draft length."""
    with reported(context) as report:
        from bench.models import Bench
        from mlx_speculation import Sampling

        bench = Bench.of(target, draft_model)
        generator = bench.generator(draft)
        (question,) = bundled([group], 1)[group]
        prompt = question.prompt(bench.tokenizer)

        def stream(length: int) -> "Stream":
            made = generator.stream(
                prompt,
                max_tokens=ENOUGH,
                stop_tokens=(),
                draft_length=length,
                sampling=Sampling(temperature=temperature, seed=0),
                explain=True,
            )
            next(made)  # the prompt
            return made

        acts: dict[str, Callable[[int], Rounds]] = {}
        for length in (0, *(draft_length or range(1, 9))):
            pair = stream(length), stream(length)
            acts[str(length)] = partial(rounds_of, *pair, length, rounds)
        taken = in_turns(acts, repeats)
        plain = medians([one for each in taken["0"] for one in each.running])["round"]
        for view in ("running", "apart"):
            for length_, each in taken.items():
                seen = [one for turn in each for one in getattr(turn, view)]
                if not seen:
                    continue
                parts = medians(seen)
                shares = {
                    name: f"{value:.2f} ({value / parts['round']:.0%})"
                    for name, value in parts.items()
                    if name != "round"
                }
                report.add(
                    view="as it runs" if view == "running" else "taken apart",
                    k=int(length_),
                    **shares,
                    round_ms=parts["round"],
                    x_plain=parts["round"] / plain,
                    milliseconds=parts,
                )


if __name__ == "__main__":
    run(app)
