"""`doctor`: reports the installation, its faults and its slow settings."""

import os
import platform
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from mlx_speculation.blas import blas_in_use, thread_settings
from mlx_speculation.blas.automatic import VARIABLE, wanted_blas
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

# Packages to report in addition to those that this package requires
PACKAGES = (
    "mlx-speculation",
    "mlx-metal",
    "mlx-cpu",
    "mlx-cuda-13",
    "mlx-cuda-12",
    *OPENBLAS,
    *OPTIONAL,
)
VARIABLES = (
    CUDNN,
    "OPENBLAS_CORETYPE",
    VARIABLE,
    *NAMES,
    TIMEOUT,
    "LD_PRELOAD",
    "MLX_SPECULATION_CACHE",
)


def doctor(json: Json = False) -> None:
    """Say what is installed here, what is wrong with it, and what makes it slow."""
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
    requirements = requires("mlx-speculation") or []
    names = [*PACKAGES, *required_names(requirements)]
    facts = Facts(
        python=platform.python_version(),
        system=sys.platform,
        packages={name: installed(name) for name in dict.fromkeys(names)},
        requirements=requirements,
        mlx_error=error,
        backend=backend,
        gpus=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        blas=blas,
        openblas=blas.startswith("OpenBLAS"),
        threads=thread_settings(),
        cores=usable_cores(),
        environment={n: os.environ[n] for n in VARIABLES if n in os.environ},
        cache_folder=None if folder is None else str(folder),
        cache_writable=writable,
    )
    return facts, device


def _mlx() -> tuple[str | None, str | None, dict[str, Any]]:
    """Return why mlx cannot be imported, mlx's backend, and mlx's device."""
    try:
        import mlx.core as mx

        device = dict(mx.device_info())
    except (ImportError, RuntimeError) as error:
        return str(error), None, {}
    gpus = {"metal": mx.metal.is_available(), "cuda": mx.cuda.is_available()}
    backend = next((name for name, there in gpus.items() if there), "cpu")
    return None, backend, {"device": mx.default_device().type.name, **device}


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
    table.add_row("Python", facts.python)
    for name, there in facts.packages.items():
        if there is not None:
            table.add_row(name, there)
    table.add_row("processor", f"{cpu_model()}, {facts.cores} cores")
    table.add_row("mlx computes on", facts.backend or "nothing")
    for name in ("device_name", "architecture", "memory_size"):
        if name in device:
            table.add_row(name.replace("_", " "), str(device[name]))
    if facts.backend == "cpu":
        table.add_row("BLAS", facts.blas)
        if facts.openblas:
            set_by = facts.threads or "not set by this package"
            table.add_row("its threads", set_by)
    for name, value in facts.environment.items():
        table.add_row(name, value)
    table.add_row("costs are kept in", facts.cache_folder or "nothing")
    return table
