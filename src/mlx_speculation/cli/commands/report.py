"""`report`: measures a model on this machine, and writes a page to share."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from datetime import date
from pathlib import Path
from tempfile import TemporaryFile

import typer

from mlx_speculation import signals
from mlx_speculation.cli.commands.report_page import Measured, markdown
from mlx_speculation.cli.console import Screen
from mlx_speculation.cli.inputs import check_output, writing
from mlx_speculation.cli.load_pair import short_name
from mlx_speculation.cli.options import DRAFT, Model, TrustRemoteCode
from mlx_speculation.cli.run_app import FAILED, INTERRUPTED, fail
from mlx_speculation.environment import cache_folder, machine, versions
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.option_fields import option

Show = Callable[[str], None]

# Fields of the commands' JSON that are published. `_stage` removes paths and tokens of
# texts from them; no field has an environment variable.
SHARED: Mapping[str, Sequence[str]] = {
    "doctor": ("cpu", "device", "advice"),
    "check": ("same", "rows"),
    "exact": ("same", "exact", "found"),
    "calibrate": ("seconds_by_context",),
    "benchmark": (
        *("drafts", "plain", "same", "passes", "texts", "tokens", "chat", "arms"),
        "advice",
    ),
}
# Folders of a path. Relative paths such as a/b/c look like names of repositories or
# units: `_without_paths` has to know them.
_FOLDERS = re.compile(r"(?<![\w:/.~])(?:(?:~|\.\.?)/|/(?=[^\s/\"']+/))(?:[^\s/\"']+/)*")
_PROGRESS = re.compile(r".+: \d+/\d+(, .*)?")  # a line of `Screen.progress`
ROWS = 8  # tokens in a forward of exact mode
LENGTH = 4  # the fixed draft length of the benchmark
SHARE = "https://github.com/mlx-speculation/mlx-speculation/issues/new/choose"
LOAD = (
    "programs wanted a core on average, in the minute before the run (figures of a "
    "busy machine say little)"
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
    yes: bool = option(
        False, "Write unasked; a partial report replaces none.", "--yes", "-y"
    ),
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure a model here, and write report.md and report.json to share.

    Runs doctor, check, check --exact, calibrate and benchmark, some ten minutes; fewer
    --tokens or --passes shorten it. The report has the machine and names of models,
    versions and figures. It is shown, and written after a yes; without a terminal,
    --yes is needed. It is partial if a command failed or was stopped.
    """
    screen = Screen()
    files = folder / "report.md", folder / "report.json"
    drafts = list(dict.fromkeys([*(draft or ["auto"]), "lookup"]))
    _check_options(folder, files, drafts, yes=yes)
    load, weights = os.getloadavg()[0], _weights(model)
    remote = ["--trust-remote-code"] if trust_remote_code else []
    size = ["-m", str(tokens), "--passes", str(passes)]
    measured, stopped = _run(_stages(model, drafts, size, remote), screen)
    options = [f"--draft {short_name(name)}" for name in drafts]
    page = {
        "model": short_name(model),
        "weights": weights,
        "date": date.today().isoformat(),
        "options": f"{' '.join(options)} --tokens {tokens} --passes {passes}",
        "load": f"{load:.1f} {LOAD}",
        "machine": machine(),
        "versions": versions(),
        **({} if stopped is None else {"stopped": stopped}),
        **measured,
    }
    text = markdown(page)
    screen.text(text)
    errors = {name: each["error"] for name, each in measured.items() if "error" in each}
    for name, error in errors.items():
        fail(f"{name}: {error}")
    contents = text, json.dumps(page, indent=1) + "\n"
    partial = stopped is not None or bool(errors)
    _write(files, contents, screen, yes=yes, partial=partial)
    if stopped is not None:
        raise typer.Exit(INTERRUPTED)
    if errors or any(each.get("same") is False for each in measured.values()):
        raise typer.Exit(FAILED)


def _check_options(
    folder: Path, files: Sequence[Path], drafts: Sequence[str], *, yes: bool
) -> None:
    """Refuse unusable options; fetch drafts that are repositories."""
    from mlx_speculation.engine.drafters.resolve import find_draft

    if not folder.is_dir():
        raise InvalidRequestError(
            f"--folder is {str(folder)!r}, which is not a folder. Make it first."
        )
    for file in files:
        option = f"--folder is {str(folder)!r}, and its file"
        check_output(option, file, "Name another folder.")
    if not yes and not os.isatty(0):
        raise InvalidRequestError(
            "Standard input is no terminal, so no question can be asked. Give --yes to "
            "write the report without one."
        )
    for name in drafts:
        find_draft(name)


