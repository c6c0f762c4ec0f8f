"""Overhead of rounds over their forwards.

An ideal round takes the time of the draft's steps and of one forward of the target over
the draft and the token before it. Each step and forward is as fast as in a long run of
forwards of its width (bench/forwards.py). Sampler, commit, roll-back and host take no
time. With the observed acceptance:

    ideal tokens/s = tokens a round / (k * draft step + forward of k + 1 rows)
    efficiency     = achieved tokens/s / ideal tokens/s

A lookup drafts in no time; rounds without a draft are plain steps. The milliseconds of
draft, verify, sampler and host are the parts of `engine.timing`: medians over the same
number of rounds of another stream. Those of the host should not grow with the context.

Each repeat begins a new stream, so that rounds and forwards have the same context. On a
machine that also runs other processes, measure with --processor-time and one thread of
OpenBLAS.

    python scripts/rounds.py
    python scripts/rounds.py --draft-length 4 --context 512 --context 8192
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench import options as opt
from bench.prompts import bundled
from bench.report import reported
from bench.turns import Clock, Spread, in_turns
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from bench.forwards import Step
    from bench.models import Bench
    from mlx_speculation.engine import Stream

WARM_UP = 2  # rounds of each stream that are not timed
PARTS = ("draft", "verify", "sampler", "host")
ENOUGH = 1 << 20  # tokens: no stream here reaches its budget

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command("rounds")
def rounds_(
    context: typer.Context,
    target: opt.Targets = None,
    draft_model: opt.DraftModel = "draft",
    draft: Annotated[
        list[str] | None, typer.Option(help="model, mtp, lookup; by default the first.")
    ] = None,
    draft_length: opt.Lengths = None,
    prompt: Annotated[
        list[int] | None,
        typer.Option("--context", min=16, help="Prompt tokens; by default 256."),
    ] = None,
    repeats: opt.Repeats = 9,
    rounds: Annotated[int, typer.Option(min=1, help="Per repeat.")] = 10,
    forwards: Annotated[int, typer.Option(min=2, help="Per repeat.")] = 12,
    processor_time: Annotated[
        bool,
        typer.Option(
            help="Measure processor time, not wall time; for OPENBLAS_NUM_THREADS=1."
        ),
    ] = False,
    blas: opt.Blas = "auto",
    json_file: opt.Json = None,
) -> None:
    """Compare rounds with the forwards in them."""
    clock = time.process_time if processor_time else time.perf_counter
    with reported(context) as report, ExitStack() as hooked:
        from bench.models import Bench

        cases: dict[tuple[str, str, int, int], Case] = {}
        for name, count in product(target or ["dense"], prompt or [256]):
            bench, drafts = Bench.of(name, draft_model), draft or ["model"]
            for case in cases_of(bench, drafts, draft_length or [4], count, hooked):
                cases[bench.name, case.draft, case.length, count] = case
        report.say(f"{len(cases)} cases")
        acts = {
            key: partial(case.repeat, rounds, forwards, clock)
            for key, case in cases.items()
        }
        for key, taken in in_turns(acts, repeats).items():
            names = dict(zip(("target", "draft", "k", "context"), key, strict=True))
            report.add(**names, **row_of(taken))


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds of one repeat."""

    achieved: float
    ideal: float
    emitted: int
    wide: float  # a forward over the draft and the token before it
    plain: float  # a forward over one token
    parts: list[dict[str, float]]  # of each explained round


