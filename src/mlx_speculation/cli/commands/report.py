"""`report`: measures a model on this machine, and writes a page to share."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import typer

from mlx_speculation.cli.console import Report, Screen
from mlx_speculation.cli.inputs import check_output, writing
from mlx_speculation.cli.load_pair import short_name
from mlx_speculation.cli.options import DRAFT, Model, TrustRemoteCode
from mlx_speculation.cli.run_app import FAILED, INTERRUPTED
from mlx_speculation.environment import machine, versions
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.option_fields import option

Measured = dict[str, Any]

# Fields of the commands' JSON that are published. `_stage` removes paths and tokens of
# texts from them; no field has an environment variable.
SHARED: Mapping[str, Sequence[str]] = {
    "doctor": ("cpu", "device", "advice"),
    "check": ("same", "rows"),
    "exact": ("same", "exact", "found"),
    "calibrate": ("seconds_by_context",),
    "benchmark": (
        *("drafts", "plain", "same", "passes", "tokens", "chat", "arms", "advice"),
    ),
}
_FOLDERS = re.compile(r"(?<![\w:/.])/(?:[^\s/\"']+/)+")
_PROGRESS = re.compile(r".+: (\d+)/(\d+)")  # a line of `Screen.progress`
ROWS = 8  # tokens in a forward of exact mode
LENGTH = 4  # the fixed draft length of the benchmark
SHARE = "https://github.com/mlx-speculation/mlx-speculation/issues/new/choose"
BUSY = (
    "A round with a draft took less time than a plain step, so other programs slowed "
    "some rounds or steps. Close other programs and run the report again."
)


def report(
    model: Model,
    draft: list[str] | None = option(
        None,
        "Draft to measure beside 'lookup'. Repeatable. Default: 'auto'.",
        "--draft",
        "--draft-model",
        panel=DRAFT,
    ),
    tokens: int = option(128, "Tokens per run of the benchmark.", min=2),
    passes: int = option(5, "Passes of the benchmark.", min=1),
    folder: Path = option(Path(), "Folder of the two files."),
    yes: bool = option(False, "Write the files without asking.", "--yes", "-y"),
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure a model here, and write report.md and report.json to share.

    Runs doctor, check, check --exact, calibrate and benchmark, about ten minutes for a
    model of 8 B on a laptop. The report has the machine, the versions and figures, and
    nothing else; it is shown before it is written.
    """
    screen = Screen()
    files = folder / "report.md", folder / "report.json"
    _check_folder(folder, files)
    drafts = list(dict.fromkeys([*(draft or ["auto"]), "lookup"]))
    remote = ["--trust-remote-code"] if trust_remote_code else []
    size = ["-m", str(tokens), "--passes", str(passes)]
    named = [word for name in drafts for word in ("--draft", name)]
    length = ["--compare-length", str(LENGTH)]
    stages: dict[str, list[str]] = {
        "doctor": ["doctor"],
        "check": ["check", model, *remote],
        "exact": ["check", model, "--exact", str(ROWS), *remote],
        "calibrate": ["calibrate", model, "--draft", drafts[0], *remote],
        "benchmark": ["benchmark", model, *named, *length, *size, *remote],
    }
    measured, stopped = _run(stages, screen)
    page = {
        "model": short_name(model),
        "machine": machine(),
        "versions": versions(),
        **({} if stopped is None else {"stopped": stopped}),
        **measured,
    }
    text = markdown(page)
    screen.text(text)
    if sys.stdin.isatty() and not yes:
        typer.confirm(f"Write this to {files[0]} and {files[1]}?", abort=True)
    for file, content in zip(files, (text, json.dumps(page, indent=1)), strict=True):
        with writing("--folder", file) as opened:
            opened.write_text(content + "\n" * (file == files[1]), encoding="utf-8")
    screen.say(f"written: {files[0]}, {files[1]}; to share: {SHARE}")
    if stopped is not None:
        raise typer.Exit(INTERRUPTED)
    if any("error" in each for each in measured.values()):
        raise typer.Exit(FAILED)


def _check_folder(folder: Path, files: Sequence[Path]) -> None:
    if not folder.is_dir():
        raise InvalidRequestError(
            f"--folder is {str(folder)!r}, which is not a folder. Make it first."
        )
    for file in files:
        check_output("--folder", file)


def _run(
    stages: Mapping[str, Sequence[str]], screen: Screen
) -> tuple[dict[str, Measured], str | None]:
    """Run the commands; return published fields, and the interrupted command's name."""
    measured: dict[str, Measured] = {}
    for number, (name, words) in enumerate(stages.items(), 1):
        title = f"{number} of {len(stages)}: {name}"
        screen.say(title)
        started = time.monotonic()
        try:
            with screen.progress(title) as progress:
                measured[name] = _stage(name, words, progress)
        except KeyboardInterrupt:
            return measured, name
        measured[name]["seconds"] = round(time.monotonic() - started, 1)
    return measured, None


def _stage(name: str, words: Sequence[str], progress: Report) -> Measured:
    """Run a command, and show its progress; return its published fields."""
    lines, status, printed = _printed([*words, "--json"], progress)
    try:
        fields = json.loads(printed)
    except ValueError:
        errors = [line for line in lines if line.startswith("error")]
        said = errors[-1] if errors else f"ended with status {status}"
        return {"error": _without_paths(said)}
    shared = {key: fields[key] for key in SHARED[name]}
    if name == "doctor":
        facts = fields["facts"]
        shared |= {key: facts[key] for key in ("threads", "blas", "packages")}
    if name == "benchmark":
        shared["drafts"] = [short_name(each) for each in shared["drafts"]]
    for place in (shared.get("rows"), *shared.get("arms", ())):
        if isinstance(place, dict):  # `first` and `partings` hold tokens of texts
            place.pop("first", None)
            place.pop("partings", None)
    result: Measured = json.loads(_without_paths(json.dumps(shared)))
    return result


