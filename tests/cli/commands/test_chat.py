"""`chat`: turns, kept caches, templates, and interrupted answers."""

import json
import sys
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_speculation import SpeculativeGenerator, demo_models
from mlx_speculation.cli.chat_template import TemplateOptions
from mlx_speculation.cli.conversation import Conversation
from mlx_speculation.engine import Chunk, Stream
from mlx_speculation.errors import DraftNotice
from support.models.demo_folders import copy_of, with_length
from support.processes.commands import Commands

DRAFT = str(demo_models()["draft"])
OTHERS = ("dense", "sliding", "hybrid")
LENGTH, DRAFTED = ["-m", "12"], ["--draft-length", "3"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def talk(commands: Commands, text: str, *options: Any, status: int = 0) -> Any:
    drafted = DRAFTED if "--draft" in options else []
    done = commands("chat", *options, *LENGTH, *drafted, "--json", text=text)
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS), "draft"]
)
def test_a_turn_reads_only_what_is_new(commands: Commands, name: str) -> None:
    models = demo_models()
    lines = "def add(first, second):\ndef sub(a, b):\ndef mul(c, d):\n"
    report = talk(commands, lines, models[name], "--draft", models["draft"])
    generator = SpeculativeGenerator.from_pretrained(models[name])
    encode = generator.tokenizer.encode
    ids: list[int] = []
    text = ""
    for turn, line in zip(report["turns"], lines.splitlines(), strict=True):
        before, rest = len(ids), f"\n{line}\n" if ids else f"{line}\n"
        text += rest
        # Without a template a turn continues the text, so the end token of the last
        # answer is removed. A model with recurrent states then resumes at an earlier
        # restore point.
        ended = ids[-1:] == [0]
        ids = encode(text) if ended else [*ids, *encode(rest)]
        assert turn["prompt_tokens"] == len(ids)
        assert turn["tokens"] == generator.generate(ids, max_tokens=12).tokens
        # The caches that are kept lack the last tokens of an answer, at most 5.
        assert bool(before) <= turn["statistics"]["reused"] <= before
        assert ended or before - 5 <= turn["statistics"]["reused"]
        ids += turn["tokens"]
        text += turn["text"]
    assert report["interrupted"] is False


def test_without_room_every_turn_reads_all(commands: Commands) -> None:
    report = talk(commands, "a = 1\nb = 2\n", DRAFT, "--cache-gigabytes", "0")
    assert [turn["statistics"]["reused"] for turn in report["turns"]] == [0, 0]


@pytest.mark.parametrize("options", [[], ["--no-replay"]], ids=str)
def test_replay_can_be_turned_off(commands: Commands, options: list[str]) -> None:
    """Encoding the text of a sampled answer seldom gives the sampled ids again."""
    drawn = ["--temp", "2", "--seed", "26", *options]
    report = talk(commands, "def add(a):\nend\n", DRAFT, *drawn)
    first, second = report["turns"]
    encode = SpeculativeGenerator.from_pretrained(DRAFT).tokenizer.encode
    encoded = len(encode(f"def add(a):\n{first['text']}\nend\n"))
    written = first["prompt_tokens"] + len(first["tokens"]) + len(encode("\nend\n"))
    assert encoded != written
    assert second["prompt_tokens"] == (encoded if options else written)


