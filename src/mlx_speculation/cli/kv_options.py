"""Options of the key-value caches, as mlx-lm names them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mlx_speculation.cli.inputs import check_input
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.option_fields import option

if TYPE_CHECKING:
    from mlx_speculation import SpeculativeGenerator
    from mlx_speculation.caches import LoadedCaches


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    """How the prompt is read, and how much of it is kept."""

    panel: ClassVar[str] = "Key-value caches, as mlx-lm names it"

    max_kv_size: int | None = option(
        None, "Maximum number of positions in the target's caches.", min=1
    )
    kv_bits: int | None = option(
        None, "Quantize the target's KV caches to this many bits.", min=1
    )
    kv_group_size: int = option(64, "Group size of the quantized KV caches.", min=1)
    quantized_kv_start: int = option(
        5000, "Quantize the KV caches from this position on.", min=0
    )
    prefill_step_size: int = option(2048, "Prompt tokens per prefill chunk.", min=1)
    prompt_cache_file: Path | None = option(
        None,
        "Continue from this file of mlx_lm.cache_prompt or save_caches; the file is "
        "not changed.",
    )

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