def _stages(
    model: str, drafts: Sequence[str], size: Sequence[str], remote: Sequence[str]
) -> Mapping[str, Sequence[str]]:
    """Return the words of each command."""
    named = [word for name in drafts for word in ("--draft", name)]
    length = ["--compare-length", str(LENGTH)]
    return {
        "doctor": ["doctor"],
        "check": ["check", model, *remote],
        "exact": ["check", model, "--exact", str(ROWS), *remote],
        "calibrate": ["calibrate", model, "--draft", drafts[0], *remote],
        "benchmark": ["benchmark", model, *named, *length, *size, *remote],
    }


def _weights(model: str) -> str:
    """Return the bits or dtype of a model's weights, and their size; fetch the model.

    Raises:
        ModelFolderError: there is no such folder or repository, or no access to it.
    """
    from mlx_speculation.models import model_folder
    from mlx_speculation.models.config_json import nested, read_config, text_config
    from mlx_speculation.models.quantize import runs_on_linux_cpu
    from mlx_speculation.models.safetensors_layout import weight_files

    folder = model_folder(model)
    config = read_config(folder)
    size = sum(file.stat().st_size for file in weight_files(folder))
    bits = nested(config, "quantization", "bits")
    part = text_config(config)
    dtype = part.get("dtype") or part.get("torch_dtype") or "dtype unknown"
    computed = "; computed in float32" if runs_on_linux_cpu() else ""
    return f"{f'{bits} bits' if bits else dtype}, {size / 1e9:.3g} GB{computed}"


def _write(
    files: Sequence[Path],
    contents: Sequence[str],
    screen: Screen,
    *,
    yes: bool,
    partial: bool,
) -> None:
    """Write the files after a yes; say first whether they replace earlier ones."""
    names = " and ".join(map(str, files))
    earlier = " and ".join(str(file) for file in files if file.exists())
    if yes and partial and earlier:
        screen.say("Nothing was written: a partial report replaces no files.")
        return
    replaced = f"This replaces the earlier {earlier}. " if earlier else ""
    if not yes and not _agreed(f"{replaced}Write this to {names}?"):
        screen.say("Nothing was written.")
        return
    if yes and earlier:
        screen.say(replaced)
    for file, content in zip(files, contents, strict=True):
        with writing("--folder", file) as opened:
            opened.write_text(content, encoding="utf-8")
    screen.say(f"written: {names}; to share: {SHARE}")


def _agreed(question: str) -> bool:
    """Ask a question on standard error, unless SIGTERM has ended the run."""
    try:
        signals.resume()  # after Ctrl-C in a stage, the next one ends the question
        with redirect_stdout(sys.stderr):  # `err=True` leaves a blank for stdout
            return typer.confirm(question)
    except (KeyboardInterrupt, typer.Abort) as error:
        typer.echo("\nNothing was written.", err=True)
        raise typer.Exit(INTERRUPTED) from error


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
            with screen.notes.status(title) as status:
                terminal = screen.notes.is_terminal
                show: Show = status.update if terminal else screen.say
                measured[name] = _stage(name, words, show)
        except KeyboardInterrupt:
            return measured, name
        measured[name]["seconds"] = round(time.monotonic() - started, 1)
    return measured, None


def _stage(name: str, words: Sequence[str], show: Show) -> Measured:
    """Run a command, and show its lines of progress; return its published fields."""
    lines, status, printed = _printed([*words, "--json"], show)
    try:
        fields = json.loads(printed)
    except ValueError:
        errors = [line for line in lines if line.startswith("error: ")]
        said = errors[-1] if errors else f"ended with status {status}"
        return {"error": _without_paths(said.removeprefix("error: "), words)}
    shared = {key: fields[key] for key in SHARED[name]}
    if name == "doctor":
        facts = fields["facts"]
        shared |= {key: facts[key] for key in ("threads", "blas", "packages")}
    for place in (shared.get("rows"), *shared.get("arms", ())):
        if isinstance(place, dict):  # `first` and `partings` hold tokens of texts
            place.pop("first", None)
            place.pop("partings", None)
    text = json.dumps(shared, ensure_ascii=False)
    result: Measured = json.loads(_without_paths(text, words))
    return result


def _printed(words: Sequence[str], show: Show) -> tuple[list[str], int, str]:
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
                if _PROGRESS.fullmatch(lines[-1]):
                    show(lines[-1])
        except BaseException:
            process.kill()
            raise
        status = process.wait()
        output.seek(0)
        return lines, status, output.read()


def _without_paths(text: str, words: Sequence[str]) -> str:
    """Return a text of a command with only the last part of each path."""
    names = {str(Path.home()): "~", str(Path.cwd()): "."}
    for word in (*words, str(cache_folder())):
        path, name = Path(word).expanduser(), short_name(word).replace("\\", r"\\")
        quoted = word.replace("'", r"""'\"'\"'""")  # by shlex, in JSON
        if "/" in word:
            names |= dict.fromkeys([word, quoted, str(path), str(path.resolve())], name)
    for place in sorted(names, key=len, reverse=True):
        if "/" in place and place != "/":
            text = re.sub(rf"{re.escape(place)}(?![\w-])", names[place], text)
    return _FOLDERS.sub("", text)
