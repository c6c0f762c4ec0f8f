"""Real tokenizers: byte-level ones, and small ones with other decoders."""

import random
from collections.abc import Sequence

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(extra: tuple[str, ...] = (), first: str = "") -> TokenizerWrapper:
    """Make a tokenizer of bytes and the tokens `extra`; the byte `first` gets id 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabet.sort(key=lambda token: token != first)
    return _tokenizer([*alphabet, *extra])


def letter_tokenizer(count: int) -> TokenizerWrapper:
    """Make a tokenizer with ids 0 to `count - 1`, one for each letter from A on."""
    return _tokenizer([chr(ord("A") + i) for i in range(count)])


def merging_tokenizer(seed: int, merges: int, letters: int = 256) -> TokenizerWrapper:
    """Make a tokenizer of bytes and random merges of them, with ids in random order."""
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


PIECES = (
    "▁",
    "▁▁",
    "▁a",
    "a",
    "b",
    "▁Paris",
    ".",
    "▁.",
    "'s",
    "▁n",
    "'",
    "t",
    "é",
    "\n",
)
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def sentencepiece_tokenizer(*, strips: bool = True) -> TokenizerWrapper:
    """Make a tokenizer of `PIECES` and bytes, with the decoder of Llama or of Gemma.

    Ids 0 to 255 are the bytes. Llama's decoder `strips` the first space of a text.
    """
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    ends = [decoders.Strip(" ", 1, 0)] if strips else []
    vocabulary = {token: i for i, token in enumerate((*BYTES, *PIECES))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([*steps, *ends])
    return TokenizerWrapper(_fast(tokenizer), SPMStreamingDetokenizer)


def metaspace_tokenizer(scheme: str, *, cleans: bool = False) -> TokenizerWrapper:
    """Make a tokenizer of `PIECES` with T5's decoder.

    With `cleans`, decoding removes spaces before punctuation.
    """
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in PIECES], 0))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return TokenizerWrapper(_fast(tokenizer, cleans=cleans))


def wordpiece_tokenizer(*, cleans: bool = False) -> TokenizerWrapper:
    """Make a tokenizer of words and word endings, as in BERT."""
    words = ("a", "##a", "##b", "paris", ".", ",", "'", "n", "##n", "t", "s", "[UNK]")
    vocabulary = {token: i for i, token in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=cleans)
    return TokenizerWrapper(_fast(tokenizer, cleans=cleans))


def suffix_tokenizer() -> TokenizerWrapper:
    """Make a tokenizer whose words end with a marker, as in the first GPT."""
    vocabulary = {t: i for i, t in enumerate(("a", "a</w>", "b", "b</w>", ".</w>"))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.BPEDecoder()
    return TokenizerWrapper(_fast(tokenizer))


def _fast(tokenizer: Tokenizer, *, cleans: bool = False) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=cleans
    )


def _tokenizer(
    tokens: list[str], merges: Sequence[tuple[str, str]] = ()
) -> TokenizerWrapper:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[*merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizerWrapper(_fast(tokenizer), BPEStreamingDetokenizer)
