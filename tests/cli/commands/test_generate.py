"""`generate`: its text, its JSON object, its page, and its interruption."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from mlx_speculation import (
    Sampling,
    SpeculationError,
    SpeculativeGenerator,
    demo_models,
)
from mlx_speculation.cli.console import Screen
from mlx_speculation.cli.stream_view import PromptBar, lines
from mlx_speculation.engine import Chunk, Stream
from mlx_speculation.engine.drafters.draft_model import ModelDrafter
from support.models.adapters import write_adapter
from support.models.demo_folders import copy_of
from support.models.tiny_vision import WITHOUT_MLX_VLM
from support.models.vision_folders import picture, vision_folder
from support.processes.commands import Commands
from support.processes.programs import command_line

PROMPT = "def add(first, second):\n"
DRAFT = str(demo_models()["draft"])
PLAIN_GENERATE = ["generate", DRAFT, "-p", "hi", "-m", "8"]
PAIR = ["generate", DRAFT, "--draft", DRAFT, "--draft-length", "3"]


def test_the_json_object_holds_the_text_and_who_wrote_it(commands: Commands) -> None:
    options = ["-p", PROMPT, "-m", "20", "--temp", "0.8", "--seed", "7", "--top-k", "9"]
    report = commands.object(*PAIR, *options)
    generator = SpeculativeGenerator.from_pretrained(DRAFT)
    sampling = Sampling(temperature=0.8, seed=7, top_k=9)
    plain = generator.generate(PROMPT, max_tokens=20, sampling=sampling)
    assert (report["text"], report["tokens"]) == (plain.text, plain.tokens)
    assert report["command"] == "generate"
    assert report["finish_reason"] == plain.finish_reason
    assert report["seed"] == 7
    assert report["prompt_tokens"] == len(generator.tokenizer.encode(PROMPT))
    stats = report["statistics"]
    accepted = [place for writer, place in report["origins"] if writer == "accepted"]
    assert 0 <= stats["accepted"] - len(accepted) <= 3
    assert len(report["origins"]) == len(plain.tokens)
    assert stats["acceptance_rate"] == stats["accepted"] / stats["drafted"]
    assert report["versions"].keys() >= {"python", "mlx", "mlx-lm"}
    assert report["blas"].keys() == {"name", "detail"}


def test_statistics_are_two_lines_a_table_or_nothing(commands: Commands) -> None:
    drafted = [*PLAIN_GENERATE, "--draft", DRAFT, "--draft-length", "2"]
    first_run = commands(*drafted)
    first, second = first_run.stderr.splitlines()[-2:]
    assert re.fullmatch(
        r"8 tokens \(length\), [\d.]+/s; prompt 2 tokens, \d+/s; first token after "
        r"[\d.]+ s",
        first,
    )
    assert re.fullmatch(
        r"\d+% of \d+ drafted tokens accepted, [\d.]+ tokens per round", second
    )
    plain = commands(*PLAIN_GENERATE, "--draft", "none").stderr.splitlines()
    assert plain[-1].startswith("8 tokens (length), ")
    table = commands(*drafted, "--stats").stderr
    assert "mean accepted length" in table
    assert "first token after" not in table
    for quiet in ("--quiet", "-q"):
        done = commands(*drafted, quiet, "--stats")
        assert (done.stderr, done.stdout) == ("", first_run.stdout)


def test_a_prompt_that_was_not_read_has_no_speed() -> None:
    stream = SpeculativeGenerator.from_pretrained(DRAFT).stream(PROMPT, max_tokens=4)
    stream.close()
    stream.result.stats.prefill_seconds = 0.001
    said = lines(stream.result, "interrupted", 100, PromptBar(99))
    assert said.endswith("; prompt 100 tokens; no token")


def test_models_are_repositories_as_mlx_lm_names_them(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A downloaded repository is found in the hub's cache."""
    revision = "0123456789" * 4
    repository = tmp_path / "models--nobody--small"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    copy_of("draft", repository / "snapshots" / revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    name, options = "nobody/small", ["-p", PROMPT, "-m", "8", "--draft-length", "3"]
    report = commands.object("generate", name, "--draft", name, *options)
    assert report["text"] == commands.object(*PAIR, *options)["text"]
    assert report["statistics"]["drafted"] > 0


def test_an_adapter_is_loaded_with_the_target(
    commands: Commands, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path)
    options = ["-p", PROMPT, "-m", "12"]
    bare = commands.object(*PAIR, *options)
    report = commands.object(*PAIR, *options, "--adapter-path", tmp_path)
    generator = SpeculativeGenerator.from_pretrained(DRAFT, adapter_path=adapter)
    assert report["tokens"] == generator.generate(PROMPT, max_tokens=12).tokens
    assert report["tokens"] != bare["tokens"]
    assert report["statistics"]["drafted"] > 0


def test_stop_texts_and_tokens_end_the_text(commands: Commands) -> None:
    whole = commands.object(*PAIR, "-p", PROMPT, "-m", 24)
    plain, token = whole["text"], whole["tokens"][3]
    middle = plain[5:8]
    report = commands.object(*PAIR, "-p", PROMPT, "-m", 24, "--stop", middle)
    assert report["text"] == plain[: plain.index(middle)]
    assert report["finish_reason"] == "stop"
    name = SpeculativeGenerator.from_pretrained(DRAFT).tokenizer.convert_ids_to_tokens(
        token
    )
    report = commands.object(*PAIR, "-p", PROMPT, "-m", 24, "--extra-eos-token", name)
    assert report["finish_reason"] == "stop"
    assert report["tokens"][-1] == token
    assert report["tokens"].count(token) == 1


def test_standard_input_is_the_prompt_and_a_dash_names_it(commands: Commands) -> None:
    by_option = commands(*PAIR, "-m", 6, "-p", PROMPT).stdout
    assert commands(*PAIR, "-m", 6, text=PROMPT).stdout == by_option
    assert commands(*PAIR, "-m", 6, "-p", "-", text=PROMPT.encode()).stdout == by_option


def test_accepted_tokens_are_green_on_a_terminal(commands: Commands) -> None:
    options = [*PAIR, "-p", PROMPT, "-m", "20"]
    coloured = commands(*options, "--colour", colour=True).stdout
    bare = commands(*options, colour=True).stdout
    piped = commands(*options, "--color").stdout
    assert coloured.count("\x1b[32m") > 3
    assert "\x1b" not in bare + piped
    assert bare == piped
    green = "".join(part.split("\x1b[0m")[0] for part in coloured.split("\x1b[32m")[1:])
    report = commands.object(*options)
    accepted = sum(writer == "accepted" for writer, _ in report["origins"])
    assert 0 < accepted < 20
    assert 0 < len(green) < len(bare)


def test_a_chat_template_makes_the_prompt(commands: Commands, tmp_path: Path) -> None:
    folder = copy_of("draft", tmp_path / "chat")
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if mood is defined %}[{{ mood }}]{% endif %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)

    def text_of(*options: str) -> str:
        return str(commands.object("generate", folder, "-m", 9, *options)["text"])

    generator = SpeculativeGenerator.from_pretrained(folder)

    def raw(prompt: str) -> str:
        return generator.generate(prompt, max_tokens=9).text

    assert text_of("-p", "hi") == raw("<user>hi\n<assistant>")
    assert text_of("-p", "hi", "--system-prompt", "Be brief.") == raw(
        "<system>Be brief.\n<user>hi\n<assistant>"
    )
    assert text_of("-p", "hi", "--chat-template-config", '{"mood": "x"}') == raw(
        "<user>hi\n[x]<assistant>"
    )
    assert text_of("-p", "hi", "--ignore-chat-template") == raw("hi")
    said = commands.refused(
        "generate", folder, "-p", "x", "--system-prompt", "y", "--ignore-chat-template"
    )
    assert "--ignore-chat-template is given too. Leave one of them out." in said
    report = commands.object(
        "generate", folder, "-p", "hi", "--prefill-response", "So, ", "-m", 9
    )
    text = generator.tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "So, "},
        ],
        tokenize=False,
        continue_final_message=True,
    )
    assert text.rstrip().endswith("So,")
    assert report["text"] == raw(text)


