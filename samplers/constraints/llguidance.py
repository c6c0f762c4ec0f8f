"""JSON schemas, regular expressions and grammars as constraints, by llguidance.

The extra `grammar` installs llguidance. A grammar sees only the text of the tokens, not
their ids, so any split of a text into tokens is allowed. The masks of this module never
allow an end-of-text id: the caller allows such an id where `may_end` is True.
"""

import json
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from numpy.typing import NDArray
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from mlx_speculation.errors import (
    ConstraintError,
    InvalidRequestError,
    MissingLibraryError,
)
from mlx_speculation.json_files import JsonFlawError, parse_json
from mlx_speculation.shell_commands import install_command

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

END = "<|end of constrained text|>"
COMPACT = {"whitespace_flexible": False}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary of a tokenizer in llguidance's form."""

    tokens: "LLTokenizer"  # all tokens, and an added token for the end of a text
    end: int  # the id of the added token, which is the largest id


@dataclass(frozen=True, slots=True)
class PortableVocabulary:
    """A `Vocabulary` as text, for another process."""

    text: str  # a `tokenizer.json` with the added token for the end of a text
    end: int  # as in `Vocabulary`


# Vocabularies by tokenizer, kept because reading one takes up to a second. A tokenizer
# is read again if tokens were added to it.
_READ: WeakKeyDictionary[PreTrainedTokenizerFast, Vocabulary] = WeakKeyDictionary()


class Grammar:
    """A grammar over the text of one tokenizer; a `Constraint`.

    Args:
        text: the grammar, in llguidance's own form.
        tokenizer: a fast tokenizer of transformers, or mlx-lm's wrapper of one.
        kind: the word for the grammar in errors, such as "JSON schema".
        given: the grammar as the caller wrote it, for errors; None: `text`.

    Raises:
        InvalidRequestError: the grammar or the tokenizer cannot be used.
        MissingLibraryError: llguidance is not installed.
    """

    def __init__(
        self,
        text: str,
        tokenizer: Any,
        *,
        kind: str = "grammar",
        given: str | None = None,
    ) -> None:
        library = _library()
        self._vocabulary = _vocabulary(tokenizer)
        limits = library.LLParserLimits(verbose_errors=False)
        self._matcher = library.LLMatcher(
            self._vocabulary.tokens, text, log_level=0, limits=limits
        )
        if self._matcher.is_error():
            raise unusable(self._matcher.get_error(), given or text, kind)
        if warnings := self._matcher.get_grammar_warnings():
            raise not_enforced("; ".join(warnings), kind)

    def begin(self) -> "GrammarState":
        """Return a state before the first generated token."""
        return GrammarState(self._matcher.deep_copy(), self._vocabulary.end)


