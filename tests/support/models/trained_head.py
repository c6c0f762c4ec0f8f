"""The trained head of the demo hybrid, on a target with distinguishable states.

In the trained target the states before and after the final norm differ by little more
than a factor, which the head's norm removes. So the final norm's weight is multiplied
by random factors, and an untied output layer divides by them. The target stays the
same function, and the head nearly so, but the two states now differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation import demo_models
from mlx_speculation.models import HiddenStates, MtpConvention, load
from mlx_speculation.models.checkpoints.probe_text import STARTS, OwnText
from mlx_speculation.models.mtp import MtpHead
from mlx_speculation.models.mtp.convention_probe import HeadProbe
from mlx_speculation.models.mtp.load import build_mtp_head, find_mtp_head
from mlx_speculation.models.quantize import to_float32

Truth = Literal["as trained", "after_norm", "before_norm"]
# Standard deviation of the logarithm of the norm's factors.
SPREAD = 1.0
NORM_H, FINAL = "layers.0.norm_h.weight", "layers.0.final.weight"


@dataclass(frozen=True, slots=True)
class Trained:
    """A target and its trained head.

    Attributes:
        model: the target.
        tokenizer: its tokenizer.
        head: the head.
        stored: weights of its norms, none of them stored minus one.
        taps: the taps on the target.
        text: texts that the target has generated.
        convention: the convention that the head was trained with.
    """

    model: nn.Module
    tokenizer: Any
    head: MtpHead
    stored: Mapping[str, mx.array]
    taps: HiddenStates
    text: OwnText
    convention: MtpConvention

    def trial(self, stored: Mapping[str, mx.array] | None = None) -> HeadProbe:
        """Return a probe of the head, with its norms or with others."""
        norms = self.stored if stored is None else stored
        return HeadProbe(self.head, dict(norms), self.taps, self.text)


@cache
def trained(truth: Truth = "as trained") -> Trained:
    """Return the target and its head, which reads the state `truth`."""
    folder = demo_models()["hybrid"]
    model, tokenizer = load(folder)
    convention = MtpConvention(norms="stored")
    head, stored = build_mtp_head(find_mtp_head(folder, model), model, convention)
    to_float32(head)
    stored = {name: weight.astype(mx.float32) for name, weight in stored.items()}
    if truth != "as trained":
        factor = mx.exp(SPREAD * mx.random.normal((512,), key=mx.random.key(5)))
        factor = factor / mx.sqrt((factor * factor).mean())
        norm = _spread(model, factor)
        stored[FINAL] = stored[FINAL] * factor
        stored[NORM_H] = stored[NORM_H] * (
            norm if truth == "before_norm" else 1 / factor
        )
    if truth == "before_norm":
        convention = MtpConvention("before_norm", "before_norm", norms="stored")
    taps = HiddenStates(model, before_norm=True, after_norm=True)
    text = OwnText.of(model, taps, [tokenizer.encode(start) for start in STARTS])
    return Trained(model, tokenizer, head, stored, taps, text, convention)


def _spread(model: nn.Module, factor: mx.array) -> mx.array:
    """Multiply the final norm's weight, and return the old weight."""
    text: Any = model.language_model
    norm, embedding = text.model.norm, text.model.embed_tokens
    weight: mx.array = norm.weight
    norm.weight = weight * factor
    text.lm_head = nn.Linear(1, 1, bias=False)
    text.lm_head.weight = embedding.weight / factor
    text.args.tie_word_embeddings = False
    return weight
