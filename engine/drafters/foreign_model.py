"""The drafter with a smaller model of another family and with another tokenizer.

The draft model reads the text in its own tokens, and drafts only tokens that the target
has too (token-level intersection, arXiv 2502.05202):

    target    The  Ġquick  Ġfox        known
    draft     The  Ġqu  ick  Ġfox      the same text in the draft's tokens
    drafts    Ġjumps Ġover             tokens of both; not Ġjum, which the target lacks

A target token that is several tokens in the draft's tokenizer is never drafted. The
target verifies the draft as usual, so the text is the target's own.

Two tokens are the same if they add the same bytes to a text: the letter "Ġ" of
byte-level tokenizers and "▁" of others both stand for a space. Special tokens add no
bytes; two special tokens are the same if their names are equal, or if both end a text.
"""

import json
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.engine.drafters.base import (
    Choose,
    DraftChain,
    OpenDrafter,
    Proposal,
)
from mlx_speculation.engine.drafters.draft import (
    DraftOptions,
    TargetInfo,
)
from mlx_speculation.engine.drafters.draft_model import ModelDraft
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import InvalidRequestError, TokenizerMismatchError
from mlx_speculation.models import Lane, load, logit_width
from mlx_speculation.samplers import Choice, Rows

# The least number of common tokens, as a share of the smaller vocabulary. With fewer,
# hardly any draft would be accepted.
LEAST_SHARE = 0.25


class TokenTexts:
    """The bytes of each token id of a tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers, or mlx-lm's wrapper of one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        names = {int(i): name for name, i in tokenizer.get_vocab().items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        whole = {} if backend is None else json.loads(backend.to_str())
        added = {each["id"]: each["content"] for each in whole.get("added_tokens", ())}
        self.special = {
            each["id"]: each["content"]
            for each in whole.get("added_tokens", ())
            if each["special"]
        }
        level = "ByteLevel" in json.dumps(whole.get("decoder"))
        # The bytes of each token id; no bytes for special tokens
        self.bytes: dict[int, bytes] = {}
        for i, name in names.items():
            if i in self.special:
                self.bytes[i] = b""
            elif i in added:
                self.bytes[i] = added[i].encode()
            else:
                self.bytes[i] = _byte_level(name) if level else _plain(name)

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """The lowest token id for each sequence of bytes that is not empty."""
        result: dict[bytes, int] = {}
        for i in sorted(self.bytes):
            if self.bytes[i]:
                result.setdefault(self.bytes[i], i)
        return result

    @cached_property
    def longest(self) -> int:
        """The number of bytes of the longest token."""
        return max(map(len, self.ids), default=0)

    @property
    def end(self) -> int | None:
        """The token that ends a text; None: the tokenizer has no such token."""
        end = getattr(self._tokenizer, "eos_token_id", None)
        return end if isinstance(end, int) else None

    def joined(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of these ids, with special tokens written as their names."""
        return b"".join(
            self.special[i].encode() if i in self.special else self.bytes.get(i, b"")
            for i in ids
        )

    def encode(self, text: bytes) -> list[int] | None:
        """Return the tokenizer's ids for a text; None if these mean other bytes."""
        try:
            ids = list(self._tokenizer.encode(text.decode(), add_special_tokens=False))
        except UnicodeDecodeError:
            return None
        return ids if self.joined(ids) == text else None

    def pieces(self, text: bytes) -> list[int]:
        """Split a text greedily into the longest tokens; leave out unknown bytes."""
        result: list[int] = []
        start = 0
        while start < len(text):
            for stop in range(min(len(text), start + self.longest), start, -1):
                if (token := self.ids.get(text[start:stop])) is not None:
                    result.append(token)
                    start = stop
                    break
            else:
                start += 1
        return result

    @property
    def begin(self) -> list[int]:
        """The tokens that the tokenizer puts before every text."""
        result = list(self._tokenizer.encode(""))
        return [token for token in result if token != self.end]


