"""`generate`: continues a prompt."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mlx_speculation.cli.chat_template import TemplateOptions, encode
from mlx_speculation.cli.console import Screen
from mlx_speculation.cli.html_page import page_of
from mlx_speculation.cli.inputs import (
    check_length,
    check_output,
    checked_images,
    read_json_file,
    read_prompt,
    sound_text,
    writing,
)
from mlx_speculation.cli.kv_options import KvOptions
from mlx_speculation.cli.load_pair import begin, open_pair
from mlx_speculation.cli.options import (
    TEMPLATE,
    EndOptions,
    Json,
    PairOptions,
    Quiet,
    SamplingOptions,
)
from mlx_speculation.cli.run_app import INTERRUPTED
from mlx_speculation.cli.stream_view import (
    PromptBar,
    as_fields,
    lines,
    show,
    summary,
)
from mlx_speculation.option_fields import option

if TYPE_CHECKING:
    from mlx_speculation import Constraint, SpeculativeGenerator
    from mlx_speculation.caches import LoadedCaches
    from mlx_speculation.engine import Chunk
    from mlx_speculation.engine.options import StreamKeywords
    from mlx_speculation.engine.prompt import Prompt

ALTERNATIVES = 5
PLACE = "<query>"  # a message whose position in a template is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Output options."""

    json_schema: Path | None = option(
        None, "File with a JSON schema that the text must match."
    )
    html: Path | None = option(
        None, "Write an HTML page that shows the origin of each token."
    )
    colour: bool = option(
        False, "Show accepted tokens in green.", "--colour", "--color"
    )

    stats: bool = option(False, "Print all statistics as a table.")

    def check(self) -> Any:
        """Refuse unusable files; return the JSON schema or None."""
        if self.html is not None:
            check_output("--html", self.html)
        if self.json_schema is None:
            return None
        return read_json_file("--json-schema", self.json_schema)

    def write_page(self, page: str, screen: Screen) -> None:
        """Write the page of --html, and print its path."""
        assert self.html is not None
        with writing("--html", self.html) as file:
            file.write_text(page, encoding="utf-8")
        screen.say(f"the page is {self.html}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Options of the prompt and its answer."""

    prompt: str | None = option(
        None,
        "Text to continue; '-' or none: standard input.",
        "--prompt",
        "-p",
        panel=TEMPLATE,
    )
    image: list[Path] | None = option(
        None,
        "Image that the prompt is about; loads the target with mlx-vlm. Repeatable.",
        panel=TEMPLATE,
        show_default=False,
    )
    prefill_response: str | None = option(
        None, "Beginning of the answer.", panel=TEMPLATE
    )


def generate(
    pair: PairOptions,
    template: TemplateOptions,
    sampling: SamplingOptions,
    end: EndOptions,
    output: OutputOptions,
    kv: KvOptions,
    asks: PromptOptions,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a prompt; text on standard output, statistics on standard error."""
    screen = Screen(json=json, quiet=quiet)
    schema = output.check()
    template.check()
    kv.check()
    end.check()
    said = read_prompt(asks.prompt)
    prefix = sound_text("--prefill-response", asks.prefill_response or "")
    here = begin(pair.blas, screen)
    sampling.check()
    images = checked_images(asks.image or (), prefix)
    generator = open_pair(pair, screen, vision=True if images else None)
    before = kv.before(pair.model, generator)
    prompt, tokens, text = _prompt_of(generator, template, said, prefix, images, before)
    check_length(kv.held(before) + len(tokens), end.longest(generator))
    bar = PromptBar(len(tokens) - 1)
    options: StreamKeywords = {
        **end.for_stream(generator.tokenizer),
        **kv.for_stream(generator, before, len(tokens) + end.max_tokens, bar.advance),
        "sampling": sampling.sampling(generator.tokenizer),
        "logprobs": ALTERNATIVES if output.html is not None else None,
        "constraint": _constraint(schema, generator),
    }
    stream = generator.stream(prompt, **options)
    chunks: list[Chunk] = []
    ended = show(stream, screen, chunks, bar, colour=output.colour)
    result = stream.result
    if output.stats:
        screen.table(summary(result, ended), result=False)
    else:
        screen.say(lines(result, ended, len(tokens), bar))
    screen.object(
        command="generate",
        model=pair.model,
        draft=pair.draft,
        **as_fields(result, ended, len(tokens)),
        origins=[[origin.writer, origin.place] for origin in result.origins],
        seed=result.seed,
        memory=asdict(result.memory),
        notices=generator.notices,
        **here,
    )
    if output.html is not None:  # this can fail, so the text comes first
        title = _title(pair)
        page = page_of(result, chunks, generator.tokenizer, title, ended, text)
        output.write_page(page, screen)
    if ended == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _title(pair: PairOptions) -> str:
    drafted = f"drafted by {Path(pair.draft).name}" if pair.draft else "plain decoding"
    return f"{Path(pair.model).name}, {drafted}"


def _prompt_of(
    generator: "SpeculativeGenerator",
    template: TemplateOptions,
    said: str,
    prefix: str,
    images: Sequence[Path],
    before: "LoadedCaches | None",
) -> "tuple[Prompt, list[int], str]":
    """Return the prompt, its token ids, and its text.

    With a prompt cache the template's part before the message is left out, since
    `mlx_lm.cache_prompt` has read that part.
    """
    if images:
        made = template.with_images(generator, said, images)
        return made, made.tokens, said
    tokenizer = generator.tokenizer

    def rendered(content: str) -> str:
        message = [{"role": "user", "content": content}]
        return template.render(tokenizer, message, prefix or None)

    templated = template.applies(tokenizer)
    if templated:
        start = rendered(PLACE).find(PLACE) if before is not None else 0
        text = rendered(said)[max(0, start) :]
    else:
        text = said + prefix
    ids = encode(tokenizer, text, rendered=templated or before is not None)
    return ids, ids, text


def _constraint(schema: Any, generator: "SpeculativeGenerator") -> "Constraint | None":
    if schema is None:
        return None
    from mlx_speculation import json_schema

    # Without `compact` a small model may write whitespace endlessly.
    return json_schema(schema, generator.tokenizer, compact=True)
