"""Coding agents as users run them, against a target whose answers are scripted.

Each agent reads a file, edits it, runs a command and ends; aider only edits. A script
writes the model's answers (`support/processes/scripted_servers.py`). The agents are
installed from package indexes into `build/agents`; if an index cannot be reached, the
tests are skipped with that reason. HOME is a folder of the test.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation.cli.commands.serve import agent_lines
from mlx_speculation.server.request.options import GenerationRequest
from support.processes.scripted_servers import call, scripted

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[2] / "build" / "agents"
CLAUDE, CODEX, OPENCODE, AIDER = (
    *("@anthropic-ai/claude-code@2.1.332", "@openai/codex@0.171.0"),
    *("opencode-ai@1.18.33", "aider-chat==0.86.2"),
)
BEFORE, AFTER = (
    "def add(a, b):\n    return a - b\n",
    "def add(a, b):\n    return a + b\n",
)
RUN = "python3 -c 'import a; print(a.add(2, 3))'"
END = "All done: add is right now."
# Packages with which OpenCode speaks each of the three APIs
OPENCODE_APIS = ("@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "@ai-sdk/openai")
QUIET = {  # so that agents ask no other servers
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1",
    "IS_SANDBOX": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}


def run(*command: str | Path, seconds: float = 300, **options: Any) -> Any:
    """Run a command; return its status and its output."""
    return subprocess.run(
        [*map(str, command)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        **options,
    )


@cache
def npm(package: str, program: str) -> Path:
    """Return a program of an npm package; skip the test if it cannot be installed."""
    folder = FOLDER / package.strip("@").replace("/", "-")
    executable = folder / "node_modules" / ".bin" / program
    if not executable.exists():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        done = run("npm", "i", "--prefix", folder, "--no-audit", "--no-fund", package)
        for script in folder.glob("node_modules/@anthropic-ai/*/install.cjs"):
            run("node", script)
        if done.returncode:
            pytest.skip(f"npm cannot install {package}: {done.stderr[-300:]}")
    return executable


@cache
def aider() -> Path:
    """Return aider's program, installed in a separate environment."""
    executable = FOLDER / "aider" / "bin" / "aider"
    if not executable.exists():
        run(sys.executable, "-m", "venv", FOLDER / "aider")
        pip = FOLDER / "aider" / "bin" / "pip"
        done = run(pip, "install", "-q", AIDER, seconds=900)
        if done.returncode:
            pytest.skip(f"pip cannot install {AIDER}: {done.stderr[-300:]}")
    return executable


def sample(lines: str) -> str:
    return f"<think>\nI shall {lines}.\n</think>\n\n"


@dataclass
class Session:
    """One agent at work.

    Attributes:
        steps: returns the model's texts, one a turn; called with a file and tool names.
        requests: of each request, the number of tool results and the number of tools.
    """

    steps: Callable[[Path, Sequence[str]], list[str]]
    work: Path
    requests: list[tuple[int, int]] = field(default_factory=list)

    def script(self, request: GenerationRequest) -> str:
        """Return the model's text for a request."""
        chat = request.chat
        assert chat is not None
        names = [tool["function"]["name"] for tool in chat.tools]
        results = sum(message["role"] == "tool" for message in chat.messages)
        self.requests.append((results, len(names)))
        if not names:  # a request for a title has no tools
            return '{"title": "Fix add"}' if request.schema else "Fix add"
        steps = self.steps(self.work / "a.py", names)
        return steps[results] if results < len(steps) else END


def file_steps(
    tools: Sequence[str], fields: Sequence[str], file: Path, names: Sequence[str]
) -> list[str]:
    """Return three texts with calls of tools: one reads, one edits, one runs a command.

    `tools` names these tools. `fields` names three arguments: the path, which the first
    two tools take, and the old and the new text of the edit.
    """
    (read, edit, shell), (path, old, new) = tools, fields
    changed = {path: str(file), old: "a - b", new: "a + b"}
    ran = call(shell, json.dumps({"command": RUN, "description": "Runs it"}))
    return [
        sample("read") + call(read, json.dumps({path: str(file)})),
        call(edit, json.dumps(changed)),
        f"Now it runs.\n{ran}",
    ]


