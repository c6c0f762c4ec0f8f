"""Token ids of a target, its context length, and the comparison with a draft's ids."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from numpy.typing import NDArray
from transformers import AutoConfig

from mlx_speculation.caches import leaves
from mlx_speculation.errors import TokenizerMismatchError
from mlx_speculation.models.config_json import text_config


@dataclass(frozen=True, slots=True)
class TokenIds:
    """The ids that a tokenizer has; further columns of the logits are padding."""

    width: int  # the largest id, plus one
    # Ids below `width` that the tokenizer lacks, int32 [n], or None
    missing: mx.array | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> "TokenIds":
        """Read the ids from a Hugging Face tokenizer or mlx-lm's wrapper of one."""
        ids = set(tokenizer.get_vocab().values())
        width = max(ids) + 1
        gaps = sorted(set(range(width)) - ids)
        return cls(width, mx.array(gaps, dtype=mx.int32) if gaps else None)

    def usable(self, limit: int) -> NDArray[np.bool_]:
        """Return which ids exist and are below `limit`, bool [width]."""
        usable = np.arange(self.width) < limit
        if self.missing is not None:
            usable[np.array(self.missing)] = False
        return usable


def wrapped(tokenizer: Any) -> Any:
    """Return a tokenizer in mlx-lm's wrapper, which adds stop tokens and streaming."""
    if isinstance(tokenizer, TokenizerWrapper):
        return tokenizer
    return TokenizerWrapper(tokenizer)


def logit_width(model: nn.Module) -> int:
    """Return the number of columns of the model's logits, without computing any."""
    ids = mx.zeros((1, 1), dtype=mx.int32)
    width: int = model(ids, cache=make_prompt_cache(model)).shape[-1]
    return width


# Names of the context length in configs.
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "n_ctx",
    "model_max_length",
)


def context_length(model: nn.Module) -> int | None:
    """Return the number of tokens that the model was made for; None: it is not known.

    If the checkpoint has no number, this is the default of mlx-lm's arguments, or
    `omitted_length` if that is larger. It is None if all layers are recurrent, since
    these have no limit.
    """
    length, omitted = _length_of_args(model), getattr(model, "omitted_length", None)
    return length and max(length, omitted or 0)


def _length_of_args(model: nn.Module) -> int | None:
    args = getattr(model, "args", None)
    inner = getattr(getattr(model, "language_model", None), "args", None)
    for each in (args, getattr(args, "text_config", None), inner):
        named = each if isinstance(each, Mapping) else getattr(each, "__dict__", {})
        fields = getattr(each, "__dataclass_fields__", {})
        for name in _LENGTHS:
            most = named.get(name)
            usual = fields[name].default if name in fields else MISSING
            if not isinstance(most, int) or most <= 0:
                continue
            if most != usual or _holds_keys(model):
                return max(most, _scaled_length(named))
    return None


def omitted_length(config: dict[str, Any]) -> int | None:
    """Return the context length that a `text_config` leaves out; None: it is not known.

    In nested configs transformers leaves out what equals the defaults of its class. The
    defaults of mlx-lm and mlx-vlm are others: for Gemma 3 they have 32768 and 4096
    instead of 131072.
    """
    part = text_config(config)
    named = any(each.get(name) for each in (config, part) for name in _LENGTHS)
    if part is config or named:
        return None
    for kind in filter(None, (part.get("model_type"), config.get("model_type"))):
        with suppress(Exception):  # an unknown kind, or one that refuses its defaults
            made = AutoConfig.for_model(kind).get_text_config()
            length: int | None = made.max_position_embeddings
            return length
    return None


def _holds_keys(model: nn.Module) -> bool:
    """Return whether any layer of the model keeps keys."""
    caches = [leaf for _, leaf in leaves(make_prompt_cache(model))]
    return any(hasattr(leaf, "offset") for leaf in caches)


def _scaled_length(config: Mapping[str, Any]) -> int:
    """Return the context length after scaling rotations, as by YaRN; 0: not scaled."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = config.get(name)
        if isinstance(scaling, Mapping):
            start = scaling.get("original_max_position_embeddings") or 0
            return int(start * (scaling.get("factor") or 1))
    return 0


def check_same_ids(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Check that every id that both tokenizers have means the same token in both.

    Ids that only one of them has are harmless, since a drafter never proposes them.

    Raises:
        TokenizerMismatchError: an id stands for two different tokens, or the
            tokenizers share less than half of the larger one's ids.
    """
    target = {i: token for token, i in target_tokenizer.get_vocab().items()}
    draft = {i: token for token, i in draft_tokenizer.get_vocab().items()}
    shared = target.keys() & draft.keys()
    for token_id in sorted(shared):
        if target[token_id] != draft[token_id]:
            raise TokenizerMismatchError(
                f"Token id {token_id} is {target[token_id]!r} for the target and "
                f"{draft[token_id]!r} for the draft. Choose a draft that was trained "
                "with the target's tokenizer."
            )
    if 2 * len(shared) < max(len(target), len(draft)):
        raise TokenizerMismatchError(
            f"The target has {len(target)} token ids and the draft {len(draft)}, and "
            f"they share {len(shared)}. Choose a draft that was trained with the "
            "target's tokenizer."
        )