class CommonTokens:
    """The tokens that a target and a draft of another family have in common.

    Args:
        target: the target's tokenizer.
        draft: the draft's tokenizer.

    Attributes:
        pairs: maps the target's id of each common token, in order, to the draft's id.

    Raises:
        TokenizerMismatchError: there are too few common tokens.
    """

    def __init__(self, target: Any, draft: Any) -> None:
        self.target, self.draft = TokenTexts(target), TokenTexts(draft)
        named = {name: i for i, name in self.draft.special.items()}
        pairs = {
            i: named[name] for i, name in self.target.special.items() if name in named
        }
        mine, theirs = self.target.end, self.draft.end
        if mine is not None and theirs is not None:
            pairs = {i: other for i, other in pairs.items() if other != theirs}
            pairs[mine] = theirs
        taken = set(pairs.values())
        for text, i in self.target.ids.items():
            other = self.draft.ids.get(text)
            if other is not None and i not in pairs and other not in taken:
                pairs[i] = other
        self.pairs = dict(sorted(pairs.items()))
        self._pieces: dict[int, list[int]] = {}
        self._check()
        # Fed to the draft in place of a target token for which it has no tokens
        self._any = next(iter(self.pairs.values()))

    @property
    def share(self) -> str:
        """A description of how many tokens are common."""
        count = len(self.pairs)
        of = [("target", self.target), ("draft", self.draft)]
        said = " and ".join(
            f"{count / len(each.bytes):.0%} of the {name}'s {len(each.bytes)}"
            for name, each in of
        )
        return f"{count} tokens in common, {said}"

    def _check(self) -> None:
        smaller = min(len(self.target.bytes), len(self.draft.bytes))
        if len(self.pairs) < LEAST_SHARE * smaller:
            raise TokenizerMismatchError(
                f"The tokenizers of target and draft have {self.share}; drafting "
                f"needs {LEAST_SHARE:.0%} of the smaller one's. Choose another "
                "draft."
            )

    def whole(self, tokens: SequenceOf[int]) -> list[int]:
        """Return a text in the draft's tokens, preceded by those that begin every text.

        The draft's tokenizer encodes the text. If decoding does not reproduce the text,
        each token is translated separately.
        """
        again = self.draft.encode(self.target.joined(tokens))
        if again is None:
            again = [part for token in tokens for part in self.each(token)]
        begin = self.draft.begin
        return (again if again[: len(begin)] == begin else begin + again) or [self._any]

    def each(self, token: int) -> list[int]:
        """Return the draft's tokens for a target token, at least one.

        A common token becomes one token; any other is split into the longest tokens.
        """
        if token in self.pairs:
            return [self.pairs[token]]
        if token not in self._pieces:
            pieces = self.draft.pieces(self.target.joined([token]))
            self._pieces[token] = pieces or [self._any]
        return self._pieces[token]


def _byte_level(name: str) -> bytes:
    """Return the bytes of a byte-level token, whose letters stand for one byte each."""
    return bytes(_LETTERS[letter] for letter in name if letter in _LETTERS)


def _letters() -> dict[str, int]:
    """Return GPT-2's table from letters to bytes.

    Unprintable bytes have letters from code point 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


_LETTERS = _letters()


def _plain(name: str) -> bytes:
    """Return the bytes of a SentencePiece token; `<0x0A>` is one byte."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace("▁", " ").encode()


