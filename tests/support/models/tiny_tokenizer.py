"""Real byte-level tokenizers: of all 256 bytes, or of a few letters."""

import random
from collections.abc import Sequence

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(extra: tuple[str, ...] = (), first: str = "") -> TokenizerWrapper:
    """Make a tokenizer with ids 0 to 255, and one more for each of `extra`.

    `first` is the token that gets id 0, if not the smallest one.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabet.sort(key=lambda token: token != first)
    return _tokenizer([*alphabet, *extra])


def letter_tokenizer(count: int) -> TokenizerWrapper:
    """Make a tokenizer with ids 0 to `count - 1`, one for each letter from A on."""
    return _tokenizer([chr(ord("A") + i) for i in range(count)])


def merging_tokenizer(seed: int, merges: int, letters: int = 256) -> TokenizerWrapper:
    """Make a tokenizer of some bytes and random pairs, its ids in random order."""
    draw = random.Random(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:letters]
    tokens, pairs = list(alphabet), []
    for _ in range(merges):
        pair = (draw.choice(tokens[-40:]), draw.choice(alphabet[:40]))
        if "".join(pair) not in tokens:
            tokens.append("".join(pair))
            pairs.append(pair)
    draw.shuffle(tokens)
    return _tokenizer(tokens, pairs)


def _tokenizer(
    tokens: list[str], merges: Sequence[tuple[str, str]] = ()
) -> TokenizerWrapper:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[*merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)
