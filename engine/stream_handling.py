"""How a stream treats its prompt and its caches, beside what it generates."""

from collections.abc import Callable
from dataclasses import dataclass

from mlx_speculation.caches import KVQuantization
from mlx_speculation.models import PREFILL_STEP, Lane


@dataclass(frozen=True, slots=True)
class Handling:
    """What mlx-lm's `generate_step` takes beside prompt, sampler and processors.

    Attributes:
        prefill_step: how many tokens of a prompt are fed at once.
        heard: called with the number of tokens of every chunk of the prompt that the
            target has read.
        quantization: when the target's caches are quantized; None: never.
        whole_rows: let each chunk's log-probability hold those of all ids.
        yielded_only: after `close()` the caller's caches hold the prompt and the
            yielded tokens, and nothing of a round that was not yielded. Its price is
            some forwards, at most a draft's tokens, at such a close.
        level_draft: at the end, let the draft model's caches hold what the target's do.
    """

    prefill_step: int = PREFILL_STEP
    heard: Callable[[int], None] | None = None
    quantization: KVQuantization | None = None
    whole_rows: bool = False
    yielded_only: bool = False
    level_draft: bool = False

    def prepare(self, target: Lane) -> None:
        """Let the target's lane do so."""
        target.prefill_step = self.prefill_step
        target.heard = self.heard
        target.quantization = self.quantization


USUAL = Handling()
