"""Reduced draft vocabularies: drafting from the token ids that texts really use.

Making logits of every id is most of what a small drafter costs, where the vocabulary
is large. Texts of one kind use a small part of it: FR-Spec (2502.14856) finds most of
the acceptance with a quarter of the ids. The target still chooses from all of them, so
the text stays what it is; an id that is left out is never drafted.
"""

import operator
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Literal

from mlx_speculation.engine.argument_checks import checked_count
from mlx_speculation.errors import InvalidRequestError

# Token ids of the target, or those that a draft with another tokenizer has too.
DraftVocabulary = Iterable[int] | Literal["intersection"]


def reduced_vocabulary(
    texts: str | Iterable[str] | Iterable[int], size: int, *, tokenizer: Any = None
) -> list[int]:
    """Return the token ids that come most often, in order; fewer where fewer come.

        ids = reduced_vocabulary(my_texts, 8192, tokenizer=tokenizer)
        SpeculativeGenerator(model, tokenizer, draft=small, draft_vocabulary=ids)

    Of ids that come equally often the lower ones are taken. With a tokenizer its end
    tokens are always among them, or no draft would ever end a text.

    Args:
        texts: what is counted over: a text or texts, or token ids.
        size: how many ids to return at most, from 1.
        tokenizer: encodes the texts; for token ids it may be left out.

    Raises:
        InvalidRequestError: texts without a tokenizer, no ids, or a size below 1.
    """
    checked_count("size", size, 1)
    counts = Counter(_ids_of(texts, tokenizer))
    if not counts:
        raise InvalidRequestError(
            "The texts hold 0 tokens, and at least 1 is needed to count. Pass texts of "
            "the kind that will be generated."
        )
    named = getattr(tokenizer, "eos_token_ids", None) or ()
    ends = {int(token) for token in named if token is not None}
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    kept = [token for token in ranked if token not in ends][: max(size - len(ends), 0)]
    return sorted([*kept, *sorted(ends)[:size]])


def _ids_of(texts: Any, tokenizer: Any) -> Iterable[int]:
    """Yield the token ids of texts, or ids as they are."""
    for one in [texts] if isinstance(texts, str) else texts:
        if not isinstance(one, str):
            yield _checked_id(one)
        elif tokenizer is None:
            raise InvalidRequestError(
                "A text was passed and tokenizer is None. Pass the target's tokenizer, "
                "or token ids."
            )
        else:
            yield from tokenizer.encode(one, add_special_tokens=False)


def _checked_id(token: Any) -> int:
    try:
        return operator.index(token)
    except TypeError as error:
        raise InvalidRequestError(
            f"The ids hold {token!r}, and whole numbers are needed. Pass token ids, or "
            "texts with the target's tokenizer."
        ) from error


def checked_vocabulary(ids: Any, width: int) -> list[int]:
    """Return the ids of a reduced vocabulary, in order.

    Raises:
        InvalidRequestError: there are none, one is out of range, or comes twice.
    """
    result = sorted(_checked_id(token) for token in ids)
    if not result or result[0] < 0 or result[-1] >= width:
        said = f"{result[0]} to {result[-1]}" if result else "0 ids"
        raise InvalidRequestError(
            f"draft_vocabulary has {said}, and ids from 0 to {width - 1} are needed. "
            "Make one with reduced_vocabulary(...) and the target's tokenizer."
        )
    if len(set(result)) < len(result):
        twice = next(a for a, b in pairwise(result) if a == b)
        raise InvalidRequestError(
            f"draft_vocabulary has the id {twice} twice. Pass different ids."
        )
    return result
