"""The copy of a model that arms of mlx-lm get has its arrays and none of our hooks.

Faults that were made by hand, and found here: hooks stay on; arrays are copied.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_speculation.models import ModelHooks
from support.models.census import BUILT, build
from support.models.copies import left_on

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
sys.path.insert(0, SCRIPTS)
bare = importlib.import_module("bare_models").bare
sys.path.remove(SCRIPTS)


@pytest.mark.parametrize("name", sorted(BUILT))
def test_a_bare_copy_shares_the_arrays_and_has_no_hooks(name: str) -> None:
    model: Any = build(name)
    ids = mx.array([[1, 2, 3]])
    recorders = ModelHooks(model)
    expected = model(ids).tolist()  # before: gemma3n clips weights of its own in it
    other: Any = bare(model)
    recorders.remove()  # and what is without hooks is no other's business
    pairs = [dict(tree_flatten(each.parameters())) for each in (model, other)]
    assert pairs[0].keys() == pairs[1].keys()
    assert all(pairs[1][path] is array for path, array in pairs[0].items())
    kinds = [[type(each) for each in one.modules()] for one in (model, other)]
    assert kinds[0] == kinds[1]
    assert not any(left_on(each) for each in other.modules())
    assert other(ids).tolist() == expected
