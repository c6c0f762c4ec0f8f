"""Measures cheaper drafts: bytes and time of a draft step, and what is still accepted.

The variants of one draft model are taken as it was loaded and in fewer bits, each with
all token ids and with the most frequent ones. Those are counted over the standard
library's sources on this machine, which the bundled models were trained on; the prompts
were held out of that.

A draft step is one forward over one token and the choice, as in a chain: what is timed
is a whole chain of `--length` steps behind a prompt, evaluated once, over its length.
The variants take turns, so that a slow moment of the machine meets all of them alike,
and ratios are to the first one in the same turn. Bytes are those of all weights of the
draft, and of the rows that are copied for a reduced vocabulary. Acceptance is counted
on the prompts of compare.py, and every text is checked against plain decoding first.

The last line on standard output is one JSON object with everything.

    python scripts/benchmark_cheaper.py
    python scripts/benchmark_cheaper.py --bits 4 --ids 512 --prompts 2 --turns 20
"""

import json
import sysconfig
import time
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Annotated, Any

import typer
from benchmark_options import Blas, DraftModel, folder_of, progress, texts_of

from mlx_speculation.blas import use_blas
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from drafter_list import Bench

    from mlx_speculation.engine import Statistics

GROUPS = ("code", "prose")
COUNTED = 1_000_000  # characters of source text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def benchmark(
    target: Annotated[str, typer.Option(help="A bundled target, or a folder.")] = (
        "dense"
    ),
    draft: DraftModel = None,
    bits: Annotated[
        list[int] | None, typer.Option(help="By default 8 and 4; beside as loaded.")
    ] = None,
    ids: Annotated[
        list[int] | None,
        typer.Option(help="Sizes of vocabularies; by default 1536 and 1024."),
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens drafted in a round.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="Of each group.")] = 12,
    tokens: Annotated[int, typer.Option(min=1, help="Continued by each run.")] = 128,
    turns: Annotated[int, typer.Option(min=2, help="Chains timed.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    blas: Blas = "auto",
) -> None:
    """Time draft steps by turns, and count what is accepted."""
    chosen = use_blas(blas)
    progress(f"BLAS: {chosen.detail}")
    from drafter_list import Bench

    from mlx_speculation.environment import machine, versions

    bench, small = Bench.load(folder_of(target)), folder_of(draft or "draft")
    variants = _variants(bench, small, bits or [8, 4], ids or [1536, 1024])
    _time(bench, variants, length, turns)
    for variant in variants:
        _count(bench, variant, length, prompts, tokens, temperature)
    _print(variants)
    values = {
        "target": target,
        "length": length,
        "prompts": prompts,
        "tokens": tokens,
        "turns": turns,
        "temperature": temperature,
    }
    about = {"machine": machine(), "versions": versions(), "blas": asdict(chosen)}
    results = [variant.as_json(variants[0]) for variant in variants]
    print(json.dumps({**about, **values, "results": results}))


@dataclass(slots=True)
class Variant:
    """One way to hold the draft.

    Attributes:
        bits: of its weights; None: as it was loaded.
        ids: token ids that it drafts from; None: all.
        model: the draft model.
        bytes: of its weights, and of the rows that were copied.
        seconds: of a draft step, in each turn.
        counts: what was drafted and accepted, by group.
    """

    bits: int | None
    ids: list[int] | None
    model: Any
    bytes: int
    seconds: list[float] = field(default_factory=list)
    counts: "dict[str, Statistics]" = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What it is called."""
        held = "as loaded" if self.bits is None else f"{self.bits} bits"
        return held if self.ids is None else f"{held}, {len(self.ids)} ids"

    def over(self, first: "Variant") -> list[float]:
        """Return the quartiles of its time over another's in the same turn."""
        pairs = zip(self.seconds, first.seconds, strict=True)
        return quantiles([one / other for one, other in pairs], n=4)

    def as_json(self, first: "Variant") -> dict[str, Any]:
        """Return the values of the JSON object."""
        return {
            "variant": self.name,
            "bits": self.bits,
            "ids": None if self.ids is None else len(self.ids),
            "bytes": self.bytes,
            "step_seconds": median(self.seconds),
            "over_first": self.over(first),
            "groups": {
                group: {
                    "drafted": counts.drafted,
                    "accepted": counts.accepted,
                    "acceptance_rate": counts.acceptance_rate,
                    "mean_accepted_length": counts.mean_accepted_length,
                }
                for group, counts in self.counts.items()
            },
        }


def _variants(
    bench: "Bench", folder: Path, bits: list[int], sizes: list[int]
) -> list[Variant]:
    """Load the draft once for each number of bits."""
    from mlx_speculation import load, reduced_vocabulary
    from mlx_speculation.models import ReducedOutput, find_parts, quantize_weights
    from mlx_speculation.models.quantize import weight_bytes

    texts = _sources()
    vocabularies: list[list[int] | None] = [None]
    for size in sizes:
        kept = reduced_vocabulary(texts, size, tokenizer=bench.tokenizer)
        vocabularies.append(kept)
    found = []
    for held, ids in product([None, *bits], vocabularies):
        model, _ = load(folder)
        if held is not None:
            quantize_weights(model, held)
        nbytes = weight_bytes(model)
        if ids is not None:
            nbytes += weight_bytes(ReducedOutput(find_parts(model), ids).layer)
        found.append(Variant(held, ids, model, nbytes))
    return found


def _sources() -> list[str]:
    """Return sources of the standard library, `COUNTED` characters of them."""
    texts, count = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        count += len(texts[-1])
        if count > COUNTED:
            break
    return texts


def _time(bench: "Bench", variants: list[Variant], length: int, turns: int) -> None:
    """Time chains of drafts behind a prompt, the variants by turns."""
    import mlx.core as mx

    from mlx_speculation import Sampling
    from mlx_speculation.engine.drafters.base import Choices
    from mlx_speculation.engine.drafters.draft_model import DraftModel
    from mlx_speculation.engine.prompt import Sequence
    from mlx_speculation.models import Lane, ReducedOutput, TokenIds, find_parts
    from mlx_speculation.samplers import Chooser, Verifier

    text = texts_of("code", 1)[0].text
    prompt = [int(token) for token in bench.plain.tokenizer.encode(text)]
    width = TokenIds.of(bench.tokenizer).width
    choices = Choices(Verifier(Chooser(Sampling(seed=0), width)))
    drafters = []
    for variant in variants:
        reduced = None
        if variant.ids is not None:
            reduced = ReducedOutput(find_parts(variant.model), variant.ids)
        lane = Lane(variant.model, sliding="slack")
        drafters.append(DraftModel(lambda: lane, lane, reduced=reduced))  # noqa: B023
    sequence = Sequence(prompt)
    for drafter in drafters:
        drafter.begin(sequence)
    for turn in range(turns + 2):  # two to warm up
        places = [(turn + place) % len(variants) for place in range(len(variants))]
        for place in places:
            started = time.perf_counter()
            draft = drafters[place].propose(sequence, length, choices.ending(None))
            mx.eval(draft.tokens)
            seconds = time.perf_counter() - started
            drafters[place].discard()
            if turn > 1:
                variants[place].seconds.append(seconds / length)


def _count(
    bench: "Bench",
    variant: Variant,
    length: int,
    prompts: int,
    tokens: int,
    temperature: float,
) -> None:
    """Continue the prompts, and count what is accepted."""
    from drafter_list import Source, added

    from mlx_speculation import Sampling, SpeculativeGenerator
    from mlx_speculation.engine import Statistics

    generator = SpeculativeGenerator(
        bench.model,
        bench.tokenizer,
        draft=variant.model,
        draft_vocabulary=variant.ids,
    )
    source = Source(variant.name, generator)
    for group in GROUPS:
        progress(f"{variant.name}: {group}")
        variant.counts[group] = Statistics()
        for index, text in enumerate(texts_of(group, prompts)):
            sampling = Sampling(temperature=temperature, seed=index)
            counts, _ = bench.checked_run(source, text.text, tokens, sampling, length)
            variant.counts[group] = added(variant.counts[group], counts)


def _print(variants: list[Variant]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Cheaper drafts", title_justify="left")
    table.add_column("draft", no_wrap=True)
    columns = ["KB", "ms a step", "x first", "quartiles"]
    columns += [f"{group} accepted" for group in GROUPS]
    for column in [*columns, *(f"{group} length" for group in GROUPS)]:
        table.add_column(column, justify="right", no_wrap=column == "quartiles")
    for variant in variants:
        low, middle, high = variant.over(variants[0])
        counts = [variant.counts[group] for group in GROUPS]
        table.add_row(
            variant.name,
            f"{variant.bytes / 1000:,.0f}",
            f"{1000 * median(variant.seconds):.2f}",
            f"{middle:.2f}",
            f"{low:.2f}..{high:.2f}",
            *(f"{100 * each.acceptance_rate:.1f}%" for each in counts),
            *(f"{each.mean_accepted_length:.2f}" for each in counts),
        )
    Console(highlight=False, width=120).print(table)


if __name__ == "__main__":
    run(app)
