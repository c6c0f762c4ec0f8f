"""The BLAS of a program that does not choose one; each case is a separate process."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation.blas import openblas_wheel
from support.processes.blas_processes import (
    ADDS_UP_IN_ORDER,
    changed_environment,
    linux,
    run_python,
    with_openblas,
    with_wheel,
)
from support.processes.programs import command_line
from support.scheduling import cores

# Variables that tests set: each program starts without them.
CLEAN = dict.fromkeys(
    (
        "MLX_SPECULATION_BLAS",
        "OPENBLAS_NUM_THREADS",
        "OMP_NUM_THREADS",
        "LD_PRELOAD",
        "PYTHONWARNINGS",
    )
)
# Prints the BLAS of mlx, as the linker and the last bits of a product show it.
SERVED = (
    """
from mlx_speculation.blas import blas_in_use
from mlx_speculation.blas.loaded import library_in_front
mapped = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(library_in_front() in mapped, blas_in_use())
"""
    + ADDS_UP_IN_ORDER
)
OPENBLAS, STOCK = ("True", "False"), ("False", "True")


def served_by(
    code: str, *options: str, **environment: str | None
) -> tuple[tuple[str, str], str]:
    """Run a program; return its BLAS, found in two ways, and a description."""
    said, in_order = run_python(code + SERVED, *options, **{**CLEAN, **environment})
    in_front, _, words = said.partition(" ")
    return (in_front, in_order), words


@linux
@with_openblas
@pytest.mark.parametrize(
    "program",
    [
        "from mlx_speculation import Sampling",
        "import mlx_speculation; import mlx.core; mlx_speculation.Sampling",
        *(
            pytest.param(program, marks=pytest.mark.slow)
            for program in (
                "import mlx_speculation; mlx_speculation.Sampling",
                "from mlx_speculation.samplers import Sampling",
                "from mlx_speculation import SpeculativeGenerator",
                "from mlx_speculation import demo_models; import mlx_lm",
            )
        ),
    ],
)
def test_a_program_that_imports_this_package_first_gets_openblas(program: str) -> None:
    """A model decodes 27 tokens/s with mlx's reference BLAS, and 175 with OpenBLAS."""
    blas, words = served_by(program, "-Werror::UserWarning")
    assert blas == OPENBLAS
    assert words.startswith("OpenBLAS ")


@linux
def test_the_package_alone_loads_nothing() -> None:
    code = (
        "import mlx_speculation, sys; mlx_speculation.BlasError; "
        "mlx_speculation.__version__; mlx_speculation.demo_models()\n"
        "print(any('blas' in line for line in open('/proc/self/maps')))\n"
        "print('mlx_speculation.blas' in sys.modules)"
    )
    assert run_python(code, **CLEAN) == ["False", "False"]


@linux
@with_openblas
def test_the_program_and_what_it_starts_keep_their_environment() -> None:
    code = (
        "import os; before = dict(os.environ); import mlx_speculation, mlx.core\n"
        "print(os.environ == before)"
    )
    assert run_python(code, **CLEAN) == ["True"]


# The program imports no mlx-lm, which is slow to load. Torch is blocked in the line of
# another import: one more line would shift the line numbers that the tests expect.
MLX_FIRST = """import sys; sys.modules["torch"] = None; import mlx.core
{use}
import mlx_speculation
mlx_speculation.Sampling
from mlx_speculation import make_sampler
from mlx_speculation.samplers import pure
"""


def _said(code: str, folder: Path, **environment: str | None) -> list[str]:
    (folder / "program.py").write_text(code)
    done = subprocess.run(
        [sys.executable, str(folder / "program.py")],
        capture_output=True,
        text=True,
        check=True,
        env=changed_environment({**CLEAN, **environment}),
    )
    return done.stderr.splitlines()


