"""Files around the code: workflows, templates, hooks, and published archives."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_speculation import demo_models

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
HOME = "https://github.com/mlx-speculation/mlx-speculation"


def read(path: Path) -> Any:
    """Return the content of a YAML file; the key "on" of a workflow becomes True."""
    return yaml.safe_load(path.read_text("utf-8"))


def steps(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_hooks_have_the_versions_of_the_tests() -> None:
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    pinned = {pin for hook in hooks for pin in hook["additional_dependencies"]}
    tools = ("ruff", "mypy")
    assert pinned == {pin for pin in EXTRAS["test"] if pin.startswith(tools)}
    assert len(pinned) == len(tools)
    assert {hook["entry"].split()[0] for hook in hooks} == set(tools)


def test_the_workflow_tests_on_linux_and_on_apple_silicon() -> None:
    job = read(GITHUB / "workflows/test.yml")["jobs"]["test"]
    systems = {each["os"] for each in job["strategy"]["matrix"]["include"]}
    assert {system.split("-")[0] for system in systems} == {"ubuntu", "macos"}
    assert re.search(r"^make test PYTHON=", steps(job), re.MULTILINE)
    versions = {each["python"] for each in job["strategy"]["matrix"]["include"]}
    named = {
        line.rpartition(" ")[2]
        for line in PROJECT["classifiers"]
        if re.search(r":: 3\.\d+$", line)
    }
    assert versions <= named


def test_the_report_of_a_mac_is_written_without_a_terminal() -> None:
    job = read(GITHUB / "workflows/test.yml")["jobs"]["test"]
    (name,) = re.findall(r"demo_models\(\)\['(\w+)'\]", steps(job))
    assert name in demo_models()
    assert re.search(r'mlx-speculation report "\$model" .*--yes', steps(job))
    (upload,) = [each for each in job["steps"] if "upload" in each.get("uses", "")]
    assert "!cancelled()" in upload["if"]  # else a failed step leaves out this one


def test_the_long_suite_runs_nightly() -> None:
    workflow = read(GITHUB / "workflows/long.yml")
    minute, hour, day, month, weekday = workflow[True]["schedule"][0]["cron"].split()
    assert (day, month, weekday) == ("*", "*", "*")
    assert minute.isdigit()
    assert hour.isdigit()
    job = workflow["jobs"]["test-long"]
    assert 'make test-long PYTHON=python TESTS="${{ matrix.tests }}"' in steps(job)
    parts = " ".join(job["strategy"]["matrix"]["tests"]).split()
    paths = [path for part in parts for path in ROOT.glob(part)]
    files = [file for path in paths for file in [path, *path.rglob("test_*.py")]]
    modules = [file for file in files if file.suffix == ".py"]
    assert sorted(modules) == sorted((ROOT / "tests").rglob("test_*.py"))


def test_a_release_is_built_checked_and_published_without_a_password() -> None:
    jobs = read(GITHUB / "workflows/release.yml")["jobs"]
    for command in ("-m build", "twine check --strict", "check-wheel-contents"):
        assert command in steps(jobs["build"])
    publish = jobs["publish"]
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}
    uses = [step["uses"] for step in publish["steps"]]
    assert any(use.startswith("pypa/gh-action-pypi-publish@") for use in uses)
    assert "secrets." not in (GITHUB / "workflows/release.yml").read_text("utf-8")


def test_workflows_say_that_their_authors_have_not_run_them() -> None:
    for path in (GITHUB / "workflows").glob("*.yml"):
        said = re.sub(r"\s*\n#\s*", " ", path.read_text("utf-8"))
        assert re.search(r"not (been )?run (by them|this file on GitHub)", said), path
        assert read(path)["permissions"] == {"contents": "read"}


def test_templates_ask_for_what_doctor_says() -> None:
    forms = [*(GITHUB / "ISSUE_TEMPLATE").glob("*.yml")]
    texts = [form.read_text("utf-8") for form in forms if form.name != "config.yml"] + [
        (GITHUB / "pull_request_template.md").read_text("utf-8")
    ]
    assert len(texts) == 5
    for text in texts:
        assert "mlx-speculation doctor --json" in text
    for form in forms:
        assert read(form)


def test_the_project_says_where_it_is() -> None:
    urls = PROJECT["urls"]
    assert set(urls) == {"Homepage", "Documentation", "Issues", "Changelog"}
    assert all(url.startswith(HOME) for url in urls.values())
    for name in ("Documentation", "Changelog"):
        path = urls[name].removeprefix(f"{HOME}/blob/main/")
        assert (ROOT / path).is_file()


def test_all_extras_are_what_a_user_may_want() -> None:
    (everything,) = EXTRAS["all"]
    named = re.fullmatch(r"mlx-speculation\[([\w,]+)\]", everything)
    assert named is not None
    backends, developers = {"cpu", "cuda13"}, {"docs", "mutation", "reference", "test"}
    large = {"vision"}  # 660 MB, for users of vision models
    others = backends | developers | large | {"all"}
    assert set(named[1].split(",")) == EXTRAS.keys() - others


@pytest.mark.slow
def test_archives_are_the_package_and_nothing_by_halves(tmp_path: Path) -> None:
    """Archives have no tests, documentation, examples or demonstration models."""
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", ".*_cache")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    build = (
        "from setuptools import build_meta as build; "
        "build.build_sdist('made'); build.build_wheel('made')"
    )
    subprocess.run(
        [sys.executable, "-c", build], cwd=copy, check=True, capture_output=True
    )
    (archive,) = (copy / "made").glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    tops = {name.partition("/")[0] for name in names if "/" in name}
    assert tops == {"src"}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= names
    (wheel,) = (copy / "made").glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path / "installed")
        inside = {name for name in files.namelist() if ".dist-info/" not in name}
    assert inside <= {name.removeprefix("src/") for name in names}
    package = ROOT / "src/mlx_speculation"
    expected = [*package.rglob("*.py"), *(package / "demo").glob("*.json")]
    for folder in ("engine", "models", "caches", "samplers"):
        expected += [*(package / folder).rglob("*.py")]
    assert len(expected) > 300
    assert {str(file.relative_to(package.parent)) for file in expected} <= inside
    for file in inside:
        assert "demo" not in Path(file).parts or Path(file).parent.name == "demo"
    assert wheel.stat().st_size < 2_000_000
    ran = subprocess.run(
        [sys.executable, "-m", "mlx_speculation", "demo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
    )
    assert ran.returncode
    said = " ".join((ran.stdout + ran.stderr).split())
    assert "git clone https://github.com/mlx-speculation/mlx-speculation" in said
    assert "make demo" in said
