"""Options of the key-value caches, as mlx-lm names them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_speculation.cli.inputs import check_input
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.option_fields import KvLimits, option

if TYPE_CHECKING:
    from mlx_speculation import SpeculativeGenerator
    from mlx_speculation.caches import LoadedCaches
    from mlx_speculation.engine.options import StreamKeywords


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions(KvLimits):
    """Options of the prefill and of the caches."""

    prefill_step_size: int | None = option(
        None, "Prompt tokens per prefill chunk. Default: 2048, and 256 on a CPU.", min=1
    )
    prompt_cache_file: Path | None = option(
        None,
        "Continue from this file of mlx_lm.cache_prompt or save_caches; the file is "
        "not changed.",
    )

    def check(self) -> None:
        """Refuse an unusable --prompt-cache-file."""
        file = self.prompt_cache_file
        if file is None:
            return
        check_input("--prompt-cache-file", file)
        if self.max_kv_size is not None:
            raise InvalidRequestError(
                f"--max-kv-size is {self.max_kv_size}, but the caches come from "
                f"--prompt-cache-file {str(file)!r}. Limit them when you make it."
            )

    def before(
        self, model: str, generator: "SpeculativeGenerator"
    ) -> "LoadedCaches | None":
        """Return the caches of --prompt-cache-file; None: the option is unset.

        Errors are those of `load_prompt`. A file for another target raises
        InvalidRequestError.
        """
        if self.prompt_cache_file is None:
            return None
        from mlx_speculation.engine.mlx_lm_compat.prompt_file import load_prompt

        loaded = load_prompt(self.prompt_cache_file, generator.model)
        made_for = loaded.metadata.get("model", model)
        if made_for != model and Path(made_for).resolve() != Path(model).resolve():
            raise InvalidRequestError(
                f"--prompt-cache-file was made for the model {made_for!r}, but the "
                f"target is {model!r}. Make the file again for this target."
            )
        return loaded

    @staticmethod
    def held(loaded: "LoadedCaches | None") -> int:
        """Return how many tokens the caches of a file hold."""
        from mlx_speculation.caches import position

        return 0 if loaded is None else position(loaded.caches) or 0

    def for_stream(
        self,
        generator: "SpeculativeGenerator",
        loaded: "LoadedCaches | None",
        reach: int,
        prefill_progress: Callable[[int], None],
    ) -> "StreamKeywords":
        """Return the keywords of a stream that adds at most `reach` positions."""
        from mlx_speculation.engine.mlx_lm_compat.prompt_cache import limited

        prompt_caches = None if loaded is None else loaded.caches
        caches, quantization = limited(
            generator.model, reach, prompt_caches, **self.limits()
        )
        known = None if loaded is None or loaded.rows is None else loaded.tokens
        return {
            "prompt_cache": caches.target,
            "cached_tokens": known,
            "prefill_step_size": self.prefill_step_size,
            "prompt_progress": prefill_progress,
            "kv_quantization": quantization,
        }