class GrammarState:
    """A place in the text of a `Grammar`; see `ConstraintState`."""

    def __init__(self, matcher: "LLMatcher", end: int) -> None:
        self._matcher, self._end = matcher, end

    def allowed(self) -> NDArray[np.bool_]:
        """Return which token ids may come next, bool [ids of the tokenizer].

        Raises:
            ConstraintError: the grammar is too complex for a limit of llguidance.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():  # the mask then allows only the end
            raise failed_here(self._matcher.get_error())
        # [ids], without the added token for the end
        return np.unpackbits(bits, count=self._end, bitorder="little").view(np.bool_)

    @property
    def may_end(self) -> bool:
        """Return whether the text may end here."""
        return self._matcher.is_accepting()

    def advance(self, token: int) -> None:
        """Append a token to the text."""
        if not 0 <= token < self._end:
            raise ConstraintError(
                f"Token {token} is not allowed here: the tokenizer's ids go from 0 to "
                f"{self._end - 1}. Take one that allowed() names."
            )
        moved = self._matcher.deep_copy()  # a matcher that fails is unusable afterwards
        if not moved.consume_token(token):
            raise ConstraintError(
                f"Token {token} is not allowed here: {_plain(moved.get_error())}. "
                "Take one that allowed() names."
            )
        self._matcher = moved

    def fork(self) -> "GrammarState":
        """Return a state at the same place of the text."""
        # Both share the matcher: `advance` replaces it and never changes it.
        return GrammarState(self._matcher, self._end)


def json_schema(
    schema: Mapping[str, Any] | bool | str, tokenizer: Any, *, compact: bool = False
) -> Grammar:
    """Allow the JSON texts that fit a schema.

        json_schema({"type": "object", "properties": {"age": {"type": "integer"}},
                     "required": ["age"], "additionalProperties": False}, tokenizer)

    Properties have the order of the schema. No whitespace is allowed before or after
    the text. A keyword that llguidance would not enforce is refused.

    Args:
        schema: a JSON schema, as a mapping, True for any JSON, or as text.
        tokenizer: a fast tokenizer of transformers, or mlx-lm's wrapper of one.
        compact: allow no whitespace outside of strings. Otherwise a small model can
            write whitespace without end.

    Raises:
        InvalidRequestError: the schema or the tokenizer cannot be used.
        MissingLibraryError: llguidance is not installed.
    """
    library = _library()
    try:
        plain = parse_json(schema) if isinstance(schema, str) else schema
        text = json.dumps(plain if isinstance(plain, bool) else dict(plain))
    except JsonFlawError as error:
        raise InvalidRequestError(
            f"The schema {error}. It is: {_shortened(repr(schema))}"
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"The schema is not JSON: {error}. It is: {_shortened(repr(schema))}"
        ) from error
    grammar = library.LLMatcher.grammar_from_json_schema(
        text, overrides=COMPACT if compact else None
    )
    return Grammar(grammar, tokenizer, kind="JSON schema", given=text)


def regex(pattern: str, tokenizer: Any) -> Grammar:
    r"""Allow the texts that match a regular expression as a whole.

        regex(r"(yes|no)( [0-9]{1,3})?", tokenizer)

    The pattern has the syntax of Rust's regex crate, without anchors and look-around.
    The tokenizer and the errors are as in `json_schema`.
    """
    grammar = _library().LLMatcher.grammar_from_regex(pattern)
    return Grammar(grammar, tokenizer, kind="regular expression", given=pattern)


def lark(grammar: str, tokenizer: Any) -> Grammar:
    r"""Allow the texts of a context-free grammar; its rule `start` is the whole text.

        lark('start: "(" start ")" | /[0-9]+/', tokenizer)

    The grammar is in llguidance's variant of the Lark syntax. The tokenizer and the
    errors are as in `json_schema`.
    """
    text = _library().LLMatcher.grammar_from_lark(grammar)
    return Grammar(text, tokenizer, given=grammar)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingLibraryError(
            "Grammars need llguidance, which is not installed. Install it with: "
            f"{install_command('grammar')}"
        ) from error
    return llguidance


def _vocabulary(tokenizer: Any) -> Vocabulary:
    fast = _fast(tokenizer)
    known = _READ.get(fast)
    if known is None or known.end != fast.backend_tokenizer.get_vocab_size():
        known = _READ[fast] = _read(fast)
    return known


def _fast(tokenizer: Any) -> PreTrainedTokenizerFast:
    fast = tokenizer
    if isinstance(tokenizer, TokenizerWrapper):
        fast = tokenizer._tokenizer
    if not isinstance(fast, PreTrainedTokenizerFast):
        raise InvalidRequestError(
            f"The tokenizer is a {type(fast).__name__}, and a fast one of transformers "
            "(PreTrainedTokenizerFast) is needed for grammars."
        )
    return fast


def _read(fast: PreTrainedTokenizerFast) -> Vocabulary:
    library, portable = _library(), portable_vocabulary(fast)
    try:
        tokens = library.LLTokenizer(portable.text, eos_token=portable.end)
    except ValueError as error:
        raise unreadable_tokenizer(str(error)) from error
    return Vocabulary(tokens, portable.end)


def portable_vocabulary(tokenizer: Any) -> PortableVocabulary:
    """Return a tokenizer's vocabulary in a form that any process can read.

    The tokenizer and the errors are as in `Grammar`.
    """
    _library()
    backend = copy(_fast(tokenizer).backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    ids = set(backend.get_vocab(with_added_tokens=True).values())
    # A new token for the end: the tokenizer can lack one, and end-of-text ids differ
    # between requests.
    backend.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    end = backend.token_to_id(END)
    assert end is not None
    if ids != set(range(end)):
        raise InvalidRequestError(
            f"The tokenizer has {len(ids)} ids and the largest is {max(ids)}. Grammars "
            "need ids without gaps from 0 on."
        )
    return PortableVocabulary(backend.to_str(), end)


def unusable(reason: str, grammar: str, kind: str = "grammar") -> InvalidRequestError:
    """Return the error for a grammar that llguidance refuses for `reason`."""
    return InvalidRequestError(
        f"The {kind} cannot be used: {_plain(reason)}. It is: {_shortened(grammar)}"
    )


def not_enforced(warnings: str, kind: str = "grammar") -> InvalidRequestError:
    """Return the error for a grammar that llguidance would enforce only in part."""
    return InvalidRequestError(
        f"A part of the {kind} would not be enforced: {warnings}. Leave that part out, "
        "and check the text afterwards."
    )


def failed_here(reason: str) -> ConstraintError:
    """Return the error for a grammar that has hit a limit of llguidance."""
    return ConstraintError(f"The grammar failed here: {_plain(reason)}. Simplify it.")


def unreadable_tokenizer(reason: str) -> InvalidRequestError:
    """Return the error for a tokenizer that llguidance refuses."""
    return InvalidRequestError(
        f"llguidance cannot read the tokenizer: {reason}. Use one whose decoder is "
        "byte-level or has a byte fallback."
    )


def _plain(reason: str) -> str:
    """Return a message of llguidance without its remark about verbosity."""
    return reason.removesuffix("<non-verbose/>").strip()


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