class ForeignModelDraft(ModelDraft):
    """A draft model with another tokenizer than the target's.

        draft = ForeignModelDraft.load(folder, target)

    Args:
        model: an mlx-lm model.
        common: the tokens that model and target have in common.
        options: the generator's options; None: the defaults.
    """

    kind = "foreign model"
    foreign = True
    reducible = False

    def __init__(
        self,
        model: nn.Module,
        common: CommonTokens,
        options: DraftOptions | None = None,
    ) -> None:
        super().__init__(model, options)
        self.common = common
        self.notice = (
            f"The draft has another tokenizer than the target: {common.share}."
        )

    @staticmethod
    def fits(config: dict[str, Any]) -> bool:
        """Return False: the user has to ask for a draft with another tokenizer."""
        return False

    @classmethod
    def load(cls, folder: Path, target: TargetInfo) -> "ForeignModelDraft":
        """Load a model; see `FolderDraft`.

        Raises:
            TokenizerMismatchError: the tokenizers have too few tokens in common.
        """
        model, tokenizer = load(folder, trust_remote_code=target.trust_remote_code)
        return cls(model, CommonTokens(target.tokenizer, tokenizer))

    def check(self, target: TargetInfo) -> None:
        """Refuse a draft model whose logits lack a common token."""
        width, highest = logit_width(self.model), max(self.common.draft.bytes)
        if width <= max(self.common.pairs.values()):
            raise InvalidRequestError(
                f"The draft has {width} token ids, but its tokenizer has ids up to "
                f"{highest}. Load it with the tokenizer that it was trained with."
            )

    def configured(self, options: DraftOptions) -> "ForeignModelDraft":
        """Return the model with these options."""
        return ForeignModelDraft(self.model, self.common, options)

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> "ForeignModelDrafter":
        """Return the drafter of one stream.

        Raises:
            InvalidRequestError: `draft_cache` was passed.
        """
        if draft_cache is not None:
            raise InvalidRequestError(
                "draft_cache was passed, and the draft has another tokenizer than the "
                "target. Leave draft_cache out."
            )
        return ForeignModelDrafter(super().open(lane, Sequence([])), self.common)


class ForeignModelDrafter(OpenDrafter):
    """Drafts with a `ModelDrafter` that reads the text in its own tokens."""

    def __init__(self, inner: OpenDrafter, common: CommonTokens) -> None:
        self._inner, self._common = inner, common
        pairs = common.pairs
        self._theirs = mx.array(list(pairs), mx.uint32)  # [n], ids of the target
        self._own_ids = mx.array(
            list(pairs.values()), mx.uint32
        )  # [n], ids of the draft for the same tokens
        self._table = mx.zeros(max(pairs) + 1, mx.uint32)
        self._table[self._theirs] = self._own_ids
        self._text = Sequence([])  # in tokens of the draft
        self._read = 0  # number of the sequence's tokens that `_text` contains

    @property
    def lanes(self) -> list[Lane | None]:
        """None in place of the lane, which holds other tokens than the target's."""
        return [None]

    @property
    def held(self) -> SequenceOf[Any]:
        """The caches, for a count of bytes."""
        return self._inner.held

    def begin(self, sequence: Sequence) -> None:
        """Translate the prompt into the draft's tokens, and let the model read it."""
        self._read = len(sequence.tokens)
        self._text = Sequence(self._common.whole(_seen(sequence)))
        self._inner.begin(self._text)

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Translate new tokens, let the model read them, and draft common tokens."""
        for token in sequence.tokens[self._read :]:
            self._text.tokens += self._common.each(token)
        self._read = len(sequence.tokens)
        chain = DraftChain(choose, sequence)

        def choose_common(
            logits: mx.array, rows: Rows, ids: mx.array | None = None
        ) -> Choice:
            result = chain.add(logits[:, self._own_ids], self._theirs)
            mapped = self._table[mx.minimum(result, len(self._table) - 1)]
            return replace(chain.chosen[-1], tokens=mapped)

        made = self._inner.propose(self._text, limit, choose_common)
        if not chain.chosen:
            return replace(made, source=ForeignModelDraft.kind)
        return Proposal.of(chain.chosen, source=ForeignModelDraft.kind)

    def settle(self, accepted: int) -> None:
        """Keep the accepted tokens that the model was fed."""
        self._inner.settle(accepted)

    def discard(self) -> None:
        """Undo the round."""
        self._inner.discard()


def _seen(sequence: Sequence) -> list[int]:
    """Return the tokens without those that stand for images."""
    result: list[int] = []
    start = 0
    for begin, stop in sequence.images:
        result += sequence.tokens[start:begin]
        start = stop
    return result + sequence.tokens[start:]
