"""Finding the parts of a model by running it and observing its calls.

The parts are embedding, layers, final norm and output layer of any mlx-lm model. This
package also collects hidden states of forwards, and makes output layers for some ids
only. It does not know drafters or caches.
"""

from mlx_speculation.models.introspect.find_parts import find_parts
from mlx_speculation.models.introspect.hidden_states import HiddenStates
from mlx_speculation.models.introspect.lazy_arrays import evaluate_held
from mlx_speculation.models.introspect.position_table import (
    check_positions,
    position_table,
)
from mlx_speculation.models.introspect.reduced_output import ReducedEnds, ReducedOutput
from mlx_speculation.models.introspect.taps import States

__all__ = [
    "HiddenStates",
    "ReducedEnds",
    "ReducedOutput",
    "States",
    "check_positions",
    "evaluate_held",
    "find_parts",
    "position_table",
]