def test_a_schema_is_followed(commands: Commands, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}')
    options = [*PAIR, "-p", "A list: ", "-m", "40", "--json-schema", str(file)]
    report = commands.object(*options)
    assert report["finish_reason"] == "stop"
    assert set(json.loads(report["text"])) <= {"a", "b"}


def test_logits_of_ids_can_be_raised_and_lowered(commands: Commands) -> None:
    options = [*PAIR, "-p", PROMPT, "-m", "12"]
    plain = commands.object(*options)["tokens"]
    bias = ["--logit-bias", json.dumps({str(plain[0]): -1000, "77": 1000})]
    assert commands.object(*options, *bias)["tokens"] == [77] * 12


def test_xtc_spares_line_breaks_and_the_end(commands: Commands) -> None:
    options = ["--temp", "1", "--seed", "2", "--xtc-probability", "1"]
    report = commands.object(*PAIR, "-p", PROMPT, "-m", "16", *options)
    generator = SpeculativeGenerator.from_pretrained(DRAFT)
    tokenizer = generator.tokenizer
    spared = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
    sampling = Sampling(
        temperature=1, seed=2, xtc_probability=1, xtc_special_tokens=spared
    )
    plain = generator.generate(PROMPT, max_tokens=16, sampling=sampling)
    assert report["tokens"] == plain.tokens


