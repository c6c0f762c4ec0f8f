"""`report`: measures a model on this machine, and writes a page to share."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import typer

from mlx_speculation.cli.console import Report, Screen
from mlx_speculation.cli.inputs import check_output, writing
from mlx_speculation.cli.load_pair import short_name
from mlx_speculation.cli.measure import counted_texts, ratio_note
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
_PROGRESS = re.compile(r".+: (\d+)/(\d+)(?:, .*)?")  # a line of `Screen.progress`
ROWS = 8  # tokens in a forward of exact mode
LENGTH = 4  # the fixed draft length of the benchmark
SHARE = "https://github.com/mlx-speculation/mlx-speculation/issues/new/choose"
FACTS = ("model", "weights", "date", "options", "load")
LOAD = (
    "{:.1f} before, {:.1f} at the end (programs running, mean of a minute; figures of "
    "a busy machine say little)"
)
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
    model of 8 B on a laptop. It has names of models, the machine, versions and figures,
    and no more. It is shown first; without a terminal, only --yes writes it.
    """
    screen = Screen()
    files = folder / "report.md", folder / "report.json"
    _check_folder(folder, files)
    load, weights = os.getloadavg()[0], _weights(model)
    drafts = list(dict.fromkeys([*(draft or ["auto"]), "lookup"]))
    remote = ["--trust-remote-code"] if trust_remote_code else []
    named = [word for name in drafts for word in ("--draft", name)]
    named += ["--compare-length", str(LENGTH)]
    named += ["-m", str(tokens), "--passes", str(passes)]
    stages: dict[str, list[str]] = {
        "doctor": ["doctor"],
        "check": ["check", model, *remote],
        "exact": ["check", model, "--exact", str(ROWS), *remote],
        "calibrate": ["calibrate", model, "--draft", drafts[0], *remote],
        "benchmark": ["benchmark", model, *named, *remote],
    }
    measured, stopped = _run(stages, screen)
    options = [f"--draft {short_name(name)}" for name in drafts]
    page = {
        "model": short_name(model),
        "weights": weights,
        "date": date.today().isoformat(),
        "options": f"{' '.join(options)} --tokens {tokens} --passes {passes}",
        "load": LOAD.format(load, os.getloadavg()[0]),
        "machine": machine(),
        "versions": versions(),
        **({} if stopped is None else {"stopped": stopped}),
        **measured,
    }
    text = markdown(page)
    screen.text(text)
    _write(files, (text, json.dumps(page, indent=1) + "\n"), screen, yes=yes)
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


def _weights(model: str) -> str:
    """Return the bits or dtype of a model's weights, and their size; fetch the model.

    Raises:
        ModelFolderError: there is no such folder or repository, or no access to it.
    """
    from mlx_speculation.models import model_folder
    from mlx_speculation.models.config_json import nested, read_config, text_config
    from mlx_speculation.models.safetensors_layout import weight_files

    folder = model_folder(model)
    config = read_config(folder)
    size = sum(file.stat().st_size for file in weight_files(folder))
    bits = nested(config, "quantization", "bits")
    part = text_config(config)
    dtype = part.get("dtype") or part.get("torch_dtype") or "dtype unknown"
    return f"{f'{bits} bits' if bits else dtype}, {size / 1e9:.3g} GB"


def _write(
    files: Sequence[Path], contents: Sequence[str], screen: Screen, *, yes: bool
) -> None:
    """Write the files after a yes; say first whether they replace earlier ones."""
    names = " and ".join(map(str, files))
    earlier = " and ".join(str(file) for file in files if file.exists())
    if not yes and not sys.stdin.isatty():
        screen.say(f"Nothing was written. Run it with --yes to write {names}.")
        return
    replaced = f"This replaces the earlier {earlier}." if earlier else ""
    if not yes:
        typer.confirm(f"{replaced} Write this to {names}?".lstrip(), abort=True)
    elif replaced:
        screen.say(replaced)
    for file, content in zip(files, contents, strict=True):
        with writing("--folder", file) as opened:
            opened.write_text(content, encoding="utf-8")
    screen.say(f"written: {names}; to share: {SHARE}")


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
    facts = {key: page[key] for key in FACTS if key in page} | here
    facts.pop("device_name")  # it is in the title
    lines += [f"- {key}: {value}" for key, value in facts.items()]
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
    bits = "same bits" if measured["same"] else "BITS DIFFER"
    return [
        f"Exact mode: {bits} on this machine, {result['differing']} of "
        f"{result['rows']} tokens differ, in contexts of up to {result['context']} "
        f"positions. A forward of {measured['exact']} tokens takes {price:.2f} plain "
        "steps."
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
    texts = counted_texts(measured["passes"], chat=measured["chat"])
    same = "equal" if measured["same"] else "NOT ALL EQUAL"
    size = f"{texts} of up to {measured['tokens']} tokens"
    note = ratio_note(measured["plain"])
    return [
        f"{size}, {same} to plain decoding's:",
        *("", *lines, "", note, "", measured["advice"]),
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
