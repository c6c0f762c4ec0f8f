"""`chat`: a conversation whose caches are kept between turns."""

import sys
from collections.abc import Iterator
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
    as_object,
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
from mlx_speculation.cli.run_app import INTERRUPTED, note
from mlx_speculation.cli.stream_view import PromptBar, lines, show
from mlx_speculation.environment import versions
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
    blas = begin(pair.blas, screen)
    sampling.check()
    generator = open_pair(
        pair, screen, prefix_cache=CacheOptions(cache_gigabytes=cache_gigabytes).made()
    )
    conversation = Conversation(generator.tokenizer, template, replay=not no_replay)
    if not conversation.rendered:
        note("no chat template is used: messages are continued as plain text")
    talk = _Talk(generator, conversation, sampling, end, screen, colour=colour)
    interrupted = talk.run()
    screen.say(talk.summary)
    screen.object(
        command="chat",
        model=pair.model,
        draft=pair.draft,
        turns=talk.turns,
        interrupted=interrupted,
        notices=generator.notices,
        blas=blas,
        versions=versions(),
    )
    if interrupted:
        raise typer.Exit(INTERRUPTED)


class _Talk:
    """The turns of a conversation.

    Attributes:
        turns: the texts and statistics of each turn, for JSON.
    """

    def __init__(
        self,
        generator: "SpeculativeGenerator",
        conversation: Conversation,
        sampling: SamplingOptions,
        end: EndOptions,
        screen: Screen,
        *,
        colour: bool,
    ) -> None:
        self._generator, self._conversation = generator, conversation
        self._options: StreamKeywords = {
            "sampling": sampling.sampling(generator.tokenizer),
            **end.for_stream(generator.tokenizer),
        }
        self._screen, self._colour = screen, colour
        self.turns: list[dict[str, Any]] = []

    @property
    def summary(self) -> str:
        """The statistics of all turns in a line."""
        counted = [turn["statistics"] for turn in self.turns]
        drafted = sum(each["drafted"] for each in counted)
        accepted = sum(each["accepted"] for each in counted)
        share = percent(accepted / drafted) if drafted else "none drafted"
        tokens = sum(each["emitted"] for each in counted)
        return f"{len(self.turns)} turns, {tokens} tokens, accepted: {share}"

    def run(self) -> bool:
        """Answer every message; return whether Ctrl-C has ended the chat."""
        try:
            for message in _messages(self._screen):
                if message in ("/quit", "/exit"):
                    break
                if message == "/reset":
                    self._conversation.clear()
                elif message == "/help":
                    self._screen.say(HELP)
                elif message.strip():
                    self._turn(message)
        except KeyboardInterrupt:
            self._screen.say("")
            return True
        return False

    def _turn(self, message: str) -> None:
        ids = self._conversation.ask(sound_text("The message", message))
        bar = PromptBar(len(ids) - 1)
        options: StreamKeywords = {
            **self._options,
            "prompt_progress": bar.advance,
        }
        stream = self._generator.stream(ids, **options)
        chunks: list[Chunk] = []
        interrupted = show(stream, self._screen, chunks, bar, colour=self._colour)
        result = stream.result
        self._conversation.answer(result.text, result.tokens)
        ended = "interrupted" if interrupted else result.finish_reason
        self.turns.append(
            {
                "message": message,
                "text": result.text,
                "tokens": result.tokens,
                "prompt_tokens": len(ids),
                "finish_reason": ended,
                "statistics": as_object(result.stats),
            }
        )
        self._screen.say(lines(result, ended, len(ids), bar))
        if interrupted:
            signals.resume()


def _messages(screen: Screen) -> Iterator[str]:
    """Yield the lines of standard input, with a prompt if it is a terminal."""
    if not sys.stdin.isatty():
        source = getattr(sys.stdin, "buffer", sys.stdin)
        for line in source:
            text = line if isinstance(line, str) else decoded("Standard input", line)
            yield text.rstrip("\r\n")
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
