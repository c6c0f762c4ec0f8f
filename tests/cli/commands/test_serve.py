"""`serve` as a user runs it."""

import builtins
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation import SpeculativeGenerator, demo_models
from mlx_speculation.cli.commands.serve import AccessOptions, agent_lines
from mlx_speculation.shell_commands import install_command
from support.processes.commands import Commands
from support.processes.programs import command_line

DRAFT = str(demo_models()["draft"])
KEY = {"MLX_SPECULATION_API_KEY": "sesame"}


def posted(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": "Bearer sesame"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        loaded: dict[str, Any] = json.load(answer)
    return loaded


@contextmanager
def ending(process: "subprocess.Popen[str]") -> Iterator[None]:
    """Kill the server when the block ends, and after 120 seconds at the latest."""
    guard = threading.Timer(120, process.kill)
    guard.start()
    try:
        yield
    finally:
        guard.cancel()
        process.kill()


@contextmanager
def served(*options: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Serve the draft model in another process; yield the process and the URL."""
    command = ["serve", DRAFT, "--port", "0", "--blas", "stock", *options]
    process = subprocess.Popen(
        command_line(*command),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **KEY, "COLUMNS": "200"},
    )
    with process, ending(process):
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if match := re.search(r"draft is served at (http\S+)", line):
                break
        else:
            raise AssertionError(said)
        assert "prefix cache: up to" in said
        yield process, match[1]


def test_it_serves_until_a_signal_ends_it() -> None:
    with served("--draft", "lookup", "--max-model-len", "4096") as (process, url):
        body = {"prompt": "def add(first, second):", "max_tokens": 8}
        answer = posted(f"{url}/completions", body)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        rest = process.stderr.read()
        assert process.wait(30) == 0
    large, small, first, *lines, last = rest.splitlines()
    assert "4096 tokens, and the model was made for 2048" in large
    assert small == (
        "The context is 4096 tokens. Coding agents begin with 7,700 to 25,000, and "
        "need 32,000 or more to work."
    )
    assert "run its command in another terminal" in first
    assert last == "ending"
    agents = agent_lines(url.removesuffix("/v1"), "draft", 4096)
    named = [("", f"# {agent}", line) for agent, line in agents.items()]
    assert lines == [line for each in named for line in each]
    plain = SpeculativeGenerator.from_pretrained(DRAFT)
    expected = plain.generate("def add(first, second):", max_tokens=8).text
    assert answer["choices"][0]["text"] == expected
    assert answer["model"] == "draft"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="signals one thread by its number")
def test_a_signal_that_another_thread_takes_ends_it_too() -> None:
    """The system can deliver a signal to any thread of the process."""
    with served("--draft", "none") as (process, _):
        threads = Path("/proc", str(process.pid), "task").iterdir()
        last = max(int(each.name) for each in threads)
        assert ctypes.CDLL(None).tgkill(process.pid, last, signal.SIGTERM) == 0
        assert process.wait(60) == 0


@pytest.mark.slow
def test_replay_can_be_turned_off() -> None:
    """Encoding the text of a sampled answer seldom gives the sampled ids again."""
    prompt = "def add(first, second):"
    drawn = {"max_tokens": 24, "temperature": 2.0, "seed": 32}
    with served("--draft", "none", "--no-replay") as (_, url):
        first = posted(f"{url}/completions", {"prompt": prompt, **drawn})
        text = prompt + first["choices"][0]["text"]
        second = posted(f"{url}/completions", {"prompt": text, "max_tokens": 1})
    tokenizer = SpeculativeGenerator.from_pretrained(DRAFT).tokenizer
    encoded, written = len(tokenizer.encode(text)), first["usage"]["total_tokens"]
    assert encoded != written
    assert second["usage"]["prompt_tokens"] == encoded


def test_a_folder_keeps_prompts_for_the_next_server(tmp_path: Path) -> None:
    body = {"prompt": "def add(first, second):\n" * 9, "max_tokens": 4}
    options = ["--draft", "none", "--cache-folder", str(tmp_path / "own")]
    texts, cached = set(), []
    for _ in range(2):
        with served(*options, "--cache-disk-gigabytes", "0.5") as (process, url):
            answer = posted(f"{url}/completions", body)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        texts.add(answer["choices"][0]["text"])
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, answer["usage"]["prompt_tokens"] - 1]
    assert len(texts) == 1


def test_without_its_library_it_says_what_to_install(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "prometheus_client":
            raise ModuleNotFoundError(name=name)
        return real(name, *rest)

    for module in ("metrics", "server"):  # `serve` imports them again
        monkeypatch.delitem(
            sys.modules, f"mlx_speculation.server.{module}", raising=False
        )
    monkeypatch.setattr(builtins, "__import__", without)
    said = commands.refused("serve", DRAFT, "--port", "0")
    assert said.endswith(f"Install it with: {install_command('serve')}")


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_of_the_environment_is_refused(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """If an empty key were accepted, the server would ask for no key."""
    monkeypatch.setenv("MLX_SPECULATION_API_KEY", key)
    assert "MLX_SPECULATION_API_KEY" in commands.refused("serve", DRAFT, "--port", "0")
    # The option overrides the environment.
    options = ["--api-key", "sesame", "--host", "no such host"]
    assert "cannot listen at" in commands.refused("serve", DRAFT, *options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--api-key", ""], "The API key is empty"),
        (["--api-key", " "], "The API key is empty"),
        (["--host", "no such host"], "cannot listen at 'no such host'"),
        (["--max-tokens", "10", "--max-tokens-limit", "5"], "is 10 by default"),
        (["--chat-template-args", "[]"], "and a JSON object is needed"),
        (["--draft", "nowhere", "--port", "0"], "There is no folder 'nowhere'"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(
    commands: Commands, options: list[str], said: str
) -> None:
    assert said in commands.refused("serve", DRAFT, *options)


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [
        ("127.0.0.1", None, False),
        ("localhost", None, False),
        ("::1", None, False),
        ("0.0.0.0", None, True),
        ("somewhere.example", None, True),
        ("0.0.0.0", "key", False),
    ],
)
def test_it_warns_where_anybody_may_ask(
    host: str, key: str | None, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    AccessOptions(host=host, api_key=key).warn()
    assert ("without an API key" in capsys.readouterr().err) is warned
