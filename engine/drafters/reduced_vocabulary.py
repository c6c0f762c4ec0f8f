"""Reduced draft vocabularies: drafting only from the token ids that texts contain.

With a large vocabulary, the output layer is most of the cost of a small drafter. But
texts of one kind use few of the ids: FR-Spec (arXiv 2502.14856) keeps most of the
acceptance with a quarter of the vocabulary. The target still chooses from all ids, so
the text does not change; an id that is left out is never drafted.
"""

import operator
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Literal

from mlx_speculation.engine.argument_checks import checked_count
from mlx_speculation.errors import InvalidRequestError

# Token ids of the target; "intersection": the ids of those tokens that another
# tokenizer, the draft's, has too.
DraftVocabulary = Iterable[int] | Literal["intersection"]


def reduced_vocabulary(
    texts: str | Iterable[str] | Iterable[int], size: int, *, tokenizer: Any = None
) -> list[int]:
    """Return the `size` most frequent token ids (all if fewer occur), sorted by id.

        ids = reduced_vocabulary(my_texts, 8192, tokenizer=tokenizer)
        SpeculativeGenerator(model, tokenizer, draft=small, draft_vocabulary=ids)

    Of equally frequent ids the lower ones are taken. The tokenizer's end tokens are
    always included, since otherwise no draft would ever end a text.

    Args:
        texts: a text, several texts, or token ids; the ids in them are counted.
        size: the largest number of ids to return, at least 1.
        tokenizer: encodes the texts; None: `texts` are token ids.

    Raises:
        InvalidRequestError: texts without a tokenizer, no ids, or a size below 1.
    """
    checked_count("size", size, 1)
    counts = Counter(_ids_of(texts, tokenizer))
    if not counts:
        raise InvalidRequestError(
            "The texts hold 0 tokens, so there is nothing to count. Pass texts of the "
            "kind that will be generated."
        )
    named = getattr(tokenizer, "eos_token_ids", None) or ()
    ends = {int(token) for token in named if token is not None}
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    kept = [token for token in ranked if token not in ends][: max(size - len(ends), 0)]
    return sorted([*kept, *sorted(ends)[:size]])


def _ids_of(texts: Any, tokenizer: Any) -> Iterable[int]:
    """Yield the token ids of encoded texts, or the ids that were passed."""
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
            f"The ids hold {token!r}, which is not a whole number. Pass token ids, or "
            "texts with the target's tokenizer."
        ) from error


def checked_vocabulary(ids: Any, width: int) -> list[int]:
    """Return the ids of a reduced vocabulary, in ascending order.

    Raises:
        InvalidRequestError: there are no ids, or one is out of range or repeated.
    """
    result = sorted(_checked_id(token) for token in ids)
    if not result or result[0] < 0 or result[-1] >= width:
        said = "0 ids, but needs at least 1"
        if result:
            said = f"ids from {result[0]} to {result[-1]}"
        raise InvalidRequestError(
            f"draft_vocabulary has {said}; each id must be from 0 to {width - 1}. Make "
            "one with reduced_vocabulary(...) and the target's tokenizer."
        )
    if len(set(result)) < len(result):
        twice = next(a for a, b in pairwise(result) if a == b)
        raise InvalidRequestError(
            f"draft_vocabulary has the id {twice} twice. Pass different ids."
        )
    return result