@dataclass(frozen=True, slots=True)
class Case:
    """One draft, draft length and context."""

    draft: str
    length: int
    open: "Callable[..., Stream]"  # begins a stream whose caches hold the context
    verify: "Step"  # a forward of a copy of the target
    step: "Step | None"  # of the draft; None: no model drafts

    def repeat(self, rounds: int, count: int, clock: Clock, _: int) -> Taken:
        """Run some rounds, then the forwards that give their ideal time."""
        import mlx.core as mx

        from bench.forwards import steady_seconds

        stream, k = self.open(), self.length
        stats = stream.stats
        while stats.rounds < WARM_UP:
            next(stream)
        before = replace(stats)
        mx.synchronize()  # the step in flight is not timed
        started = clock()
        while stats.rounds < before.rounds + rounds:
            next(stream)
        mx.synchronize()  # the step now in flight is timed instead
        seconds = clock() - started
        done, drafts = stats.rounds - before.rounds, stats.drafts - before.drafts
        drafted = stats.drafted - before.drafted
        emitted = stats.emitted - before.emitted
        stream.close()
        parts = parts_of(self.open(explain=True), rounds)
        step, plain = 0.0, steady_seconds(self.verify, 1, count, clock)
        wide = plain
        if k:
            wide = steady_seconds(self.verify, k + 1, count, clock)
        if self.step is not None:
            step = steady_seconds(self.step, 1, count * k, clock)
        return Taken(
            seconds,
            (done - drafts) * plain + drafts * wide + drafted * step,
            emitted,
            wide,
            plain,
            parts,
        )


def parts_of(stream: "Stream", count: int) -> list[dict[str, float]]:
    """Return the seconds of the parts of some rounds, and close the stream."""
    with stream:
        while len(stream.decisions) < WARM_UP + count:
            next(stream)
        return [outcome.parts._asdict() for _, outcome in stream.decisions[WARM_UP:]]


def row_of(taken: list[Taken]) -> dict[str, Any]:
    """Return the row of the table for all repeats."""
    parts = [each for one in taken for each in one.parts]
    return {
        "tokens_per_second": median(each.emitted / each.achieved for each in taken),
        "efficiency": Spread.of([each.ideal / each.achieved for each in taken]),
        **{f"{name}_ms": 1e3 * median(one[name] for one in parts) for name in PARTS},
        "forward_x": median(each.wide / each.plain for each in taken),
        "plain_ms": 1e3 * median(each.plain for each in taken),
    }


def cases_of(
    bench: "Bench",
    drafts: list[str],
    lengths: list[int],
    prompt_tokens: int,
    hooked: ExitStack,
) -> Iterator[Case]:
    """Make the cases of one target; forwards run on a copy with the same hooks."""
    from bench.forwards import filled, step_of
    from bench.models import bare
    from mlx_speculation import PrefixCache, SpeculativeGenerator, load
    from mlx_speculation.models import ModelHooks

    def hook(each: Any) -> None:
        """Put a generator's hooks on a model."""
        hooked.callback(ModelHooks(each).remove)

    copy = bare(load(bench.folder)[0])
    hook(copy)
    (question,) = bundled(["code"], 1)["code"]
    prompt = question.prompt(bench.tokenizer)
    prompt = (prompt * (1 + prompt_tokens // len(prompt)))[:prompt_tokens]
    verify = step_of(copy, filled(copy, prompt))
    for name in ["plain", *drafts]:
        draft, step = draft_of(bench, name, copy, prompt, hook)
        generator = SpeculativeGenerator(
            bench.model, bench.tokenizer, draft=draft, prefix_cache=PrefixCache()
        )
        for length in lengths if draft is not None else [0]:
            begin = partial(
                generator.stream,
                prompt,
                max_tokens=ENOUGH,
                stop_tokens=(),
                draft_length=length,
            )
            yield Case(name, length, begin, verify, step)


def draft_of(
    bench: "Bench",
    name: str,
    target: Any,
    prompt: list[int],
    hook: Callable[[Any], None],
) -> tuple[Any, "Step | None"]:
    """Return a draft by name, and one of its steps after the prompt.

    `target` is a copy with hooks. `hook` puts a generator's hooks on a copy.
    """
    from bench.forwards import filled, head_step_of, step_of
    from mlx_speculation import MtpDraft, load

    if name == "model":
        draft, copy = load(bench.draft_folder)[0], load(bench.draft_folder)[0]
        caches = filled(copy, prompt)
        hook(copy)
        return draft, step_of(copy, caches, drafts=True)
    if name == "mtp":
        head = MtpDraft.from_folder(bench.folder, target).mtp
        step = head_step_of(head, target, len(prompt))
        return MtpDraft.from_folder(bench.folder, bench.model), step
    if name in ("plain", "lookup"):
        return None if name == "plain" else name, None
    raise typer.BadParameter(
        f"the drafts are model, mtp and lookup; there is no {name!r}"
    )


if __name__ == "__main__":
    run(app)
