"""Models that cannot check drafts: their rows depend on the rows after them.

A draft is checked in one forward over several rows, each of which stands for a row
that is fed alone. That needs a causal model, and mlx-lm has one that is not: it is
right for single rows only, so it is decoded without drafts. Which ones they are was
found by feeding every architecture both ways (tests/engine/test_census.py).
"""

import mlx.nn as nn

from mlx_speculation.errors import InvalidRequestError

NOT_CAUSAL = {
    "mlx_lm.models.phi3small": "adds a boolean mask to the scores of its block-sparse "
    "layers, which hides nothing",
}


def check_causal(model: nn.Module, passed: str = "draft") -> None:
    """Refuse a model whose forward over several rows mixes them.

    Args:
        model: the model.
        passed: the argument that needs a causal one. A "prefix_cache" does: a row
            must not depend on what was fed with it.

    Raises:
        InvalidRequestError: the model is one of `NOT_CAUSAL`.
    """
    module = type(model).__module__
    if module in NOT_CAUSAL:
        raise InvalidRequestError(
            f"A {passed} was passed, and {module} cannot use one: it "
            f"{NOT_CAUSAL[module]}, so a token changes the rows before it. "
            f"Leave {passed} out."
        )
