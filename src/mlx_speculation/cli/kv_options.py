"""Options of the key-value caches, as mlx-lm names them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mlx_speculation import SpeculativeGenerator

KV = "Key-value caches, as mlx-lm names it"


def _option(help: str, low: int) -> Any:
    return typer.Option(min=low, rich_help_panel=KV, help=help)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    """How the prompt is read, and how much of it is kept."""

    max_kv_size: Annotated[
        int | None, _option("Positions that the target's caches hold at most.", 1)
    ] = None
    kv_bits: Annotated[
        int | None, _option("Hold the target's caches in so many bits.", 1)
    ] = None
    kv_group_size: Annotated[int, _option("Numbers that share a scale then.", 1)] = 64
    quantized_kv_start: Annotated[
        int, _option("Positions from which on they are held so.", 0)
    ] = 5000
    prefill_step_size: Annotated[
        int, _option("Tokens of the prompt that are read at once.", 1)
    ] = 2048

    def for_stream(
        self,
        generator: "SpeculativeGenerator",
        reach: int,
        heard: Callable[[int], None],
    ) -> dict[str, Any]:
        """Return what a stream takes of these.

        Args:
            generator: of the stream.
            reach: how many positions prompt and text have at most.
            heard: called with the number of tokens of each chunk that was read.

        Raises:
            InvalidRequestError: the target's caches cannot be held so.
        """
        from mlx_speculation.engine.drop_in_caches import Caches, checked_quantization
        from mlx_speculation.engine.handling import Handling

        model = generator.model
        caches = Caches.of(model, None, None, self.max_kv_size)
        quantization = checked_quantization(
            model,
            caches,
            reach,
            self.kv_bits,
            self.kv_group_size,
            self.quantized_kv_start,
        )
        handling = Handling(
            prefill_step=self.prefill_step_size, heard=heard, quantization=quantization
        )
        return {"prompt_cache": caches.target, "handling": handling}
