"""`check`: tests that drafts do not change the text of a model on this machine."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from mlx_speculation.cli.chat_template import encode
from mlx_speculation.cli.console import Screen
from mlx_speculation.cli.inputs import read_prompt
from mlx_speculation.cli.load_pair import as_object, begin, open_pair
from mlx_speculation.cli.measure import Compared, parting_of
from mlx_speculation.cli.options import Json, PairOptions, SamplingOptions
from mlx_speculation.cli.run_app import FAILED, INTERRUPTED
from mlx_speculation.demo import demo_prompts
from mlx_speculation.environment import machine
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.option_fields import option

if TYPE_CHECKING:
    from mlx_speculation import SpeculativeGenerator
    from mlx_speculation.engine.equivalence.rows import Place
    from mlx_speculation.engine.equivalence.verdict import RowVerdict

USUAL_LENGTH = 4  # an adaptive length could be 0, and no draft would be compared


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Options of a comparison."""

    prompt: str | None = option(
        None,
        "Prompt; '-' reads standard input. Default: a bundled one.",
        "--prompt",
        "-p",
    )
    tokens: int = option(64, "Number of tokens to compare.", "--tokens", "-m", min=1)
    rows: int = option(4, "Number of drafted tokens per verification.", min=1, max=64)
    places: int = option(8, "Number of places in the text to verify at.", min=1)
    tolerance: float | None = option(
        None,
        "Largest margin of a near-tie. Default: twice the median difference of the "
        "logits of the two ways.",
        min=0.0,
    )
    context: int = option(
        1024, "Positions up to which --exact is tried.", min=1, max=1 << 20
    )

    def text(self) -> str:
        """Return the prompt; refuse --tokens below the number of tokens of a draft."""
        if self.tokens < self.rows:
            raise InvalidRequestError(
                f"--tokens is {self.tokens}, but a draft has {self.rows} tokens "
                f"(--rows). Give --tokens {self.rows} or more."
            )
        if self.prompt is None:
            return demo_prompts()[0].text
        return read_prompt(self.prompt)


def check(
    pair: PairOptions,
    sampling: SamplingOptions,
    compare: CompareOptions,
    json: Json = False,
) -> None:
    """Check that drafts leave the text as it is, on this machine with this model.

    Parts of a text that the model writes, with one token wrong, are fed to it at once
    and token by token, and the logits are compared. Unless --draft is none, texts are
    compared too. The last line is the result; the status is 1 for a real difference.

    With --exact N, only exact mode is checked: whether the bits of a token's logits
    depend on its place in a forward of N tokens, and how long such a forward takes. If
    bits differ, exact mode is refused from then on.
    """
    screen = Screen(json=json)
    if pair.exact:
        _check_exact(pair, compare.context, screen)
        return
    text = compare.text()
    here = begin(pair.blas, screen)
    sampling.check()
    generator = open_pair(pair, screen)
    ids = encode(generator.tokenizer, text, rendered=False)
    result: list[Place] = []
    compared, interrupted = None, False
    try:
        _rows(generator, ids, compare, screen, result)
        if pair.draft is not None:
            compared = _compare(pair, generator, ids, compare.tokens, sampling, screen)
    except KeyboardInterrupt:
        interrupted = True
    if not result:
        raise KeyboardInterrupt
    from mlx_speculation.engine.equivalence.verdict import judge, usual_tolerance

    tolerance = compare.tolerance
    judged = judge(result, usual_tolerance(result) if tolerance is None else tolerance)
    same = judged.verdict != "different" and (compared is None or compared.same)
    screen.table(_table(result))
    texts = "" if pair.draft is None else ", and no text was compared"
    stopped = f", as far as checked before Ctrl-C: {len(result)} places{texts}"
    verdict = _verdict(judged, compared, same=same)
    screen.text(f"{verdict}{stopped if interrupted else ''}\n")
    screen.object(
        command="check",
        model=pair.model,
        draft=pair.draft,
        same=same,
        interrupted=interrupted,
        rows=judged,
        places=result,
        text=None if compared is None else _object(compared),
        notices=generator.notices,
        machine=machine(),
        **here,
    )
    if interrupted or not same:
        raise typer.Exit(FAILED if not same else INTERRUPTED)


