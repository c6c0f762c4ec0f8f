"""The tokenizer that all demo models share.

Byte-level BPE without a prefix space and without a BOS token, so that every text is
encoded as it stands and decoded exactly. 2,048 entries: the draft model's tied output
matrix is most of what a drafting step reads, and shorter tokens are easier to agree on.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 2048
END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
END_ID = 0
PAD_ID = 1
# A newline takes the indentation after it: one token starts most lines of code.
PIECES = r"\n[ ]*| ?_*\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?=\S)|[^\S\n]+"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learns the merges from the training split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """The two files that `transformers` reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "pad_token": PADDING,
        "model_max_length": 4096,
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