@linux
@with_wheel
@pytest.mark.parametrize(
    ("use", "line"),
    [
        ("import mlx_speculation", 4),
        ("from mlx_speculation import Sampling", 2),
        pytest.param(
            "from mlx_speculation.models import load", 2, marks=pytest.mark.slow
        ),
        pytest.param(
            "import importlib; importlib.import_module('mlx_speculation.engine')",
            2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_where_mlx_came_first_one_warning_stands_at_the_first_use(
    use: str, line: int, tmp_path: Path
) -> None:
    said, source = _said(MLX_FIRST.format(use=use), tmp_path)
    assert f"program.py:{line}: BlasNotice: mlx was imported before mlx_spec" in said
    assert "reference BLAS of the mlx wheel" in said
    assert "2 to 6 times as long" in said
    assert "Import mlx_speculation before mlx and mlx_lm" in said
    assert source.strip() in MLX_FIRST.format(use=use).splitlines()


@linux
@pytest.mark.parametrize(
    ("use", "environment"),
    [
        ("", {"MLX_SPECULATION_BLAS": "stock"}),
        ("from mlx_speculation.blas import use_blas; use_blas('stock')", {}),
        (  # no faster BLAS is installed; `doctor` says so
            "from mlx_speculation.blas import automatic\n"
            "automatic.wheel_version = lambda: None",
            {},
        ),
        (  # mlx computes with CUDA
            "from mlx_speculation.blas import automatic\n"
            "automatic.installed = {'mlx-cuda-13': '0.32.4'}.get",
            {},
        ),
        ("import mlx_speculation; mlx_speculation.BlasError", {}),
    ],
    ids=["variable", "chosen", "no wheel", "cuda", "no use"],
)
def test_there_is_no_warning_where_there_is_nothing_to_do(
    use: str, environment: dict[str, str], tmp_path: Path
) -> None:
    code = MLX_FIRST.format(use=use)
    if use.endswith("BlasError"):
        code = f"import mlx.core\n{use}"
    assert _said(code, tmp_path, **environment) == []


@linux
@with_wheel
def test_the_warning_has_a_category_of_its_own_and_comes_once(tmp_path: Path) -> None:
    use = (
        "import mlx_speculation, warnings\n"
        "warnings.simplefilter('error', mlx_speculation.BlasNotice)\n"
        "try: mlx_speculation.Sampling\n"
        "except mlx_speculation.BlasNotice: pass\n"
        "else: raise SystemExit('no warning')"
    )
    assert _said(MLX_FIRST.format(use=use), tmp_path) == []


USE = "from mlx_speculation.blas import use_blas; use_blas({!r})"
CUDA = (
    "from mlx_speculation.blas import automatic\n"
    "automatic.installed = {'mlx-cuda-12': '0.32.4'}.get"
)


@linux
@with_openblas
@pytest.mark.parametrize(
    ("use", "variable", "blas"),
    [
        (USE.format("stock"), None, STOCK),
        ("import mlx_speculation", "stock", STOCK),
        (USE.format("openblas"), "stock", OPENBLAS),
        (CUDA, None, STOCK),
    ],
)
def test_the_program_chooses_before_the_variable_and_nobody_beside_cuda(
    use: str, variable: str | None, blas: tuple[str, str]
) -> None:
    assert served_by(use, MLX_SPECULATION_BLAS=variable)[0] == blas


def test_nothing_watches_on_macos() -> None:
    code = (
        "import sys; sys.platform = 'darwin'; before = sys.meta_path[:]\n"
        "import mlx_speculation; print(sys.meta_path == before)"
    )
    assert run_python(code) == ["True"]


@linux
def test_where_no_openblas_is_installed_the_import_goes_on_in_silence() -> None:
    use = (
        "from mlx_speculation.blas import choose\n"
        "choose.wheel_version = lambda: None; choose._LIBRARY = 'libmissing.so.0'"
    )
    assert served_by(use) == (STOCK, "reference BLAS of the mlx wheel")


@linux
@pytest.mark.parametrize(
    ("value", "error"),
    [("mkl", "InvalidRequestError"), ("openblas", "BlasError")],
)
def test_what_the_variable_asks_for_and_cannot_be_had_is_refused(
    value: str, error: str
) -> None:
    code = (
        "from mlx_speculation.blas import choose\n"
        "choose.wheel_version = lambda: None; choose._LIBRARY = 'libmissing.so.0'\n"
        "for _ in range(2):\n"
        "    try: import mlx.core\n"
        "    except Exception as error: print(type(error).__name__)"
    )
    environment = {**CLEAN, "MLX_SPECULATION_BLAS": value}
    assert run_python(code, **environment) == [error, error]


@pytest.fixture(name="other", scope="module")
def _other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an OpenBLAS that cannot be recognized as one."""
    folder = tmp_path_factory.mktemp("other")
    openblas, other = folder / "libopenblas.so", folder / "libother.so"
    openblas_wheel._write(openblas)
    (folder / "names").write_text("openblas_get_config other_get_config\n")
    command = [openblas_wheel._patchelf(), "--rename-dynamic-symbols"]
    command += [str(folder / "names"), "--output", str(other), str(openblas)]
    subprocess.run(command, check=True)
    return other


LOAD = "import ctypes; ctypes.CDLL({path!r}, mode=ctypes.RTLD_GLOBAL)\n"


@linux
@with_wheel
@pytest.mark.parametrize("preloaded", [True, False])
def test_another_blas_that_the_program_put_in_front_is_left(
    preloaded: bool, other: Path
) -> None:
    load = "" if preloaded else LOAD.format(path=str(other))
    environment = {"LD_PRELOAD": str(other)} if preloaded else {}
    blas, words = served_by(load + "import mlx_speculation", **environment)
    assert blas == OPENBLAS
    assert words == f"BLAS of {other}"


@linux
@with_wheel
def test_another_blas_in_front_is_left_by_auto_and_in_the_way_of_openblas(
    other: Path,
) -> None:
    code = LOAD.format(path=str(other)) + (
        "from mlx_speculation.blas import use_blas\n"
        "choice = use_blas(); print(choice.name, choice.detail)\n"
        "try: use_blas('openblas')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    auto, refused = run_python(code, **CLEAN)
    assert auto == f"other BLAS of {other}, which was loaded before"
    assert refused.startswith(f"BlasError blas is 'openblas', but the BLAS of {other}")


@linux
@with_wheel
def test_an_openblas_of_the_users_keeps_its_threads_and_brings_no_warning(
    other: Path, tmp_path: Path
) -> None:
    users_library = other.with_name("libopenblas.so")
    environment = {"LD_PRELOAD": str(users_library), "OPENBLAS_NUM_THREADS": "2"}
    blas, words = served_by("import mlx_speculation", **environment)
    assert blas == OPENBLAS
    assert words.endswith(", 2 threads)" if len(cores) > 1 else ", 1 thread)")
    assert _said(MLX_FIRST.format(use=""), tmp_path, **environment) == []


def doctor(*options: str, **environment: str | None) -> str:
    return subprocess.run(
        command_line("doctor", *options),
        env=changed_environment({**CLEAN, "COLUMNS": "200", **environment}),
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def facts(**environment: str | None) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(doctor("--json", **environment))["facts"]
    return values


@linux
@with_wheel
def test_doctor_says_which_blas_and_threads_there_are() -> None:
    values, table = facts(), doctor(OPENBLAS_NUM_THREADS="1")
    assert values["openblas"]
    assert re.match(r"[\d or]+ threads?: this process may use \d+", values["threads"])
    assert values["blas"].rpartition(",")[0] in table
    assert "OPENBLAS_NUM_THREADS is 1" in table


@linux
@with_wheel
def test_doctor_says_what_the_user_has_set() -> None:
    values = facts(MLX_SPECULATION_BLAS="stock")
    assert values["blas"] == "reference BLAS of the mlx wheel"
    assert values["threads"] is None
