"""Measures speculation at the cost of large models, with small ones grown to size.

No weights of 1 or 8 billion parameters are bundled. A demo model is grown instead
(growing.py, growing_hybrid.py): the same function at a large model's price, so that
acceptance is real text's and time is the shape's. In bfloat16 and 4 bit rounding
changes the function a little; acceptance is that of the grown model itself. Its
vocabulary stays at 2,048 ids, so that the output layer costs less than a real model's.

The arms take turns on the same prompts, texts are checked first, and ratios are to the
faster plain decoding in the same pass, all as in compare.py: plain decoding, ours and
mlx-lm's; lookups; and

    dense   the draft model of 1.7 M parameters and, where asked for, one grown to 6 %
            of 8 B; the EAGLE-3 head of one layer, which keeps its size
    hybrid  the MTP head, grown to one layer of the target's size

at fixed lengths and, for the dense target or with --auto, by measurement (after
`calibrate`). A table is printed as soon as a group of prompts is done. The last line on
standard output is one JSON object with everything.

    python scripts/benchmark_grown.py --shape 8B --bits 16
    python scripts/benchmark_grown.py --shape 1B --bits 4 --context 8192 --group edit
    python scripts/benchmark_grown.py --target hybrid --shape 8B --bits 16 \
        --group code --group edit --tokens 96

With --plain-runs, plain decoding alone is measured, ours over mlx-lm's, by turns of 16
tokens (benchmark_plain.py):

    python scripts/benchmark_grown.py --shape 1B --bits 16 --plain-runs 8
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from benchmark_options import GROUPS, Group, progress, texts_of

from mlx_speculation.blas import use_blas
from mlx_speculation.cli import run
from mlx_speculation.demo import demo_models, demo_prompts

if TYPE_CHECKING:
    from benchmark_arms import Arm, Models
    from benchmark_case import Case
    from benchmark_plain import PlainRatio

LENGTHS = {"dense": [2, 4, 6, 8], "hybrid": [1, 2, 4, 8]}
# In half precision most texts part at a near-tie somewhere, and each place that is
# tried decodes the text again.
PLACES = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(slots=True)
class Pair:
    """A grown target with all that drafts for it.

    Attributes:
        models: for the arms, with the draft model that mlx-lm's take.
        drafts: by their names in the tables.
        sizes: parameters of each.
        shares: of the target's parameters, by kind of module.
    """

    models: "Models"
    drafts: dict[str, Any]
    sizes: dict[str, int]
    shares: dict[str, float] = field(default_factory=dict)


@app.command()
def benchmark(
    target: Annotated[
        Literal["dense", "hybrid"], typer.Option(help="Which demo target is grown.")
    ] = "dense",
    shape: Annotated[str, typer.Option(help="1B, 8B or 'as it is'.")] = "8B",
    bits: Annotated[int, typer.Option(help="16 for bfloat16, or 4.")] = 16,
    draft_shape: Annotated[
        list[str] | None,
        typer.Option(help="Of the dense target: small, 0.5B; by default small alone."),
    ] = None,
    draft_length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="By default 2, 4, 6, 8; for the hybrid 1, 2, 4, 8."),
    ] = None,
    group: Group = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    context: Annotated[
        int, typer.Option(min=0, help="Tokens of other text before each prompt.")
    ] = 0,
    tokens: Annotated[int, typer.Option(min=24)] = 128,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    auto: Annotated[
        bool | None,
        typer.Option(help="The adaptive draft length too; by default for the dense."),
    ] = None,
    mlx_lm_speculation: Annotated[
        bool,
        typer.Option(help="mlx-lm's own too, on the dense target, with its draft."),
    ] = True,
    plain_runs: Annotated[
        int, typer.Option(min=0, help="Plain decoding alone, 11 turns in each run.")
    ] = 0,
) -> None:
    """Measure plain and speculative decoding on a grown model."""
    if target == "hybrid" and draft_shape:
        raise typer.BadParameter("--draft-shape is for --target dense")
    use_blas("auto")
    import mlx.core as mx
    from benchmark_report import as_json, print_case

    from mlx_speculation.environment import machine, versions

    begun, packed = time.perf_counter(), None if bits == 16 else bits
    if target == "hybrid":
        pair = _hybrid(shape, packed)
    else:
        pair = _dense(shape, packed, draft_shape or ["small"])
    seconds = time.perf_counter() - begun
    typer.secho(
        f"grown in {seconds:.0f} s, at most {mx.get_peak_memory() / 1e9:.1f} GB; "
        f"parameters: {pair.sizes} {pair.shares or ''}",
        err=True,
    )
    if plain_runs:
        ratio = _plain(pair.models, f"{target} {shape}", temperature, plain_runs)
        report = {"machine": machine(), "versions": versions()}
        print(json.dumps({**report, "plain": asdict(ratio)}))
        return
    cases = []
    lengths = draft_length or LENGTHS[target]
    costs: dict[str, Any] = {}
    measured = costs if (target == "dense" if auto is None else auto) else None
    arms = list(_arms(pair, lengths, measured))
    if mlx_lm_speculation and target == "dense":
        arms += _theirs(pair, lengths)
    for name in group or GROUPS:
        case = _run(pair.models, arms, (name, temperature), context, tokens, repeats)
        if case is not None:
            print_case(case)
            cases.append(case)
    settings = {
        "target": target,
        "shape": shape,
        "bits": bits,
        "parameters": pair.sizes,
        "shares": pair.shares,
        "context": context,
        "tokens": tokens,
        "repeats": repeats,
        "round_ms": costs,
    }
    report = {"grown": settings, "machine": machine(), "versions": versions()}
    print(json.dumps({**report, "results": as_json(cases)}))


def _plain(models: "Models", name: str, temperature: float, runs: int) -> "PlainRatio":
    """Measure plain decoding alone, and print what is found."""
    from benchmark_arms import Job
    from benchmark_plain import measure_plain

    prompt = models.encode(texts_of("code", 1)[0].text)
    ratio = measure_plain(name, models, Job(prompt, 1, temperature, 0), runs)
    spread = f"{ratio.lower:.3f} to {ratio.upper:.3f}; {ratio.slices} turns"
    progress(f"{name}: our plain decoding over mlx-lm's: {ratio.median:.3f} ({spread})")
    return ratio


def _dense(shape: str, bits: int | None, draft_shapes: list[str]) -> Pair:
    """Return the grown dense target with its drafts, the first of them a model."""
    from growing import DRAFT_SHAPES, SHAPES, fit_head, grow, parameters_of

    from mlx_speculation import load

    folders = demo_models()
    small: Any
    small, tokenizer = load(folders["dense"])
    target = grow(small, _known(SHAPES, shape), bits=bits)
    drafts: dict[str, Any] = {}
    for name in draft_shapes:
        draft: Any = load(folders["draft"])[0]
        if name != "small":
            draft = grow(draft, _known(DRAFT_SHAPES, name))
        drafts[name] = draft
    sizes = {name: parameters_of(draft) for name, draft in drafts.items()}
    models = _models_of(target, tokenizer, next(iter(drafts.values())))
    drafts["eagle"] = fit_head(folders["eagle"], small, target)
    sizes["eagle"] = parameters_of(drafts["eagle"].own_weights)
    return Pair(models, drafts, {"target": parameters_of(target), **sizes})


def _hybrid(shape: str, bits: int | None) -> Pair:
    """Return the grown hybrid target with its grown MTP head, quantized as it is."""
    from growing import parameters_of
    from growing_hybrid import HYBRID_SHAPES, fit_mtp_head, grow_hybrid, shares_of

    from mlx_speculation import load

    folder = demo_models()["hybrid"]
    small: Any
    small, tokenizer = load(folder)
    target = grow_hybrid(small, _known(HYBRID_SHAPES, shape), bits=bits)
    head = fit_mtp_head(folder, small, target, bits=bits)
    sizes = {"target": parameters_of(target), "mtp": parameters_of(head.head)}
    models = _models_of(target, tokenizer)
    return Pair(models, {"mtp": head}, sizes, shares_of(target))


def _known(shapes: dict[str, Any], name: str) -> Any:
    if name not in shapes:
        raise typer.BadParameter(
            f"the shapes are {', '.join(shapes)}; there is no {name!r}"
        )
    return shapes[name]


def _models_of(target: Any, tokenizer: Any, draft: Any = None) -> "Models":
    """Return a target for the arms; without a draft model it stands in for one."""
    from benchmark_arms import Models

    from mlx_speculation import SpeculativeGenerator

    plain = SpeculativeGenerator(target, tokenizer, draft=None)
    if draft is None:
        return Models(target, target, plain, plain)
    drafting = SpeculativeGenerator(target, tokenizer, draft=draft)
    return Models(target, draft, plain, drafting)


def _arms(
    pair: Pair, lengths: list[int], costs: dict[str, Any] | None
) -> Iterator["Arm"]:
    """Yield our arms; the first two are plain decoding.

    Args:
        pair: the target and what drafts.
        lengths: drafted in a round, each an arm.
        costs: filled with milliseconds of rounds, for arms by measurement; None: no
            such arms.
    """
    from benchmark_arms import Arm, ours, plain_arms

    from mlx_speculation import SpeculativeGenerator
    from mlx_speculation.engine.draft_length.policy_factory import LONGEST

    yield from plain_arms(pair.models)
    plain = pair.models.plain
    kinds: dict[str, Any] = {**pair.drafts, "lookup": "lookup"}
    for kind, draft in kinds.items():
        generator = SpeculativeGenerator(plain.model, plain.tokenizer, draft=draft)
        for length in lengths:
            yield Arm("ours", length, partial(ours, generator, length), kind)
        if costs is None:
            continue
        table = generator.calibrate()
        costs[kind] = {n: round(seconds * 1e3, 2) for n, seconds in table[0].items()}
        typer.secho(f"{kind}: ms of a round by length: {costs[kind]}", err=True)
        yield Arm("ours", LONGEST, partial(ours, generator, None), kind, auto=True)


def _theirs(pair: Pair, lengths: list[int]) -> "list[Arm]":
    from benchmark_arms import mlx_lm_arms

    return list(mlx_lm_arms(pair.models, lengths))


def _run(
    models: "Models",
    arms: "list[Arm]",
    what: tuple[str, float],
    context: int,
    tokens: int,
    repeats: int,
) -> "Case | None":
    """Run one case; say what is wrong with a text instead of ending."""
    from benchmark_arms import Job
    from benchmark_case import Case, Series, run_case

    group, temperature = what
    texts = texts_of(group, repeats)
    before: list[int] = []
    while len(before) < context:
        for text in demo_prompts():
            before += models.encode(text.text)
    jobs = [
        Job((before[:context] + models.encode(t.text)), tokens, temperature, number)
        for number, t in enumerate(texts)
    ]
    sources = [text.source for text in texts]
    case = Case("grown", group, temperature, sources, [Series(arm) for arm in arms])
    try:
        run_case(case, models, jobs, repeats, progress, places=PLACES)
    except AssertionError as error:
        typer.secho(f"no figures of {case}: {error}", err=True, fg=typer.colors.RED)
        return None
    return case


if __name__ == "__main__":
    run(app)
