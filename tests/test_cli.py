"""The commands against a generator that has no model: what they print and return."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import mlx_speculation
from mlx_speculation import cli
from mlx_speculation.blas import BlasChoice
from mlx_speculation.demo import DemoPrompt
from mlx_speculation.errors import ModelFolderError

STATS = SimpleNamespace(
    rounds=3,
    drafts=2,
    drafted=8,
    accepted=6,
    acceptance_rate=0.75,
    mean_accepted_length=4.0,
    accepted_per_position=[1.0, 0.5],
    tokens_per_second=12.5,
)


class FakeStream:
    def __init__(self, tokens: list[int]) -> None:
        self.result = SimpleNamespace(
            tokens=tokens, finish_reason="length", stats=STATS
        )

    def __iter__(self) -> Iterator[Any]:
        yield SimpleNamespace(text="one ")
        yield SimpleNamespace(text="two")


class FakeGenerator:
    """Continues every prompt with two words; without a draft, with other tokens."""

    plain_tokens = [1, 2]  # noqa: RUF012
    asked: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, draft: object) -> None:
        self.tokens = self.plain_tokens if draft is None else [1, 2]

    @classmethod
    def from_pretrained(
        cls, path: object, *, draft: object, draft_length: int | None = None
    ) -> "FakeGenerator":
        if path == "missing":
            raise ModelFolderError("no config.json in missing")
        cls.asked.update(path=path, draft=draft, draft_length=draft_length)
        return cls(draft)

    def stream(self, prompt: str, **options: object) -> FakeStream:
        self.asked.update(prompt=prompt, **options)
        return FakeStream(self.tokens)

    def generate(self, prompt: str, **options: object) -> object:
        return FakeStream(self.tokens).result


@pytest.fixture(autouse=True)
def generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        mlx_speculation, "SpeculativeGenerator", FakeGenerator, raising=False
    )
    monkeypatch.setattr(FakeGenerator, "asked", {})
    # The BLAS of this process is settled: other tests have imported mlx.
    monkeypatch.setattr(cli, "use_blas", lambda name: BlasChoice("stock", name))


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {name: Path(name) for name in ("dense", "sliding", "draft")}
    prompts = [
        DemoPrompt(group, "a book", "text") for group in ("code", "code", "edit")
    ]
    monkeypatch.setattr(cli, "demo_models", lambda: folders)
    monkeypatch.setattr(cli, "demo_prompts", lambda: prompts)


def test_generate_prints_the_text_alone_on_standard_output() -> None:
    options = ["--seed", "7", "--temperature", "0.5", "--draft-length", "4"]
    done = CliRunner().invoke(
        cli.app,
        ["generate", "target", "--draft", "lookup", "--prompt", "x", *options],
    )
    assert done.exit_code == 0, done.output
    assert done.stdout == "one two\n"
    assert "75%" in done.stderr
    asked = FakeGenerator.asked
    assert (asked["path"], asked["draft"], asked["draft_length"]) == (
        "target",
        "lookup",
        4,
    )
    assert (asked["sampling"].temperature, asked["sampling"].seed) == (0.5, 7)


def test_generate_reads_its_prompt_from_standard_input() -> None:
    CliRunner().invoke(cli.app, ["generate", "target"], input="hi")
    assert FakeGenerator.asked["prompt"] == "hi"


def test_an_error_of_the_package_is_one_line_and_status_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "mlx-speculation generate missing --prompt x"
    monkeypatch.setattr(sys, "argv", line.split())
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert "error: no config.json in missing\n" in capsys.readouterr().err


@pytest.mark.usefixtures("bundle")
def test_demo_compares_each_target_on_one_prompt_per_group() -> None:
    done = CliRunner().invoke(cli.app, ["demo"])
    assert done.exit_code == 0, done.output
    assert done.stdout.count("one two") == 4
    assert done.stdout.count("yes") == 4


@pytest.mark.usefixtures("bundle")
@pytest.mark.parametrize("plain_tokens", [[1, 3], [1], [1, 2, 3]])
def test_demo_fails_where_the_texts_differ(
    plain_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeGenerator, "plain_tokens", plain_tokens)
    done = CliRunner(env={"COLUMNS": "120"}).invoke(cli.app, ["demo"])
    assert done.exit_code == 1
    assert "not at" in done.stdout
