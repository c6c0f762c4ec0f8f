"""Models that passed a trial in exact mode, and the check that refuses all others.

In exact mode every forward has the same number of rows, and reads keys in views whose
size depends on the position alone (`caches/types/fixed_view.py`). A row's bits then
depend only on the tokens up to this row, if the model applies the masks of its caches
to all that `update_and_fetch` returns, and computes nothing else that depends on the
padding. Only a trial shows whether a model does so, see
tests/models/lanes/test_fixed_shape.py.
"""

import mlx.nn as nn

from mlx_speculation.errors import UnsupportedModelError
from mlx_speculation.models.exclusions import ALONE, TOGETHER, is_one_of
from mlx_speculation.models.instance_hooks import plain_class
from mlx_speculation.models.recurrent.mixers import MIXERS
from mlx_speculation.models.recurrent.recorder import replays_from_notes

_RUNS_AGAIN = "has mixers that can only run again over the kept rows"
_NO_VIEW = "has caches without a view of a fixed size"
_MIXES_ROWS = "has rows that depend on what is fed together with them"

# Modules of mlx_lm.models that failed a trial in exact mode, and the reasons.
UNFIT = {
    "afm7": _MIXES_ROWS,
    "deepseek_v41": _NO_VIEW,
    "jamba": _RUNS_AGAIN,
    "llama4": _NO_VIEW,
    "mamba": _RUNS_AGAIN,
    "minimax_m3_vl": "chooses blocks of keys by the number of keys in the view",
    "phi3small": _MIXES_ROWS,
    "rwkv7": _RUNS_AGAIN,
}
# The modules that passed. All of TOGETHER and ALONE were tried in exact mode.
TRIED = (TOGETHER | ALONE.keys()) - UNFIT.keys()


def check_fixed_shape(model: nn.Module) -> None:
    """Refuse a model that was not tried in exact mode, or failed the trial.

    Raises:
        UnsupportedModelError: the model is refused, or a mixer's source has changed.
    """
    if not is_one_of(model, TRIED):
        package, _, name = type(model).__module__.rpartition(".")
        unfit = package == "mlx_lm.models" and name in UNFIT
        why = UNFIT[name] if unfit else "was not tried in a fixed shape"
        raise UnsupportedModelError(
            f"exact was passed, but {type(model).__module__} {why}; docs/exactness.md "
            "lists the refused models. Leave exact out."
        )
    for path, module in model.named_modules():
        kind = plain_class(module)
        place = (kind.__module__, kind.__name__)
        if place in MIXERS and not replays_from_notes(module):
            raise UnsupportedModelError(
                f"exact was passed, but {path}, a {place[1]}, cannot be replayed: its "
                "source code is not that of the supported version. Leave exact out."
            )
