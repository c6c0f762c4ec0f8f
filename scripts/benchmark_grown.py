"""Measures speculation at the cost of large models, with small ones grown to size.

No weights of 1 or 8 billion parameters are bundled. The dense demo model is grown
instead (growing.py): the same function at a large model's price, so that acceptance is
real text's and time is the shape's. In bfloat16 and 4 bit rounding changes the function
a little; acceptance is that of the grown model itself. Its vocabulary stays at 2,048
ids, so that the output layer costs less than a real model's.

The arms take turns on the same prompts, texts are checked first, and ratios are to the
faster plain decoding in the same pass, all as in compare.py: plain decoding, ours and
mlx-lm's; the draft model of 1.7 M parameters and, where asked for, one grown to 6 % of
8 B, at fixed lengths and by measurement (k=auto, after `calibrate`); the EAGLE-3 head
of one layer, which stands for MTP heads too; lookups.

The last line on standard output is one JSON object with everything.

    python scripts/benchmark_grown.py --shape 8B --bits 16
    python scripts/benchmark_grown.py --shape 1B --bits 4 --context 8192 --group edit
"""

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from benchmark_options import GROUPS, Group, progress, texts_of

from mlx_speculation.blas import use_blas
from mlx_speculation.cli import run
from mlx_speculation.demo import demo_models, demo_prompts

if TYPE_CHECKING:
    from benchmark_arms import Arm, Models
    from benchmark_case import Case

BITS_GROUP = 64
# In half precision most texts part at a near-tie somewhere, and each place that is
# tried decodes the text again.
PLACES = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def benchmark(
    shape: Annotated[str, typer.Option(help="1B, 8B or 'as it is'.")] = "8B",
    bits: Annotated[int, typer.Option(help="16 for bfloat16, or 4.")] = 16,
    draft_shape: Annotated[
        list[str] | None,
        typer.Option(help="small, 0.5B or none; by default small alone."),
    ] = None,
    draft_length: Annotated[
        list[int] | None, typer.Option(min=1, help="By default 2, 4, 6 and 8.")
    ] = None,
    group: Group = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    context: Annotated[
        int, typer.Option(min=0, help="Tokens of other text before each prompt.")
    ] = 0,
    tokens: Annotated[int, typer.Option(min=24)] = 128,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    mlx_lm_speculation: Annotated[
        bool, typer.Option(help="mlx-lm's own, with the first draft, too.")
    ] = True,
) -> None:
    """Measure plain and speculative decoding on a grown model."""
    use_blas("auto")
    from benchmark_report import as_json, print_case

    from mlx_speculation.environment import machine, versions

    models, drafts, sizes = _models(shape, bits, draft_shape or ["small"])
    cases = []
    lengths = draft_length or [2, 4, 6, 8]
    costs: dict[str, Any] = {}
    arms = list(_arms(models, drafts, lengths, costs, mlx_lm_speculation))
    for name in group or GROUPS:
        case = _run(models, arms, (name, temperature), context, tokens, repeats)
        if case is not None:
            print_case(case)
            cases.append(case)
    settings = {
        "shape": shape,
        "bits": bits,
        "parameters": sizes,
        "context": context,
        "tokens": tokens,
        "repeats": repeats,
        "round_ms": costs,
    }
    report = {"grown": settings, "machine": machine(), "versions": versions()}
    print(json.dumps({**report, "results": as_json(cases)}))


def _models(
    shape: str, bits: int, draft_shapes: list[str]
) -> "tuple[Models, dict[str, Any], dict[str, int]]":
    """Return the grown target with its first draft, all drafts, and their sizes."""
    import mlx.nn as nn
    from benchmark_arms import Models
    from growing import DRAFT_SHAPES, SHAPES, fit_head, grow, parameters_of

    from mlx_speculation import SpeculativeGenerator, load

    folders = demo_models()
    small: Any
    small, tokenizer = load(folders["dense"])
    target = grow(small, SHAPES[shape])
    sizes = {"target": parameters_of(target)}
    if bits != 16:
        nn.quantize(target, group_size=BITS_GROUP, bits=bits)
        target.eval()
    drafts: dict[str, Any] = {}
    for name in draft_shapes:
        draft: Any = load(folders["draft"])[0]
        if name != "small":
            draft = grow(draft, DRAFT_SHAPES[name])
        drafts[name] = draft
        sizes[name] = parameters_of(draft)
    first = next(iter(drafts.values()))
    drafts["eagle"] = fit_head(folders["eagle"], small, target)
    sizes["eagle"] = parameters_of(drafts["eagle"].own_weights)
    typer.secho(f"parameters: {sizes}", err=True)
    models = Models(
        target,
        first,
        SpeculativeGenerator(target, tokenizer, draft=None),
        SpeculativeGenerator(target, tokenizer, draft=first),
    )
    return models, drafts, sizes


def _arms(
    models: "Models",
    drafts: dict[str, Any],
    lengths: list[int],
    costs: dict[str, Any],
    mlx_lm_speculation: bool,
) -> Iterator["Arm"]:
    """Yield all arms; the first two are plain decoding."""
    from benchmark_arms import Arm, mlx_lm_arms, ours, plain_arms

    from mlx_speculation import SpeculativeGenerator

    yield from plain_arms(models)
    plain = models.plain
    kinds: dict[str, Any] = {**drafts, "lookup": "lookup"}
    for kind, draft in kinds.items():
        generator = SpeculativeGenerator(plain.model, plain.tokenizer, draft=draft)
        for length in lengths:
            yield Arm("ours", length, partial(ours, generator, length), kind)
        table = generator.calibrate()
        costs[kind] = {n: round(seconds * 1e3, 2) for n, seconds in table[0].items()}
        typer.secho(f"{kind}: ms of a round by length: {costs[kind]}", err=True)
        yield Arm("ours", 8, partial(ours, generator, None), kind, auto=True)
    if mlx_lm_speculation:
        yield from mlx_lm_arms(models, lengths)


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