def _verdict(judged: "RowVerdict", compared: Compared | None, *, same: bool) -> str:
    lines = [f"first: {judged.first}"] if judged.first is not None else []
    lines.append(f"rows: {judged}")
    lines += [] if compared is None else [f"text: {_described(compared)}"]
    result = "the output is the same" if same else "IT DIFFERS"
    return "\n".join([*lines, f"result: {result}"])


def _check_exact(pair: PairOptions, context: int, screen: Screen) -> None:
    """Check exact mode up to a context length; print and save the verdict."""
    here = begin(pair.blas, screen)
    from mlx_speculation.caches import FixedShape
    from mlx_speculation.engine.equivalence.exact_rows import check_exact
    from mlx_speculation.engine.exact_verdict import save_verdict
    from mlx_speculation.models import wired

    generator = open_pair(replace(pair, draft=None, draft_length=None, exact=0), screen)
    model, shape = generator.model, FixedShape(pair.exact)
    with wired(model), screen.progress("checking exact mode") as report:
        value = check_exact(model, shape, context, report=report)
    save_verdict(model, shape, value)
    plain, exact = value.plain_seconds * 1e3, value.exact_seconds * 1e3
    result = "exact keeps its promise here" if value.same else "EXACT IS NOT EXACT HERE"
    screen.text(
        f"rows: {value}, in contexts of up to {value.context} positions\n"
        f"price: a forward of {shape.rows} rows takes {exact:.2f} ms, "
        f"{exact / plain:.2f} times as much as a plain step with {plain:.2f} ms\n"
        f"result: {result}\n"
    )
    screen.object(
        command="check",
        model=pair.model,
        exact=shape.rows,
        same=value.same,
        found=asdict(value),
        machine=machine(),
        **here,
    )
    if not value.same:
        raise typer.Exit(FAILED)


def _rows(
    generator: "SpeculativeGenerator",
    prompt: list[int],
    compare: CompareOptions,
    screen: Screen,
    result: list["Place"],
) -> None:
    """Verify drafts at once and token by token; append the places to `result`."""
    from mlx_speculation.engine.equivalence.rows import verify_both_ways
    from mlx_speculation.models import wired

    model, places = generator.model, compare.places
    options: dict[str, Any] = {"draft_length": compare.rows, "places": places}
    plain = generator.stream(
        prompt, max_tokens=compare.tokens, draft_length=0, stop_tokens=()
    )
    with wired(model), screen.progress("verifying drafts") as report:
        text = [chunk.token for chunk in plain]
        options |= {"seed": 0, "sliding": "slack"}
        for place in verify_both_ways(model, prompt, text, **options):
            result.append(place)
            report(len(result), places)


def _table(result: Sequence["Place"]) -> Table:
    table = Table(title="Drafts verified at once and token by token")
    for column in ("after token", "rows", "rows that differ", "largest difference"):
        table.add_column(column, justify="right")
    for place in result:
        differing = sum(row.differs for row in place.rows)
        numbers = (place.position, len(place.rows), differing)
        table.add_row(*map(str, numbers), f"{place.difference:.3g}")
    return table


def _compare(
    pair: PairOptions,
    generator: "SpeculativeGenerator",
    prompt: list[int],
    tokens: int,
    options: SamplingOptions,
    screen: Screen,
) -> Compared:
    sampling = options.sampling(generator.tokenizer).with_seed()
    arguments: dict[str, Any] = {"max_tokens": tokens, "stop_tokens": ()}
    arguments["sampling"] = sampling
    with screen.progress("generating with and without the draft"):
        plain = generator.generate(prompt, draft_length=0, **arguments)
        length = USUAL_LENGTH if pair.draft_length is None else pair.draft_length
        drafted = generator.generate(prompt, draft_length=length, **arguments)
        parting = parting_of(generator, sampling, prompt, plain, drafted)
    return Compared(plain, drafted, parting)


def _described(texts: Compared) -> str:
    if texts.parting is None:
        stats = texts.drafted.stats
        return (
            f"equal: {len(texts.plain.tokens)} tokens with and without the draft, "
            f"{stats.drafted} of them drafted and {stats.accepted} accepted"
        )
    return f"{'near-tie' if texts.same else 'different'}: {texts.parting}"


def _object(texts: Compared) -> dict[str, Any]:
    return {
        "same": texts.same,
        "tokens": len(texts.plain.tokens),
        "parting": texts.parting,
        "seed": texts.plain.seed,
        "statistics": as_object(texts.drafted.stats),
    }
