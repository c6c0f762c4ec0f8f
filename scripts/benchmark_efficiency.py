"""How near rounds come to the forwards in them.

The ideal round takes the time of its drafting chain and of one forward of the target
over the draft and the token before it, each as fast as in a long run of dependent,
pipelined forwards of that width (steady_forwards.py), and nothing else: no sampler, no
commit, no roll-back, no host. So with the acceptance that was observed

    ideal tokens/s = tokens a round / (k * draft step + forward of k + 1 rows)
    efficiency     = achieved tokens/s / ideal tokens/s

A steady forward finds some of its weights in the caches of a processor; in rounds
target and draft model take them from each other. So the same is told of bare rounds:
drafts and a forward over them in turn, dependent and pipelined too, with nothing
around them.

A lookup drafts in no time here, and rounds in which it finds nothing are plain steps.
Rounds and forwards are measured by turns, some of each in every repeat. The rounds of
each repeat are those of a new stream, so that they stand at the context of the
forwards: one that went on would be thousands of tokens further by the end. On a machine
that does other things too, --processor-time with one thread of OpenBLAS says how much
work is no forward's, though not how long the device had to wait for the host.

With --contexts the caches hold so many tokens of repeated text first. What stands
beside the forwards in a round is reported at each: sampler, commit, replay and the
host's own work, of rounds that were taken apart (profile_round.py). It may not grow
with the context.

The last line on standard output is one JSON object.

    python scripts/benchmark_efficiency.py
    python scripts/benchmark_efficiency.py --target dense --length 4 --repeats 21
    python scripts/benchmark_efficiency.py --contexts 512 --contexts 2048 \
        --contexts 8192 --contexts 16384 --length 4
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_speculation.blas import BlasName, use_blas
from mlx_speculation.cli import run
from mlx_speculation.demo import demo_models, demo_prompts

if TYPE_CHECKING:
    from rich.table import Table
    from steady_forwards import Clock, Step

    from mlx_speculation.engine import Stream

WARM_UP = 2  # rounds of each stream that are not timed
BESIDE = ("sampler", "commit", "replay", "host")
AS_IT_IS = "as it is"
ENOUGH = 1 << 20  # tokens; no stream here comes to its end

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(slots=True)
class Case:
    """One target, drafter, draft length and context, and what was measured.

    Attributes:
        open: begins a stream whose caches hold the context.
        ratios: the efficiency of each repeat.
        bare: likewise, over bare rounds.
        tokens: per second, of each repeat.
        beside: seconds beside the forwards, of each round that was taken apart.
        forwards: seconds of the forward of the round, of each repeat.
        plain: those of a forward over one token, of each repeat.
    """

    target: str
    drafter: str
    length: int
    context: int
    open: "Callable[[], Stream]"
    verify: "Step"
    draft: "Step | None"
    clock: "Clock"
    ratios: list[float]
    bare: list[float]
    tokens: list[float]
    beside: list[float]
    forwards: list[float]
    plain: list[float]

    def repeat(self, rounds: int, count: int) -> None:
        """Run some rounds, then as many forwards as give their ideal time."""
        import mlx.core as mx
        from profile_round import pieces_of_round
        from steady_forwards import bare_round_seconds, steady_seconds

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
        rounds = stats.rounds - before.rounds
        drafts, drafted = stats.drafts - before.drafts, stats.drafted - before.drafted
        emitted = stats.emitted - before.emitted
        for _ in range(rounds if self.length else 0):
            pieces = pieces_of_round(stream)
            self.beside.append(sum(pieces[name] for name in BESIDE))
        stream.close()
        plain = steady_seconds(self.verify, 1, count, self.clock)
        wide, step = plain, 0.0
        if self.length:
            wide = steady_seconds(self.verify, self.length + 1, count, self.clock)
        if self.draft is not None:
            steps = count * max(1, self.length)
            step = steady_seconds(self.draft, 1, steps, self.clock)
        ideal = (rounds - drafts) * plain + drafts * wide + drafted * step
        bare = plain
        if self.length:
            bare = bare_round_seconds(
                self.draft, self.verify, self.length, count, self.clock
            )
        self.bare.append(((rounds - drafts) * plain + drafts * bare) / seconds)
        self.ratios.append(ideal / seconds)
        self.tokens.append(emitted / seconds)
        self.forwards.append(wide)
        self.plain.append(plain)

    def as_json(self) -> dict[str, Any]:
        """Return the values of the JSON object."""
        low, middle, high = quartiles(self.ratios)
        return {
            "target": self.target,
            "drafter": self.drafter,
            "length": self.length,
            "context": self.context,
            "tokens_per_second": median(self.tokens),
            "efficiency": middle,
            "quartiles": [low, high],
            "of_bare_rounds": median(self.bare),
            "repeats": len(self.ratios),
            "beside_ms": [1e3 * x for x in quartiles(self.beside)],
            "forward_over_plain": median(self.forwards) / median(self.plain),
            "plain_ms": 1e3 * median(self.plain),
        }


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    ordered = sorted(values or [0.0])
    last = len(ordered) - 1
    return ordered[last // 4], median(ordered), ordered[last - last // 4]


def make_cases(
    target: str,
    drafters: list[str],
    lengths: list[int],
    context: int,
    clock: "Clock",
    shape: str = AS_IT_IS,
) -> Iterator[Case]:
    """Make the cases of one target; its forwards run on a copy with the same hooks."""
    from growing import SHAPES, grow
    from steady_forwards import Step, filled, head_step_of, held_by, holding, step_of

    from mlx_speculation import SpeculativeGenerator, load
    from mlx_speculation.engine import MtpDraft
    from mlx_speculation.models import ModelHooks, stream_resources

    folders = demo_models()
    model: Any
    bare: Any
    model, tokenizer = load(folders[target])
    bare, _ = load(folders[target])
    if shape != AS_IT_IS:
        model, bare = grow(model, SHAPES[shape]), grow(bare, SHAPES[shape])
    hooked = ExitStack()

    def hook(each: Any) -> None:
        """Let a model be as in a generator while a stream runs."""
        hooked.callback(ModelHooks(each).remove)
        hooked.enter_context(stream_resources(each))

    hook(bare)
    small, _ = load(folders["draft"])
    text = "\n\n".join(p.text for p in demo_prompts() if p.group == "code")
    prompt = [int(token) for token in tokenizer.encode(text)]
    prompt = (prompt * (1 + context // len(prompt)))[:context]
    caches = filled(bare, prompt)
    held, verify = held_by(caches, context), step_of(bare, caches)
    chosen: dict[str, tuple[Any, Step | None]] = {"plain": (None, None)}
    held_small = None
    if "model" in drafters:
        bare_small, _ = load(folders["draft"])
        caches = filled(bare_small, prompt)
        held_small = held_by(caches, context)
        hook(bare_small)
        chosen["model"] = small, step_of(bare_small, caches, drafts=True)
    if "mtp" in drafters and target == "hybrid":
        head = MtpDraft.from_folder(folders[target], model)
        other = MtpDraft.from_folder(folders[target], bare)
        chosen["mtp"] = head, head_step_of(other.mtp, bare, context)
    if "lookup" in drafters:
        chosen["lookup"] = "lookup", None
    for name, (draft, step) in chosen.items():
        generator = SpeculativeGenerator(model, tokenizer, draft=draft)
        for length in lengths if draft is not None else [0]:

            def open_stream(
                generator: SpeculativeGenerator = generator,
                length: int = length,
                small: Any = small if draft is small else None,
            ) -> "Stream":
                return generator.stream(
                    prompt[-1:],
                    max_tokens=ENOUGH,
                    stop_tokens=(),
                    draft_length=length,
                    prompt_cache=holding(model, held),
                    cached_tokens=prompt,
                    draft_cache=None if small is None else holding(small, held_small),
                )

            measured: list[list[float]] = [[], [], [], [], [], []]
            yield Case(
                target,
                name,
                length,
                context,
                open_stream,
                verify,
                step,
                clock,
                *measured,
            )
    hooked.close()


def table_of(cases: list[Case]) -> "Table":
    """Make the table of all cases."""
    from rich.table import Table

    table = Table(title="Achieved over ideal tokens/s", title_justify="left")
    for name in ("target", "drafter"):
        table.add_column(name)
    names = ["k", "context", "tokens/s", "efficiency", "quartiles"]
    names += ["of bare rounds", "beside, ms (quartiles)", "forward/plain"]
    for name in names:
        table.add_column(name, justify="right")
    for case in cases:
        row = case.as_json()
        table.add_row(
            case.target,
            case.drafter,
            str(case.length),
            str(case.context),
            f"{row['tokens_per_second']:.0f}",
            f"{row['efficiency']:.3f}",
            "{:.3f}..{:.3f}".format(*row["quartiles"]),
            f"{row['of_bare_rounds']:.3f}",
            "{1:.2f} ({0:.2f}..{2:.2f})".format(*row["beside_ms"]),
            f"{row['forward_over_plain']:.2f}",
        )
    return table


@app.command()
def main(
    target: Annotated[
        list[str] | None, typer.Option(help="By default dense and hybrid.")
    ] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(help="model, mtp, lookup; by default the first.")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="By default 1, 2, 4 and 8.")
    ] = None,
    contexts: Annotated[
        list[int] | None, typer.Option(min=16, help="By default 256 alone.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=3)] = 9,
    rounds: Annotated[int, typer.Option(min=1, help="In each repeat.")] = 10,
    forwards: Annotated[int, typer.Option(min=2, help="In each repeat.")] = 12,
    processor_time: Annotated[
        bool,
        typer.Option(help="Count it, and not the wall's; for OPENBLAS_NUM_THREADS=1."),
    ] = False,
    shape: Annotated[
        str, typer.Option(help="Grow the dense target to 1B or 8B; see growing.py.")
    ] = AS_IT_IS,
    blas: BlasName = "auto",
) -> None:
    """Compare rounds with the forwards in them."""
    if shape != AS_IT_IS and target != ["dense"]:
        raise typer.BadParameter("--shape grows the dense target: give --target dense")
    chosen = use_blas(blas)
    from rich.console import Console

    from mlx_speculation.environment import machine, versions

    clock = time.process_time if processor_time else time.perf_counter
    cases: list[Case] = []
    for name in target or ["dense", "hybrid"]:
        for context in contexts or [256]:
            cases += make_cases(
                name,
                drafter or ["model"],
                length or [1, 2, 4, 8],
                context,
                clock,
                shape,
            )
    started = time.perf_counter()
    for number in range(repeats + 1):
        if number == 1:  # the first was to warm up
            for case in cases:
                for measured in (case.ratios, case.bare, case.tokens, case.beside):
                    measured.clear()
                case.forwards.clear()
                case.plain.clear()
        for case in cases[number % len(cases) :] + cases[: number % len(cases)]:
            case.repeat(rounds, forwards)
    Console(highlight=False, width=130).print(table_of(cases))
    print(
        json.dumps(
            {
                "machine": machine(),
                "clock": clock.__name__,
                "versions": versions(),
                "blas": asdict(chosen),
                "seconds": time.perf_counter() - started,
                "results": [case.as_json() for case in cases],
            }
        )
    )


if __name__ == "__main__":
    run(app)
