"""`chat`: a conversation whose caches are kept between turns."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from mlx_speculation import signals
from mlx_speculation.cli.chat_template import TemplateOptions
from mlx_speculation.cli.console import Screen, percent
from mlx_speculation.cli.conversation import Conversation
from mlx_speculation.cli.inputs import decoded, sound_text
from mlx_speculation.cli.load_pair import (
    CACHE_SIZE,
    NO_REPLAY,
    CacheOptions,
    begin,
    open_pair,
)
from mlx_speculation.cli.options import (
    EndOptions,
    Json,
    PairOptions,
    Quiet,
    SamplingOptions,
)
from mlx_speculation.cli.run_app import INTERRUPTED, USAGE, fail, note
from mlx_speculation.cli.stream_view import PromptBar, as_fields, lines, show
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.option_fields import option

if TYPE_CHECKING:
    from mlx_speculation import SpeculativeGenerator
    from mlx_speculation.engine import Chunk
    from mlx_speculation.engine.options import StreamKeywords

HELP = "/reset begins anew, /quit or Ctrl-D ends, Ctrl-C ends an answer."


def chat(
    pair: PairOptions,
    template: TemplateOptions,
    sampling: SamplingOptions,
    end: EndOptions,
    colour: bool = option(
        False, "Show accepted tokens in green.", "--colour", "--color"
    ),
    cache_gigabytes: float | None = option(None, CACHE_SIZE, min=0.0, max=1e6),
    no_replay: bool = option(False, NO_REPLAY),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Talk with a model; a line is a message. Caches are kept between turns."""
    screen = Screen(json=json, quiet=quiet)
    template.check()
    end.check()
    here = begin(pair.blas, screen)
    sampling.check()
    generator = open_pair(
        pair, screen, prefix_cache=CacheOptions(cache_gigabytes=cache_gigabytes).made()
    )
    conversation = Conversation(
        generator.tokenizer,
        template,
        replay=not no_replay,
        longest=end.longest(generator),
    )
    if not conversation.rendered:
        note("no chat template is used: messages are continued as plain text")
    options: StreamKeywords = {
        "sampling": sampling.sampling(generator.tokenizer),
        **end.for_stream(generator.tokenizer),
    }
    talk = _Talk(generator, conversation, options, screen, colour)
    interrupted = talk.run()
    screen.say(talk.summary)
    screen.object(
        command="chat",
        model=pair.model,
        draft=pair.draft,
        turns=talk.turns,
        refused=talk.refused,
        interrupted=interrupted,
        notices=generator.notices,
        **here,
    )
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if talk.refused:
        raise typer.Exit(USAGE)


@dataclass(slots=True)
class _Talk:
    generator: "SpeculativeGenerator"
    conversation: Conversation
    options: "StreamKeywords"
    screen: Screen
    colour: bool
    # The text and statistics of each turn, for JSON
    turns: list[dict[str, Any]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # errors of refused messages

    @property
    def summary(self) -> str:
        """The statistics of all turns in a line."""
        counted = [turn["statistics"] for turn in self.turns]
        drafted = sum(each["drafted"] for each in counted)
        accepted = sum(each["accepted"] for each in counted)
        share = percent(accepted / drafted) if drafted else "none drafted"
        tokens = sum(each["emitted"] for each in counted)
        return f"turns: {len(self.turns)}, tokens: {tokens}, accepted: {share}"

    def run(self) -> bool:
        """Answer every message; return whether Ctrl-C has ended the chat."""
        try:
            for message in _messages(self.screen):
                if message in ("/quit", "/exit"):
                    break
                if message == "/reset":
                    self.conversation.clear()
                    self.screen.say("a new conversation")
                elif re.fullmatch("/[a-z]+", message):  # /help, or an unknown command
                    self.screen.say(HELP)
                elif message.strip():
                    self._turn(message)
        except KeyboardInterrupt:
            self.screen.say("")
            return True
        return False

    def _turn(self, message: str) -> None:
        try:
            ids = self.conversation.ask(sound_text("The message", message))
        except InvalidRequestError as error:
            said = f"{error} The conversation is as it was; /reset begins a new one."
            self.refused.append(said)
            fail(said)
            return
        bar = PromptBar(len(ids) - 1)
        options: StreamKeywords = {**self.options, "prompt_progress": bar.advance}
        stream = self.generator.stream(ids, **options)
        chunks: list[Chunk] = []
        ended = show(stream, self.screen, chunks, bar, colour=self.colour)
        result = stream.result
        self.conversation.answer(result.text, result.tokens)
        fields = as_fields(result, ended, len(ids))
        self.turns.append({"message": message, **fields})
        self.screen.say(lines(result, ended, len(ids), bar))
        if ended == "interrupted":
            signals.resume()


def _messages(screen: Screen) -> Iterator[str]:
    """Yield the lines of standard input, with a prompt if it is a terminal."""
    if not sys.stdin.isatty():
        for line in sys.stdin.buffer:
            yield decoded("Standard input", line).rstrip("\r\n")
        return
    screen.say(HELP)
    interrupted = False
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        except KeyboardInterrupt:  # often meant to end an answer that has just ended
            if interrupted:
                raise
            signals.resume()
            interrupted = True
            screen.say("\nCtrl-C again, or Ctrl-D, ends the chat.")
            continue
        interrupted = False
        yield line
