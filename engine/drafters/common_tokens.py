"""Which tokens two tokenizers have in common, and text of one in tokens of the other.

A token is what it adds to a text, in bytes, whatever its tokenizer calls it: the letter
"Ġ" of byte-level tokenizers and "▁" of others are both a space. Special tokens add
nothing; those with the same name are common, and so are the tokens that end a text.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from mlx_speculation.errors import TokenizerMismatchError

# Below this share of the smaller vocabulary a draft would hardly ever be right.
LEAST_SHARE = 0.25


class TokenTexts:
    """What the ids of a tokenizer stand for.

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
        # By id; those of special tokens are empty
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
        """The lowest id of each text that is not empty."""
        found: dict[bytes, int] = {}
        for i in sorted(self.bytes):
            if self.bytes[i]:
                found.setdefault(self.bytes[i], i)
        return found

    @cached_property
    def longest(self) -> int:
        """The bytes of the longest token."""
        return max(map(len, self.ids), default=0)

    @property
    def end(self) -> int | None:
        """The token that ends a text, if there is one."""
        end = getattr(self._tokenizer, "eos_token_id", None)
        return end if isinstance(end, int) else None

    def joined(self, ids: Iterable[int]) -> bytes:
        """Return the text of these ids, special tokens by their names."""
        return b"".join(
            self.special[i].encode() if i in self.special else self.bytes.get(i, b"")
            for i in ids
        )

    def encode(self, text: bytes) -> list[int] | None:
        """Return the tokenizer's own tokens of a text; None where they add another."""
        try:
            ids = list(self._tokenizer.encode(text.decode(), add_special_tokens=False))
        except UnicodeDecodeError:
            return None
        return ids if self.joined(ids) == text else None

    def pieces(self, text: bytes) -> list[int]:
        """Return the longest tokens that make up a text; what has none is left out."""
        found: list[int] = []
        start = 0
        while start < len(text):
            for stop in range(min(len(text), start + self.longest), start, -1):
                if (token := self.ids.get(text[start:stop])) is not None:
                    found.append(token)
                    start = stop
                    break
            else:
                start += 1
        return found

    @property
    def begin(self) -> list[int]:
        """What the tokenizer puts before every text."""
        found = list(self._tokenizer.encode(""))
        return [token for token in found if token != self.end]


class CommonTokens:
    """The tokens that a target and a draft of another family have in common.

    Args:
        target: the target's tokenizer.
        draft: the draft's.

    Attributes:
        pairs: the draft's id of each common id of the target, in the target's order.

    Raises:
        TokenizerMismatchError: they are too few to draft with.
    """

    def __init__(self, target: Any, draft: Any) -> None:
        self.target, self.draft = TokenTexts(target), TokenTexts(draft)
        named = {name: i for i, name in self.draft.special.items()}
        pairs = {
            i: named[name] for i, name in self.target.special.items() if name in named
        }
        mine, own = self.target.end, self.draft.end
        if mine is not None and own is not None:
            pairs = {i: other for i, other in pairs.items() if other != own}
            pairs[mine] = own
        taken = set(pairs.values())
        for text, i in self.target.ids.items():
            other = self.draft.ids.get(text)
            if other is not None and i not in pairs and other not in taken:
                pairs[i] = other
        self.pairs = dict(sorted(pairs.items()))
        self._pieces: dict[int, list[int]] = {}
        self._check()
        # Stands for what the draft has no token for: it has to be fed something.
        self._any = next(iter(self.pairs.values()))

    @property
    def share(self) -> str:
        """How many tokens they have in common, in words."""
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
                f"The tokenizers of target and draft have {self.share}, and "
                f"{LEAST_SHARE:.0%} of the smaller one are needed to draft with. "
                "Choose another draft."
            )

    def whole(self, tokens: Sequence[int]) -> list[int]:
        """Return a text's tokens in those of the draft, with what begins its texts.

        They are what the draft's tokenizer makes of the text, where that adds exactly
        this text; else token for token.
        """
        again = self.draft.encode(self.target.joined(tokens))
        if again is None:
            again = [own for token in tokens for own in self.each(token)]
        begin = self.draft.begin
        return (again if again[: len(begin)] == begin else begin + again) or [self._any]

    def each(self, token: int) -> list[int]:
        """Return a token of the target in tokens of the draft: one where it is common.

        Otherwise its longest pieces, at least one.
        """
        if token in self.pairs:
            return [self.pairs[token]]
        if token not in self._pieces:
            pieces = self.draft.pieces(self.target.joined([token]))
            self._pieces[token] = pieces or [self._any]
        return self._pieces[token]


def _byte_level(name: str) -> bytes:
    """Return the bytes of a byte-level token, each of which is written as a letter."""
    return bytes(_LETTERS[letter] for letter in name if letter in _LETTERS)


def _letters() -> dict[str, int]:
    """Return GPT-2's table: printable bytes are themselves, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


_LETTERS = _letters()


def _plain(name: str) -> bytes:
    """Return the bytes of a token as SentencePiece writes it; `<0x0A>` is one byte."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace("▁", " ").encode()
