"""`doctor`: reports the installation, its faults and its slow settings."""

import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from mlx_speculation.blas import better_kernels, blas_in_use, thread_settings
from mlx_speculation.blas.automatic import VARIABLE, wanted_blas
from mlx_speculation.blas.kernels import CORE_TYPE
from mlx_speculation.blas.threads import NAMES, TIMEOUT
from mlx_speculation.cli.console import Screen
from mlx_speculation.cli.doctor_advice import (
    CUDNN,
    OPENBLAS,
    OPTIONAL,
    Facts,
    advice,
    required_names,
)
from mlx_speculation.cli.load_pair import begin
from mlx_speculation.cli.options import Json
from mlx_speculation.cli.run_app import FAILED
from mlx_speculation.environment import cache_folder, cpu_model, installed, usable_cores

PACKAGES = (
    "mlx-speculation",
    "mlx",
    "mlx-metal",
    "mlx-cpu",
    "mlx-cuda-13",
    "mlx-cuda-12",
    *OPENBLAS,
    "mlx-lm",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "typer",
    "rich",
    *OPTIONAL,
)
VARIABLES = (
    CUDNN,
    CORE_TYPE,
    VARIABLE,
    *NAMES,
    TIMEOUT,
    "LD_PRELOAD",
    "MLX_SPECULATION_CACHE",
)


def doctor(json: Json = False) -> None:
    """Say what is installed here, what is wrong, and what would make it faster."""
    screen = Screen(json=json)
    begin(wanted_blas(), screen)
    facts, device = find_facts()
    said = advice(facts)
    screen.table(_table(facts, device))
    lines = [f"{each.level}: {each.finding}. To do: {each.action}." for each in said]
    lines = lines or ["All is well: nothing is wrong, and nothing is known to be slow."]
    screen.text("\n".join(lines) + "\n")
    screen.object(
        command="doctor", facts=facts, cpu=cpu_model(), device=device, advice=said
    )
    if any(each.level == "wrong" for each in said):
        raise typer.Exit(FAILED)


def find_facts() -> tuple[Facts, dict[str, Any]]:
    """Return the facts of this installation, and mlx's description of its device."""
    error, backend, device = _mlx()
    folder, writable = _cache_folder() if error is None else (None, True)
    blas = blas_in_use()
    chooses = sys.platform == "linux" and backend == "cpu"
    early, late = _blas_of_programs() if chooses else (None, None)
    requirements = requires("mlx-speculation") or []
    names = [*PACKAGES, *required_names(requirements)]
    facts = Facts(
        python=(sys.version_info[0], sys.version_info[1], sys.version_info[2]),
        system=sys.platform,
        packages={name: installed(name) for name in dict.fromkeys(names)},
        requirements=requirements,
        mlx_error=error,
        backend=backend,
        gpus=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        blas=blas,
        openblas=blas.startswith("OpenBLAS"),
        kernels=better_kernels(),
        threads=thread_settings(),
        program_blas=early,
        late_program_blas=late,
        cores=usable_cores(),
        environment={n: os.environ[n] for n in VARIABLES if n in os.environ},
        cache_folder=None if folder is None else str(folder),
        cache_writable=writable,
    )
    return facts, device


def _mlx() -> tuple[str | None, str | None, dict[str, Any]]:
    """Return why mlx cannot be imported, its backend, and its device."""
    try:
        import mlx.core as mx

        device = dict(mx.device_info())
    except (ImportError, RuntimeError) as error:
        return str(error), None, {}
    if mx.metal.is_available():
        backend = "metal"
    elif mx.cuda.is_available():
        backend = "cuda"
    else:
        backend = "cpu"
    return None, backend, {"device": str(mx.default_device()), **device}


def _blas_of_programs() -> tuple[str | None, str | None]:
    """Return the BLAS of two programs: one imports this package first, one mlx.

    Both programs are run. None: the program failed, as mlx does there.
    """
    asking = "; from mlx_speculation.blas import blas_in_use; print(blas_in_use())"
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", f"import {first}, mlx.core{asking}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for first in ("mlx_speculation", "mlx.core")
    ]
    early, late = (program.communicate()[0].strip() or None for program in programs)
    return early, late


def _cache_folder() -> tuple[Path | None, bool]:
    """Return the cache folder, and whether it can be written; None: there is none."""
    folder = cache_folder()
    if folder is None:
        return None, False
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    return folder, there.is_dir() and os.access(there, os.W_OK)


def _table(facts: Facts, device: dict[str, Any]) -> Table:
    table = Table("what", "here", title="This installation")
    table.add_row("Python", ".".join(map(str, facts.python)))
    for name, there in facts.packages.items():
        if there is not None:
            table.add_row(name, there)
    table.add_row("processor", f"{cpu_model()}, {facts.cores} cores")
    table.add_row("mlx computes on", facts.backend or "nothing")
    for name in ("device_name", "architecture", "memory_size"):
        if name in device:
            table.add_row(name.replace("_", " "), str(device[name]))
    if facts.backend == "cpu":
        table.add_row("BLAS of the commands", facts.blas)
        if facts.openblas:
            set_by = facts.threads or "as they were when it was loaded"
            table.add_row("its threads", set_by)
    for name, result in (
        ("BLAS of Python programs", facts.program_blas),
        ("where mlx is imported first", facts.late_program_blas),
    ):
        if result is not None:
            table.add_row(name, result)
    for name, value in facts.environment.items():
        table.add_row(name, value)
    table.add_row("costs are kept in", facts.cache_folder or "nothing")
    return table
