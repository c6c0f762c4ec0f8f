"""Choosing the BLAS and loading what a command runs on."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_speculation.blas import BlasChoice, BlasName, use_blas
from mlx_speculation.cli.console import Screen
from mlx_speculation.cli.options import PairOptions
from mlx_speculation.errors import InvalidRequestError

if TYPE_CHECKING:
    from mlx_speculation import PrefixCache, SpeculativeGenerator
    from mlx_speculation.engine import Statistics

ADAPTER, TRUST = "adapter_path", "trust_remote_code"
LOADING = ("quantize_draft", "history")
DERIVED = (
    "acceptance_rate",
    "mean_accepted_length",
    "accepted_per_position",
    "tokens_per_round",
    "tokens_per_second",
)


def begin(blas: BlasName, screen: Screen) -> BlasChoice:
    """Choose the BLAS, before mlx is imported, and say which it is."""
    chosen = use_blas(blas)
    screen.say(f"BLAS: {chosen.detail}")
    return chosen


def open_pair(
    pair: PairOptions,
    screen: Screen,
    *,
    prefix_cache: "PrefixCache | None" = None,
    vision: bool | None = None,
) -> "SpeculativeGenerator":
    """Load a target and its draft.

    Args:
        pair: the options.
        screen: says that it takes a while.
        prefix_cache: of the generator.
        vision: see `SpeculativeGenerator.from_pretrained`.
    """
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
    with screen.busy(f"loading {Path(pair.model).name}"):
        generator = SpeculativeGenerator.from_pretrained(
            pair.model, prefix_cache=prefix_cache, vision=vision, **pair.for_loading()
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
    loading = {name: options.pop(name) for name in (*LOADING, ADAPTER, TRUST)}
    del loading[ADAPTER]  # the target has it
    if pair.draft == "lookup":  # no model, which the others are about
        loading["quantize_draft"] = None
        options = {"draft_length": pair.draft_length}
    options["draft"] = find_draft(pair.draft, target=pair.model, **loading)
    return SpeculativeGenerator(generator.model, generator.tokenizer, **options)


def prefix_cache(gigabytes: float | None) -> "PrefixCache | None":
    """Return a prefix cache of this size; None of 0, and the usual one of None."""
    from mlx_speculation import PrefixCache

    if gigabytes == 0:
        return None
    return PrefixCache(None if gigabytes is None else int(gigabytes * 1e9))


def as_object(statistics: "Statistics") -> dict[str, Any]:
    """Return statistics with what follows from them, for JSON."""
    own = {field.name: getattr(statistics, field.name) for field in fields(statistics)}
    return {**own, **{name: getattr(statistics, name) for name in DERIVED}}
