"""How near rounds come to the forwards in them, and what a round counts.

The ideal round takes the time of its drafting chain and of one forward of the target
over the draft and the token before it, each as fast as in a long run of dependent,
pipelined forwards of that width (bench/forwards.py), and nothing else: no sampler, no
commit, no roll-back, no host. So with the acceptance that was observed

    ideal tokens/s = tokens a round / (k * draft step + forward of k + 1 rows)
    efficiency     = achieved tokens/s / ideal tokens/s

`of bare` is over bare rounds: drafts and a forward over them in turn, dependent and
pipelined too, since two models take the caches of a processor from each other. A lookup
drafts in no time here, and rounds in which it finds nothing are plain steps. `beside`
is what stands beside the forwards in a round that is taken apart (profile_round.py):
sampler, commit, replay and the host's own work. It may not grow with the context.

Counts are the same in every run: forwards of the target and of the draft model, waits
of the host for the device, and calls of Python functions of this package, each for a
round in the middle of a text.

Rounds and forwards take turns. The rounds of each repeat are those of a new stream, so
that they stand at the context of the forwards. --processor-time with one thread of
OpenBLAS says how much work is no forward's on a machine that does other things too.

    python scripts/efficiency.py
    python scripts/efficiency.py --draft-length 4 --context 512 --context 8192
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.options import Blas, DraftModel, Json, Lengths, Repeats, Targets
from bench.prompts import bundled
from bench.report import reported
from bench.turns import Clock, Spread, in_turns
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from bench.forwards import Step
    from bench.models import Bench
    from mlx_speculation.caches import Snapshot
    from mlx_speculation.engine import Stream

WARM_UP = 2  # rounds of each stream that are not timed
BESIDE = ("sampler", "commit", "replay", "host")
ENOUGH = 1 << 20  # tokens; no stream here comes to its end

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def efficiency(
    context: typer.Context,
    target: Targets = None,
    draft_model: DraftModel = "draft",
    draft: Annotated[
        list[str] | None, typer.Option(help="model, mtp, lookup; by default the first.")
    ] = None,
    draft_length: Lengths = None,
    held: Annotated[
        list[int] | None,
        typer.Option("--context", min=16, help="Tokens; by default 256."),
    ] = None,
    repeats: Repeats = 9,
    rounds: Annotated[int, typer.Option(min=1, help="In each repeat.")] = 10,
    forwards: Annotated[int, typer.Option(min=2, help="In each repeat.")] = 12,
    processor_time: Annotated[
        bool,
        typer.Option(help="Count it, and not the wall's; for OPENBLAS_NUM_THREADS=1."),
    ] = False,
    blas: Blas = "auto",
    json_file: Json = None,
) -> None:
    """Compare rounds with the forwards in them."""
    clock = time.process_time if processor_time else time.perf_counter
    with reported(context) as report, ExitStack() as hooked:
        from bench.models import Bench

        cases: dict[str, Case] = {}
        for name in target or ["dense"]:
            bench = Bench.of(name, draft_model)
            for count in held or [256]:
                made = cases_of(
                    bench, draft or ["model"], draft_length or [4], count, clock, hooked
                )
                cases |= {f"{name} {each.name}": each for each in made}
        report.say(f"{len(cases)} cases")
        acts = {name: case.repeater(rounds, forwards) for name, case in cases.items()}
        taken = in_turns(acts, repeats)
        for name, case in cases.items():
            report.add(**case.row(taken[name]))


@dataclass(slots=True)
class Taken:
    """What one repeat has taken, in seconds."""

    ideal: float
    bare: float
    achieved: float
    emitted: int
    wide: float  # a forward over the draft and the token before it
    plain: float  # a forward over one token
    beside: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Case:
    """One draft, draft length and context.

    Attributes:
        open: begins a stream whose caches hold the context.
        verify: a forward of a copy of the target, with the same hooks.
        step: one of the draft's, or None.
        models: whose forwards are counted, by name.
    """

    target: str
    draft: str
    length: int
    context: int
    open: "Callable[[], Stream]"
    verify: "Step"
    step: "Step | None"
    models: dict[str, Any]
    clock: Clock

    @property
    def name(self) -> str:
        """The case among others of its target."""
        return f"{self.draft} {self.length} {self.context}"

    def repeater(self, rounds: int, count: int) -> Callable[[int], Taken]:
        """Return what runs one repeat."""
        return lambda _: self.repeat(rounds, count)

    def repeat(self, rounds: int, count: int) -> Taken:
        """Run some rounds, then as many forwards as give their ideal time."""
        import mlx.core as mx
        from profile_round import pieces_of_round

        from bench.forwards import bare_round_seconds, steady_seconds

        stream = self.open()
        stats = stream.stats
        while stats.rounds < WARM_UP:
            next(stream)
        before = replace(stats)
        mx.synchronize()
        started = self.clock()
        while stats.rounds < before.rounds + rounds:
            next(stream)
        mx.synchronize()  # a step on its way was so at the start too
        seconds = self.clock() - started
        done, drafts = stats.rounds - before.rounds, stats.drafts - before.drafts
        drafted, emitted = (
            stats.drafted - before.drafted,
            stats.emitted - before.emitted,
        )
        pieces = [pieces_of_round(stream) for _ in range(done if self.length else 0)]
        stream.close()
        plain = wide = bare = steady_seconds(self.verify, 1, count, self.clock)
        step = 0.0
        if self.length:
            wide = steady_seconds(self.verify, self.length + 1, count, self.clock)
            bare = bare_round_seconds(
                self.step, self.verify, self.length, count, self.clock
            )
        if self.step is not None:
            step = steady_seconds(self.step, 1, count * self.length, self.clock)
        return Taken(
            ideal=(done - drafts) * plain + drafts * wide + drafted * step,
            bare=(done - drafts) * plain + drafts * bare,
            achieved=seconds,
            emitted=emitted,
            wide=wide,
            plain=plain,
            beside=[sum(each[name] for name in BESIDE) for each in pieces],
        )

    def counts(self) -> dict[str, Any]:
        """Return what one round in the middle of a text counts."""
        from bench.forwards import forwards_of, python_calls

        stream = self.open()
        while stream.stats.rounds < WARM_UP:
            stream.next_round()
        with ExitStack() as stack:
            noted = {
                name: stack.enter_context(forwards_of(model))
                for name, model in self.models.items()
            }
            reads = stream.stats.reads
            calls = python_calls(stream.next_round)
            reads = 1 + stream.stats.reads - reads
        stream.close()
        return {**{name: len(rows) for name, rows in noted.items()}, "reads": reads} | {
            "python_calls": calls
        }

    def row(self, taken: list[Taken]) -> dict[str, Any]:
        """Return the row of all repeats."""
        beside = [1e3 * each for one in taken for each in one.beside]
        return {
            "target": self.target,
            "draft": self.draft,
            "k": self.length,
            "context": self.context,
            "tokens_per_second": median(each.emitted / each.achieved for each in taken),
            "efficiency": Spread.of([each.ideal / each.achieved for each in taken]),
            "of_bare": median(each.bare / each.achieved for each in taken),
            "beside_ms": Spread.of(beside) if beside else None,
            "forward_x": median(each.wide / each.plain for each in taken),
            "plain_ms": 1e3 * median(each.plain for each in taken),
            **self.counts(),
        }


def cases_of(
    bench: "Bench",
    drafts: list[str],
    lengths: list[int],
    context: int,
    clock: Clock,
    hooked: ExitStack,
) -> list[Case]:
    """Make the cases of one target; its forwards run on a copy with the same hooks."""
    from bench.forwards import filled, head_step_of, held_by, step_of
    from bench.models import bare
    from mlx_speculation import MtpDraft, load
    from mlx_speculation.models import ModelHooks, stream_resources

    def hook(each: Any) -> None:
        """Let a model be as in a generator while a stream runs."""
        hooked.callback(ModelHooks(each).remove)
        hooked.enter_context(stream_resources(each))

    copy = bare(load(bench.folder)[0])
    hook(copy)
    (question, *_) = bundled(["code"], 1)["code"]
    prompt = question.prompt(bench.tokenizer)
    prompt = (prompt * (1 + context // len(prompt)))[:context]
    caches = filled(copy, prompt)
    held, verify = held_by(caches, context), step_of(copy, caches)
    chosen: dict[str, tuple[Any, Step | None, Snapshot | None]] = {
        "plain": (None, None, None)
    }
    for name in drafts:
        if name == "model":
            small, other = load(bench.draft_folder)[0], load(bench.draft_folder)[0]
            caches = filled(other, prompt)
            hook(other)
            step = step_of(other, caches, drafts=True)
            chosen[name] = small, step, held_by(caches, context)
        elif name == "mtp":
            head = MtpDraft.from_folder(bench.folder, copy).mtp
            own = MtpDraft.from_folder(bench.folder, bench.model)
            chosen[name] = own, head_step_of(head, copy, context), None
        elif name == "lookup":
            chosen[name] = name, None, None
        else:
            raise typer.BadParameter(
                f"the drafts are model, mtp and lookup; there is no {name!r}"
            )
    cases = []
    for name, (draft, step_, kept) in chosen.items():
        models = {"forwards": bench.model}
        models |= {"draft_forwards": draft} if name == "model" else {}
        for length in lengths if draft is not None else [0]:
            begin = opener(bench, draft, length, prompt, held, kept)
            cases.append(
                Case(
                    bench.name,
                    name,
                    length,
                    context,
                    begin,
                    verify,
                    step_,
                    models,
                    clock,
                )
            )
    return cases


def opener(
    bench: "Bench", draft: Any, length: int, prompt: list[int], held: Any, kept: Any
) -> "Callable[[], Stream]":
    """Return what begins a stream behind a context that the caches hold."""
    from bench.forwards import holding
    from mlx_speculation import SpeculativeGenerator

    generator = SpeculativeGenerator(bench.model, bench.tokenizer, draft=draft)
    return lambda: generator.stream(
        prompt[-1:],
        max_tokens=ENOUGH,
        stop_tokens=(),
        draft_length=length,
        prompt_cache=holding(bench.model, held),
        cached_tokens=prompt,
        draft_cache=None if kept is None else holding(draft, kept),
    )


if __name__ == "__main__":
    run(app)