def _printed(words: Sequence[str], progress: Report) -> tuple[list[str], int, str]:
    """Run a command; return its lines of standard error, status and output."""
    command = [sys.executable, "-m", "mlx_speculation", *words]
    lines = []
    with (
        TemporaryFile("w+", encoding="utf-8") as output,
        subprocess.Popen(
            command, stdout=output, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stderr is not None
        try:
            for line in process.stderr:
                lines.append(line.rstrip())
                if match := _PROGRESS.fullmatch(lines[-1]):
                    progress(int(match[1]), int(match[2]))
        except BaseException:
            process.kill()
            raise
        status = process.wait()
        output.seek(0)
        return lines, status, output.read()


def _without_paths(text: str) -> str:
    """Return a text with only the last part of each path."""
    return _FOLDERS.sub("", text.replace(str(Path.home()), ""))


def markdown(page: Measured) -> str:
    """Return the report in Markdown."""
    here = page["machine"]
    lines = [f"# mlx-speculation on {here['device_name'] or here['cpu']}", ""]
    if "stopped" in page:
        missing = ", ".join(name for name in _SECTIONS if name not in page)
        said = f"Partial: stopped in {page['stopped']}. Not measured: {missing}."
        lines += [f"**{said}**", ""]
    lines += [f"- model: {page['model']}"]
    lines += [f"- {key}: {value}" for key, value in here.items()]
    lines.append("- " + ", ".join(f"{k} {v}" for k, v in page["versions"].items()))
    for name, write in _SECTIONS.items():
        if name in page:
            measured = page[name]
            error = measured.get("error")
            result = [f"not measured: {error}"] if error else write(measured)
            lines += ["", f"## {name}", "", *result]
    return "\n".join(lines) + "\n"


def _doctor(measured: Measured) -> list[str]:
    threads = measured["threads"]
    return [
        f"- BLAS: {measured['blas']}",
        *([f"- threads: {threads}"] if threads else []),
        *(f"- {each['level']}: {each['finding']}" for each in measured["advice"]),
    ]


def _check(measured: Measured) -> list[str]:
    rows, differs = measured["rows"], ""
    if rows["differing_rows"]:
        difference, margin = rows["largest_difference"], rows["tolerance"]
        differs = (
            f". Logits differ by up to {difference:.3g}; scores that are at most "
            f"{margin:.3g} apart are near-ties"
        )
    return [
        f"Drafts verified at once and token by token: {rows['verdict']}, "
        f"{rows['differing_rows']} of {rows['rows']} positions differ{differs}."
    ]


def _exact(measured: Measured) -> list[str]:
    result = measured["found"]
    price = result["exact_seconds"] / result["plain_seconds"]
    kept = "exact keeps its promise" if measured["same"] else "EXACT IS NOT EXACT"
    return [
        f"{kept}: {result['differing']} of {result['rows']} tokens differ, in contexts "
        f"of up to {result['context']} positions. A forward of {measured['exact']} "
        f"tokens takes {price:.2f} plain steps."
    ]


def _calibrate(measured: Measured) -> list[str]:
    costs = measured["seconds_by_context"]
    lengths = sorted({int(n) for table in costs.values() for n in table})
    lines = _header("context up to", *(str(n or "plain") for n in lengths))
    for context, table in costs.items():
        cells = [table.get(str(n)) for n in lengths]
        shown = ["-" if each is None else f"{each * 1e3:.1f}" for each in cells]
        lines.append(_row(str(context), *shown))
    title = "Milliseconds of a round by number of drafted tokens:"
    return [title, "", *lines, *(["", BUSY] if any(map(_busy, costs.values())) else [])]


def _busy(table: Mapping[str, float]) -> bool:
    return "0" in table and any(each < 0.95 * table["0"] for each in table.values())


def _benchmark(measured: Measured) -> list[str]:
    lines = _header("arm", "tokens/s", "x plain", "least", "most", "accepted")
    for arm in measured["arms"]:
        over, counts = arm["over_plain"], arm["statistics"]
        accepted = "-"
        if counts is not None and counts["drafted"]:
            accepted = f"{counts['accepted'] / counts['drafted']:.0%}"
        ratios = (over["median"], over["low"], over["high"])
        speeds = (f"{arm['speed']['median']:.1f}", *(f"{each:.2f}" for each in ratios))
        lines.append(_row(arm["name"], *speeds, accepted))
    kind = "chat messages" if measured["chat"] else "texts"
    size = f"{measured['passes']} {kind} of up to {measured['tokens']} tokens"
    text = "all equal" if measured["same"] else "NOT ALL EQUAL"
    return [
        f"{size}, {text} to those of plain decoding; `x plain` is the median, over the "
        "passes, of the speed divided by plain decoding's in the same pass:",
        *("", *lines, "", measured["advice"]),
    ]


_SECTIONS = {
    "doctor": _doctor,
    "check": _check,
    "exact": _exact,
    "calibrate": _calibrate,
    "benchmark": _benchmark,
}


def _header(*cells: str) -> list[str]:
    return [_row(*cells), _row("---", *("---:" for _ in cells[1:]))]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