def test_caches_of_few_bits_and_of_a_limited_size(commands: Commands) -> None:
    options = [*PAIR, "-p", PROMPT * 4, "-m", "12", "--prefill-step-size", "7"]
    model, tokenizer = mlx_lm.load(DRAFT)[:2]
    model.set_dtype(mx.float32)
    model = mlx_lm.utils.dequantize_model(model)
    settings: list[dict[str, Any]] = [
        {},
        {"max_kv_size": 16},
        {"kv_bits": 8, "quantized_kv_start": 0, "kv_group_size": 32},
    ]
    for given in settings:
        theirs = mlx_lm.generate(
            model, tokenizer, PROMPT * 4, max_tokens=12, prefill_step_size=7, **given
        )
        words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        assert commands.object(*options, *words)["text"] == theirs


def test_the_bar_hears_of_all_the_prompt(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress: list[tuple[int, int]] = []

    @contextmanager
    def noted(self: Screen, what: str) -> Iterator[Any]:
        yield lambda done, total: progress.append((done, total))

    monkeypatch.setattr(Screen, "progress", noted)
    options = [*PAIR, "-p", PROMPT * 4, "-m", "2", "--prefill-step-size", "7"]
    count = commands.object(*options)["prompt_tokens"]
    assert progress[0] == (7, count - 1)
    assert progress[-1] == (count - 1, count - 1)


def test_a_page_is_written_and_named(commands: Commands, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    done = commands(*PAIR, "-p", PROMPT, "-m", 12, "--html", page)
    assert done.exit_code == 0
    text = page.read_text("utf-8")
    tokens = commands.object(*PAIR, "-p", PROMPT, "-m", 12)["tokens"]
    assert text.count(' data-n="') == len(tokens)
    assert "probability under the target" in text
    assert "the page is" in done.stderr


def test_ctrl_c_keeps_what_there_is_and_ends_with_130(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    next_chunk = Stream.__next__

    def interrupted(self: Stream) -> Chunk:
        if self.stats.rounds >= 2:
            raise KeyboardInterrupt
        return next_chunk(self)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    page = tmp_path / "out.html"
    options = [*PAIR, "-p", PROMPT, "-m", "60", "--html", str(page)]
    report = commands.object(*options, status=130)
    assert report["finish_reason"] == "interrupted"
    assert 0 < len(report["tokens"]) < 6
    assert page.read_text("utf-8").count(' data-n="') == len(report["tokens"])
    done = commands(*options)
    assert done.exit_code == 130
    assert done.stdout == report["text"] + "\n"
    assert "interrupted" in done.stderr


def endless() -> "subprocess.Popen[str]":
    """Start a generation that is too long to end by itself."""
    on = ["--logit-bias", '{"0": -1000}', "-p", PROMPT, "-m", "100000"]
    return subprocess.Popen(
        command_line(*PAIR, *on, "--blas", "stock"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_real_ctrl_c_ends_with_a_summary() -> None:
    with endless() as process:
        assert process.stdout is not None
        shown = process.stdout.read(30)  # generation has started
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    plain = SpeculativeGenerator.from_pretrained(DRAFT)
    sampling = Sampling(logit_bias={0: -1000.0})
    assert shown == plain.generate(PROMPT, max_tokens=30, sampling=sampling).text[:30]
    assert process.returncode == 130, errors
    assert "BLAS: " in errors
    assert "interrupted" in errors
    assert "tokens (interrupted), " in errors
    assert "Traceback" not in errors


def test_a_pipe_that_breaks_ends_it_quietly(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("mlx_speculation.cli.console.Screen.text", broken)
    done = commands(*PAIR, "-p", PROMPT, "-m", "4", "--quiet")
    assert (done.exit_code, done.output) == (141, "")


@pytest.mark.slow  # slow: starts a process, unlike the test before
def test_a_reader_that_leaves_ends_it_quietly() -> None:
    with endless() as process:
        assert process.stdout is not None
        assert process.stdout.read(5)
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read()
    assert process.returncode == 141, errors
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


@WITHOUT_MLX_VLM
def test_an_image_is_asked_about(commands: Commands, tmp_path: Path) -> None:
    folder = vision_folder(tmp_path / "model")
    images = [tmp_path / "one.png", tmp_path / "two.png"]
    for number, path in enumerate(images):
        path.write_bytes(picture(24 + 8 * number, 16, seed=number))
    plain = SpeculativeGenerator.from_pretrained(folder, vision=True)
    messages = [{"role": "user", "content": "What?"}]
    for count in (1, 2):
        given = [option for path in images[:count] for option in ("--image", path)]
        options = [folder, "-p", "What?", "-m", "9", "--draft", "lookup", *given]
        report = commands.object("generate", *options)
        expected = plain.generate(messages, images=images[:count], max_tokens=9)
        assert report["tokens"] == expected.tokens
    raw = ["--ignore-chat-template", "-p", "<|vision_start|><|image_pad|>?"]
    report = commands.object("generate", folder, *raw, "-m", "3", "--image", images[0])
    assert report["prompt_tokens"] > 3


def test_a_text_model_is_asked_about_no_image(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even without mlx-vlm, the error says that the model reads text only."""
    monkeypatch.setattr(
        "mlx_speculation.models.vision.load.find_spec", lambda name: None
    )
    image = tmp_path / "one.png"
    image.write_bytes(picture())
    said = commands.refused(*PLAIN_GENERATE, "--image", image)
    assert "the model reads text only. Name a vision model" in said


def test_images_that_are_none_are_refused(commands: Commands, tmp_path: Path) -> None:
    missing = commands.refused(*PLAIN_GENERATE, "--image", tmp_path / "none.png")
    assert "--image" in missing
    file = tmp_path / "a.png"
    file.write_text("no image")
    with_prefill = ["--image", file, "--prefill-response", "It"]
    assert "--prefill-response" in commands.refused(*PLAIN_GENERATE, *with_prefill)


def test_a_note_stands_after_the_text_it_comes_in(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*PAIR, "-p", PROMPT, "-m", "20"]
    text = commands(*options).stdout
    propose, rounds = ModelDrafter.propose, [1, 2]

    def failing(self: ModelDrafter, *given: Any) -> Any:
        rounds.pop()
        assert rounds, "broken"
        return propose(self, *given)

    monkeypatch.setattr(ModelDrafter, "propose", failing)
    before, after = commands(*options).output.split(text)
    assert "note: " not in before
    assert re.match(r"note: .*broken", after), after


@pytest.mark.parametrize(("chunks", "shown"), [(1, False), (5, True)])
def test_an_error_that_ends_a_text_is_a_line(
    chunks: int, shown: bool, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_chunk, left = Stream.__next__, [chunks]

    def failing(self: Stream) -> Chunk:
        left[0] -= 1
        if not left[0]:
            raise SpeculationError("It is broken.")
        return next_chunk(self)

    monkeypatch.setattr(Stream, "__next__", failing)
    done = commands(*PAIR, "-p", PROMPT, "-m", "20")
    assert done.exit_code == 1
    assert done.stdout.endswith("\n") == bool(done.stdout) == shown
    assert done.output.splitlines()[-1] == "error: It is broken."