def test_answers_go_through_the_template(commands: Commands, tmp_path: Path) -> None:
    folder = copy_of("draft", tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    system = ["--system-prompt", "Be brief."]
    report = talk(commands, "hi\nbye\n", folder, *system)
    generator = SpeculativeGenerator.from_pretrained(folder)
    end = "<|endoftext|>\n"
    first, second = report["turns"]
    head = f"<system>Be brief.{end}<user>hi{end}<assistant>"
    ids = generator.tokenizer.encode(head, add_special_tokens=False)
    assert first["prompt_tokens"] == len(ids)
    assert first["tokens"] == generator.generate(ids, max_tokens=12).tokens
    ids += first["tokens"]
    rest = f"{end}<user>bye{end}<assistant>"
    if first["finish_reason"] == "stop":
        rest = rest.removeprefix("<|endoftext|>")
    ids += generator.tokenizer.encode(rest, add_special_tokens=False)
    assert second["prompt_tokens"] == len(ids)
    assert second["tokens"] == generator.generate(ids, max_tokens=12).tokens
    assert second["statistics"]["reused"] >= first["prompt_tokens"]


def test_reset_and_quit_and_empty_lines(commands: Commands) -> None:
    report = talk(commands, "a = 1\n\n/reset\n/help\n/bye\na = 1\n/quit\nb\n", DRAFT)
    first, second = report["turns"]
    assert first["prompt_tokens"] == second["prompt_tokens"]
    assert first["tokens"] == second["tokens"]


def test_text_is_on_standard_output_and_figures_are_not(commands: Commands) -> None:
    done = commands("chat", DRAFT, *LENGTH, text="a = 1\n")
    report = talk(commands, "a = 1\n", DRAFT)
    assert done.exit_code == 0
    assert done.stdout == report["turns"][0]["text"] + "\n"
    assert "turns: 1, tokens: " in done.stderr
    assert "note: no chat template is used" in done.stderr


def test_ctrl_c_ends_an_answer_and_the_talk_goes_on(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_chunk, left = Stream.__next__, [5]

    def interrupted(self: Stream) -> Chunk:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return next_chunk(self)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    report = talk(commands, "def f(x):\ndef g(y):\n", DRAFT, "--draft", DRAFT)
    first, second = report["turns"]
    assert (first["finish_reason"], len(first["tokens"])) == ("interrupted", 4)
    assert second["finish_reason"] != "interrupted"
    generator = SpeculativeGenerator.from_pretrained(DRAFT)
    encode = generator.tokenizer.encode
    ids = [*encode("def f(x):\n"), *first["tokens"], *encode("\ndef g(y):\n")]
    assert second["tokens"] == generator.generate(ids, max_tokens=12).tokens
    assert second["statistics"]["reused"] > 0


def test_ctrl_c_at_the_prompt_ends_with_130(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(screen: Any) -> Any:
        yield "a = 1"
        raise KeyboardInterrupt

    monkeypatch.setattr("mlx_speculation.cli.commands.chat._messages", lines)
    report = talk(commands, "", DRAFT, status=130)
    assert report["interrupted"] is True
    assert len(report["turns"]) == 1


@pytest.mark.parametrize(
    ("pressed", "turns", "status"),
    [
        (["a = 1", "^C", "b = 2", "^C"], 2, 0),
        (["a = 1", "^C", "^C", "b = 2"], 1, 130),
        (["a = 1", "b = 2"], 2, 0),
    ],
)
def test_one_ctrl_c_at_the_prompt_of_a_terminal_does_not_end_it(
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
    pressed: list[str],
    turns: int,
    status: int,
) -> None:
    """Ctrl-C at the prompt can be meant for an answer that has just ended."""
    lines = iter(pressed)

    def answer_prompt(prompt: str) -> str:
        assert prompt == "> "
        line = next(lines, None)
        if line is None:
            raise EOFError
        if line == "^C":
            raise KeyboardInterrupt
        return line

    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("mlx_speculation.cli.commands.chat.sys", terminal)
    monkeypatch.setattr("builtins.input", answer_prompt)
    done = commands("chat", DRAFT, *LENGTH)
    assert done.exit_code == status
    assert "/reset begins anew" in done.stderr
    again = "Ctrl-C again, or Ctrl-D, ends the chat."
    assert (again in done.stderr) == ("^C" in pressed)
    assert f"turns: {turns}, " in done.stderr


def test_a_message_that_is_no_utf8_is_refused(commands: Commands) -> None:
    said = commands.refused("chat", DRAFT, text=b"a\xff\n")
    assert said.startswith("Standard input is not UTF-8: byte 0xff stands at offset 1")


def test_a_message_that_is_too_long_is_not_added(
    commands: Commands, tmp_path: Path
) -> None:
    folder = copy_of("draft", tmp_path / "short")
    with_length(folder, 40)
    lines = "def add(a, b):\n" + "x = 1 " * 50 + "\ndef sub(a, b):\n"
    options = ["chat", str(folder), *LENGTH, "--json"]
    done = commands(*options, text=lines)
    assert done.exit_code == 2
    assert done.stderr.count("error: The prompt has ") == 1
    (error,) = json.loads(done.stdout)["refused"]
    assert "tokens, and the limit is 40, by default" in error
    assert f"error: {error}\n" in done.stderr
    without = commands(*options, text=lines.replace("x = 1 " * 50 + "\n", ""))
    assert without.exit_code == 0
    shown = []
    for each in (done, without):
        turns = json.loads(each.stdout)["turns"]
        shown.append([(turn["prompt_tokens"], turn["tokens"]) for turn in turns])
    assert shown[0] == shown[1]
    assert len(shown[0]) == 2
    longer = commands(*options, "--max-model-len", "900", text=lines)
    assert len(json.loads(longer.stdout)["turns"]) == 3


@given(
    messages=st.lists(
        st.text("ab <|>\n", max_size=6).map(lambda text: f"x{text}"),
        min_size=1,
        max_size=4,
    ),
    strip=st.booleans(),
    data=st.data(),
)
@settings(max_examples=40)
def test_ids_begin_with_what_was_generated_unless_it_was_rewritten(
    messages: list[str], strip: bool, data: st.DataObject
) -> None:
    tokenizer = _tokenizer(strip)
    talk = Conversation(tokenizer, TemplateOptions())
    known: list[int] = []
    text = ""
    for message in messages:
        ids = talk.ask(message)
        assert tokenizer.decode(ids).startswith(text) or strip
        rendered = tokenizer.decode(ids)
        assert rendered.endswith("<assistant>")
        if not strip:
            assert ids[: len(known)] == known
        tokens = data.draw(st.lists(st.integers(5, 300), max_size=5))
        ended = data.draw(st.booleans())
        shown = tokenizer.decode(tokens)
        known = [*ids, *tokens, *([0] if ended else [])]
        text = rendered + shown
        talk.answer(shown, known[len(ids) :])


@cache
def _tokenizer(strip: bool) -> Any:
    tokenizer = SpeculativeGenerator.from_pretrained(DRAFT).tokenizer
    content = "m.content | trim" if strip else "m.content"
    tokenizer._tokenizer.chat_template = TEMPLATE.replace("m.content", content)
    tokenizer.has_chat_template = True
    return tokenizer


@pytest.mark.filterwarnings("default:other b")
def test_a_warning_stands_after_the_answer_it_comes_in(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "def add(a, b):\ndef sub(a, b):\n"
    first, second = (turn["text"] for turn in talk(commands, lines, DRAFT)["turns"])
    next_chunk, left = Stream.__next__, [4]

    def warning(self: Stream) -> Chunk:
        left[0] -= 1
        if not left[0]:
            warnings.warn("draft a", DraftNotice, stacklevel=2)
            warnings.warn("other b", RuntimeWarning, stacklevel=2)
        return next_chunk(self)

    def show(message: Any, *_: Any) -> None:
        sys.stderr.write(f"{message}\n")

    monkeypatch.setattr(Stream, "__next__", warning)
    monkeypatch.setattr(warnings, "showwarning", show)
    output = commands("chat", DRAFT, *LENGTH, text=lines).output
    assert f"{first}\nnote: draft a\nother b\n" in output
    assert f"{second}\n" in output.partition("other b")[2]
