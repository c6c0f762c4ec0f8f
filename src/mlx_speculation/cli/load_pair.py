"""Choice of the BLAS, and loading of the target and draft of a command."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mlx_speculation.blas import BlasName, use_blas
from mlx_speculation.cli.console import Screen
from mlx_speculation.cli.options import PairOptions
from mlx_speculation.environment import versions
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.option_fields import option

if TYPE_CHECKING:
    from mlx_speculation import PrefixCache, SpeculativeGenerator
    from mlx_speculation.engine import Statistics

CACHE_SIZE = "Size of the prefix cache; 0: off. Default: a quarter of free memory."
_REPOSITORY = re.compile(r"[^./~][^/]*/[^/]+")  # organisation/model
NO_REPLAY = "Encode earlier answers again instead of replaying their token ids."


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The prefix cache, in memory and on disk."""

    panel: ClassVar[str] = "Prefix cache"

    cache_gigabytes: float | None = option(None, CACHE_SIZE, min=0.0, max=1e6)
    cache_folder: Path | None = option(
        None, "Folder that keeps the cache for later processes. Default: none."
    )
    cache_disk_gigabytes: float = option(
        20.0, "Limit of all files in --cache-folder together.", min=0.001, max=1e6
    )
    no_replay: bool = option(False, NO_REPLAY)

    def made(self) -> "PrefixCache | None":
        """Return the prefix cache; None: the cache is off."""
        from mlx_speculation import PrefixCache

        size = self.cache_gigabytes
        if size == 0 and self.cache_folder is not None:
            raise InvalidRequestError(
                f"--cache-gigabytes is 0, and --cache-folder is {self.cache_folder}. "
                "Leave one of them out."
            )
        if size == 0:
            return None
        return PrefixCache(
            None if size is None else int(size * 1e9),
            folder=self.cache_folder,
            disk_gigabytes=self.cache_disk_gigabytes,
        )


def short_name(path_or_repo: str) -> str:
    """Return the name of a folder or repository."""
    path = Path(path_or_repo).expanduser()
    if path.exists():
        return path.resolve().name
    return path_or_repo if _REPOSITORY.fullmatch(path_or_repo) else path.name


def begin(blas: BlasName, screen: Screen) -> dict[str, Any]:
    """Choose and print the BLAS, before mlx is imported; return it for JSON."""
    chosen = use_blas(blas)
    screen.say(f"BLAS: {chosen.detail}")
    return {"blas": chosen, "versions": versions()}


def open_pair(
    pair: PairOptions,
    screen: Screen,
    *,
    prefix_cache: "PrefixCache | None" = None,
    replay: bool = True,
    vision: bool | None = None,
) -> "SpeculativeGenerator":
    """Load a target and its draft; see `SpeculativeGenerator.from_pretrained`."""
    from mlx_speculation import SpeculativeGenerator

    if pair.draft == "":
        raise InvalidRequestError(
            "--draft is empty. Give a folder, 'mtp', 'lookup', 'auto' or 'none', or "
            "leave it out."
        )
    if pair.draft is None and pair.draft_length:
        raise InvalidRequestError(
            f"--draft-length is {pair.draft_length}, and --draft is none. Give a "
            "folder, 'mtp', 'lookup' or 'auto', or leave --draft-length out."
        )
    with screen.progress(f"loading {short_name(pair.model)}"):
        generator = SpeculativeGenerator.from_pretrained(
            pair.model,
            prefix_cache=prefix_cache,
            replay=replay,
            vision=vision,
            **pair.for_loading(),
        )
    if pair.draft_vocabulary is not None:
        screen.say(" ".join(generator.notices))
    if prefix_cache is not None:
        screen.say(f"prefix cache: up to {prefix_cache.max_bytes / 1e9:.1f} GB")
    return generator


def beside(
    generator: "SpeculativeGenerator", pair: PairOptions
) -> "SpeculativeGenerator":
    """Return a generator of the same target with the draft of another pair."""
    from mlx_speculation import SpeculativeGenerator
    from mlx_speculation.engine.drafters.resolve import find_draft

    options = pair.for_loading()
    del options["adapter_path"]  # the target is loaded already
    names = ("quantize_draft", "history", "trust_remote_code")
    loading = {name: options.pop(name) for name in names}
    if pair.draft == "lookup":  # the dropped options are for draft models
        loading["quantize_draft"] = None
        options = {"draft_length": pair.draft_length}
    options["draft"] = find_draft(pair.draft, target=pair.model, **loading)
    return SpeculativeGenerator(generator.model, generator.tokenizer, **options)


def as_object(statistics: "Statistics") -> dict[str, Any]:
    """Return statistics and values derived from them, for JSON."""
    every = vars(type(statistics)).items()
    derived = [name for name, value in every if isinstance(value, property)]
    names = [*(field.name for field in fields(statistics)), *derived]
    return {name: getattr(statistics, name) for name in names}
