"""The table of mixers has every class of mlx-lm that writes to an `ArraysCache`.

Such a class is found by an assignment to an item of a variable that has "cache" in its
name. For a class that is missed, test_replay.py fails, as every module that makes an
`ArraysCache` has a tiny model.
"""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import mlx.nn as nn
import mlx_lm.models
import pytest

from mlx_speculation.models.recurrent.mixers import MIXERS
from mlx_speculation.models.source_digests import is_known
from support.models.recurrent_models import RECURRENT_MODELS

FOLDER = Path(mlx_lm.models.__file__).parent

# Modules that make an `ArraysCache` and need no tiny model, with the reason.
WITHOUT_A_TINY_MODEL: dict[str, str] = {
    "cache": "defines it",
}
# Classes that assign to an item of a `cache` but are no mixers, with the reason.
_PIPELINE = "makes the last slot depend on a pipeline's send; the slot's value stays"
NOT_MIXERS: dict[tuple[str, str], str] = {
    ("afm7", "AFMModel"): "makes the list of caches",
    ("bailing_hybrid", "LanguageModel"): _PIPELINE,
    ("cache", "ArraysCache"): "the cache itself",
    ("kimi_k3", "KimiK3TextModel"): _PIPELINE,
    ("qwen3_5", "Qwen3_5TextModel"): _PIPELINE,
    ("qwen3_next", "Qwen3NextModel"): _PIPELINE,
}


@cache
def _classes_and_modules() -> tuple[set[tuple[str, str]], set[str]]:
    """Return writers to items of a cache, and modules that make an `ArraysCache`."""
    writers, makers = set(), set()
    for path in sorted(FOLDER.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not re.search(r"cache\w*\s*\[|\bArraysCache\(", text):
            continue  # saves the time to parse the file
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and _writes_items_of_a_cache(node):
                writers.add((path.stem, node.name))
            if any(_makes_an_arrays_cache(each) for each in ast.walk(node)):
                makers.add(path.stem)
    return writers, makers


def _makes_an_arrays_cache(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "ArraysCache"
    )


def _root(node: ast.expr) -> str:
    """Return the name that an item is taken from: `cache` for cache[0][1]."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _writes_items_of_a_cache(kind: ast.ClassDef) -> bool:
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and "cache" in _root(node)
        for node in ast.walk(kind)
    )


def test_every_class_that_writes_to_an_arrays_cache_is_in_the_table() -> None:
    writers, _ = _classes_and_modules()
    listed = {(module.rpartition(".")[2], name) for module, name in MIXERS}
    assert writers - set(NOT_MIXERS) == listed


def test_every_module_that_makes_an_arrays_cache_has_a_tiny_model() -> None:
    _, makes = _classes_and_modules()
    tried = {tiny.module for tiny in RECURRENT_MODELS.values()}
    assert makes - set(WITHOUT_A_TINY_MODEL) <= tried


@pytest.mark.parametrize(("module", "name"), sorted(MIXERS))
def test_each_mixer_of_the_table_is_the_one_that_was_read(
    module: str, name: str
) -> None:
    mixer = MIXERS[module, name]
    kind = getattr(importlib.import_module(module), name)
    assert issubclass(kind, nn.Module)
    assert is_known(kind)
    for home, other in mixer.relies_on:
        assert is_known(getattr(importlib.import_module(home), other))
    if mixer.recipe is not None and (scan := mixer.recipe.watch.scan) is not None:
        called = getattr(importlib.import_module(module), scan.name)
        assert called is getattr(importlib.import_module(scan.module), scan.name)
        assert is_known(called)
        assert scan.name in getattr(kind, scan.called_in).__code__.co_names
