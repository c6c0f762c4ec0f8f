"""Models whose rows depend on what is fed with them.

A draft is checked in one forward over several rows, each of which stands for a row
that is fed alone. That needs a causal model, and mlx-lm has one that is not: it is
right for single rows only, so it is decoded without drafts. Which ones they are was
found by feeding every architecture both ways (tests/engine/test_census.py).

A prefix cache resumes a prompt in the middle, so its rows come in other forwards than
in a request from the start. That needs a model whose rows are the same wherever a
prompt is cut, which one of mlx-lm's is not.
"""

import mlx.nn as nn

from mlx_speculation.errors import InvalidRequestError

NOT_CAUSAL = {
    "mlx_lm.models.phi3small": "adds a boolean mask to the scores of its block-sparse "
    "layers, which hides nothing",
}


DEPEND_ON_CUTS = {
    "mlx_lm.models.plamo3": "lets a token of a prompt see one row more than its "
    "window holds, if that row is fed in the same forward",
}


def check_resumable(model: nn.Module) -> None:
    """Refuse a model whose rows depend on where a prompt is cut.

    Raises:
        InvalidRequestError: the model is one of `DEPEND_ON_CUTS` or `NOT_CAUSAL`.
    """
    check_causal(model, "prefix_cache")
    module = type(model).__module__
    if module in DEPEND_ON_CUTS:
        raise InvalidRequestError(
            f"A prefix_cache was passed, and {module} cannot use one: it "
            f"{DEPEND_ON_CUTS[module]}, so its text depends on where a prompt is cut. "
            "Leave prefix_cache out."
        )


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