claude_steps = partial(
    file_steps, ("Read", "Edit", "Bash"), ("file_path", "old_string", "new_string")
)
open_steps = partial(
    file_steps, ("read", "edit", "bash"), ("filePath", "oldString", "newString")
)


def codex_steps(file: Path, names: Sequence[str]) -> list[str]:
    def shell(command: str) -> str:
        if "exec_command" in names:
            return call("exec_command", json.dumps({"cmd": command}))
        return call("shell", json.dumps({"command": ["bash", "-lc", command]}))

    edit = shell("sed -i 's/a - b/a + b/' a.py")
    return [sample("read") + shell("cat a.py"), edit, f"Now it runs.\n{shell(RUN)}"]


def environment(work: Path, home: Path) -> dict[str, str]:
    private = {"HOME": str(home), "PWD": str(work)}
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return {**kept, **private, **QUIET}


# The agent's name in `agent_lines`, its package and program, arguments, and steps.
AGENTS: dict[str, tuple[str, str, str, str, Any]] = {
    "claude": (
        "Claude Code",
        CLAUDE,
        "claude",
        "-p 'Fix add in a.py' --dangerously-skip-permissions",
        claude_steps,
    ),
    "codex": (
        "Codex",
        CODEX,
        "codex",
        "exec --skip-git-repo-check --sandbox danger-full-access 'Fix add in a.py'",
        codex_steps,
    ),
    **dict.fromkeys(
        OPENCODE_APIS,
        ("OpenCode", OPENCODE, "opencode", "run 'Fix add in a.py'", open_steps),
    ),
}


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_that_serve_connects_reads_edits_runs_and_ends(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, package, program, options, steps = AGENTS[name]
    folder = npm(package, program).parent
    said = []
    for draft in (None, "near"):
        work, home = tmp_path / f"work {draft}", tmp_path / f"home {draft}"
        work.mkdir()
        home.mkdir()
        (work / "a.py").write_text(BEFORE)
        session = Session(steps, work)
        with scripted(
            session.script, monkeypatch, draft=draft, names=("local",)
        ) as server:
            line = agent_lines(server.url, "local", 65536)[agent]
            line = line.replace(OPENCODE_APIS[0], name)
            env = environment(work, home)
            env["PATH"] = f"{folder}:{env['PATH']}"
            done = run("sh", "-c", f"{line} {options}", cwd=work, env=env)
        assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
        assert (work / "a.py").read_text() == AFTER
        assert END in done.stdout
        assert [r for r, tools in session.requests if tools] == [0, 1, 2, 3]
        said.append(done.stdout.replace(str(work), "WORK"))
    assert said[0] == said[1]


def test_aider_edits_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = (
        "a.py\n```python\n<<<<<<< SEARCH\n    return a - b\n=======\n"
        "    return a + b\n>>>>>>> REPLACE\n```\n"
    )
    whole = f"a.py\n```\n{AFTER}```\n"
    (tmp_path / "a.py").write_text(BEFORE)

    def script(request: GenerationRequest) -> str:
        assert request.chat is not None
        content = str(request.chat.messages[0]["content"])
        return edit if "SEARCH" in content else whole

    options = (
        *("--model", "openai/local", "--no-show-model-warnings", "--no-git"),
        *("--analytics-disable", "--no-check-update", "--no-show-release-notes"),
        *("--no-detect-urls", "--no-gitignore", "--yes-always"),
        *("--message", "Fix add", "a.py"),
    )
    program = aider()
    with scripted(script, monkeypatch, names=("local",)) as server:
        names = {"OPENAI_API_BASE": f"{server.url}/v1", "OPENAI_API_KEY": "x"}
        env = {**environment(tmp_path, tmp_path), **names}
        done = run(program, *options, cwd=tmp_path, env=env)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    assert (tmp_path / "a.py").read_text() == AFTER, done.stdout[-2000:]
