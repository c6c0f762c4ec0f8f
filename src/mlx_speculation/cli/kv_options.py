"""Options of the key-value caches, as mlx-lm names them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_speculation.cli.inputs import check_input
from mlx_speculation.errors import InvalidRequestError

if TYPE_CHECKING:
    from mlx_speculation import SpeculativeGenerator
    from mlx_speculation.caches import LoadedCaches

KV = "Key-value caches, as mlx-lm names it"


def _option(help: str, low: int) -> Any:
    return typer.Option(min=low, rich_help_panel=KV, help=help)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    """How the prompt is read, and how much of it is kept."""

    max_kv_size: Annotated[
        int | None, _option("Maximum number of positions in the target's caches.", 1)
    ] = None
    kv_bits: Annotated[
        int | None, _option("Quantize the target's KV caches to this many bits.", 1)
    ] = None
    kv_group_size: Annotated[
        int, _option("Group size of the quantized KV caches.", 1)
    ] = 64
    quantized_kv_start: Annotated[
        int, _option("Quantize the KV caches from this position on.", 0)
    ] = 5000
    prefill_step_size: Annotated[
        int, _option("Prompt tokens per prefill chunk.", 1)
    ] = 2048
    prompt_cache_file: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=KV,
            help="Continue from this file of mlx_lm.cache_prompt or save_caches; the "
            "file is not changed.",
        ),
    ] = None

    def check(self) -> None:
        """Refuse a file that nobody could use, before anything is loaded."""
        file = self.prompt_cache_file
        if file is None:
            return
        check_input("--prompt-cache-file", file)
        if self.max_kv_size is not None:
            raise InvalidRequestError(
                f"--max-kv-size is {self.max_kv_size}, and the caches come from "
                f"--prompt-cache-file {str(file)!r}. Limit them where it is made."
            )

    def before(
        self, model: str, generator: "SpeculativeGenerator"
    ) -> "LoadedCaches | None":
        """Return what was read before the prompt; None: nothing.

        Raises:
            CacheFileError: the file is damaged, or does not fit the target.
            InvalidRequestError: it was made for another target.
        """
        if self.prompt_cache_file is None:
            return None
        from mlx_speculation.engine.mlx_lm_compat.prompt_file import load_prompt

        loaded = load_prompt(self.prompt_cache_file, generator.model)
        made_for = loaded.metadata.get("model", model)
        if made_for != model and Path(made_for).resolve() != Path(model).resolve():
            raise InvalidRequestError(
                f"--prompt-cache-file was made for the model {made_for!r}, and the "
                f"target is {model!r}. Make it again for this one."
            )
        return loaded

    def for_stream(
        self,
        generator: "SpeculativeGenerator",
        loaded: "LoadedCaches | None",
        reach: int,
        prefill_progress: Callable[[int], None],
    ) -> dict[str, Any]:
        """Return what a stream takes of these, of at most `reach` positions."""
        from mlx_speculation.engine.mlx_lm_compat.prompt_cache import (
            Caches,
            checked_quantization,
        )

        model = generator.model
        held = None if loaded is None else loaded.caches
        caches = Caches.of(model, (), held, self.max_kv_size)
        quantization = checked_quantization(
            model,
            caches,
            caches.held + reach,
            self.kv_bits,
            self.kv_group_size,
            self.quantized_kv_start,
        )
        known = None if loaded is None or loaded.rows is None else loaded.tokens
        return {
            "prompt_cache": caches.target,
            "cached_tokens": known,
            "prefill_step_size": self.prefill_step_size,
            "prompt_progress": prefill_progress,
            "kv_quantization": quantization,
        }
