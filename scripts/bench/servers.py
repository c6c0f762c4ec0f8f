"""Servers to compare: ours and mlx-lm's, each a process of its own, and their clients.

All servers get the same models, in the dtypes of our `load`, and the same BLAS.
"""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from mlx_lm.utils import save_config, save_model

from mlx_speculation import load

START_SECONDS = 120.0
MLX_LM = (
    "from mlx_speculation.blas import use_blas; use_blas({blas!r}); "
    "from mlx_lm.server import main; main()"
)


@dataclass(frozen=True, slots=True)
class Served:
    """Answer to a request."""

    text: str
    first: float  # seconds to its first piece
    whole: float  # seconds to its end
    tokens: int  # as counted by the server


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    name: str
    url: str  # of its API

    def ask(self, client: openai.OpenAI, prompt: str, **options: Any) -> Served:
        """Send a prompt and read its answer as a stream."""
        started = time.perf_counter()
        first, text, tokens = 0.0, "", 0
        for piece in client.completions.create(
            model="default_model",
            prompt=prompt,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        ):
            if piece.choices and piece.choices[0].text:
                first = first or time.perf_counter() - started
                text += piece.choices[0].text
            tokens = piece.usage.completion_tokens if piece.usage else tokens
        whole = time.perf_counter() - started
        return Served(text, first or whole, whole, tokens)

    def serve(
        self, prompts: Sequence[str], clients: int, **options: Any
    ) -> tuple[list[Served], float]:
        """Let clients ask concurrently; return answers in order, and the seconds."""

        def run(which: int) -> list[Served]:
            with openai.OpenAI(
                base_url=self.url, api_key="none", max_retries=0, timeout=600
            ) as client:
                return [self.ask(client, p, **options) for p in prompts[which::clients]]

        started = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            answers = [*pool.map(run, range(clients))]
        seconds = time.perf_counter() - started
        numbers = range(len(prompts))
        return [answers[n % clients][n // clients] for n in numbers], seconds


def widened(source: Path, folder: Path) -> Path:
    """Write a model in the dtypes that our `load` makes."""
    model, tokenizer = load(source)
    config = json.loads((source / "config.json").read_text("utf-8"))
    folder.mkdir()
    save_model(folder, model)
    kept = {k: v for k, v in config.items() if not k.startswith("quantization")}
    save_config(kept, folder / "config.json")
    tokenizer._tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def our_server(name: str, model: Path, blas: str, *options: str) -> Iterator[Server]:
    """Start our server."""
    command = ["-m", "mlx_speculation", "serve", str(model), "--port", "0"]
    rest = ["--blas", blas, "--max-queue", "256", *options]
    process = subprocess.Popen(
        [sys.executable, *command, *rest], stderr=subprocess.PIPE, text=True
    )
    with _ending(process):
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if result := re.search(r"http://\S+/v1", said.replace("\n", "")):
                yield Server(name, result[0])
                return
        raise SystemExit(f"{name} did not start: {said}")


@contextmanager
def mlx_lm_server(name: str, model: Path, blas: str, *options: str) -> Iterator[Server]:
    """Start mlx-lm's server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = ["-c", MLX_LM.format(blas=blas), "--model", str(model), "--port", port]
    process = subprocess.Popen(
        [sys.executable, *command, "--log-level", "ERROR", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with _ending(process):
        _wait_for(f"http://127.0.0.1:{port}/health", process, name)
        yield Server(name, f"http://127.0.0.1:{port}/v1")


def _wait_for(url: str, process: "subprocess.Popen[Any]", name: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.1)
    raise SystemExit(f"{name} did not start.")


@contextmanager
def _ending(process: "subprocess.Popen[Any]") -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stderr is not None:
            process.stderr.close()
