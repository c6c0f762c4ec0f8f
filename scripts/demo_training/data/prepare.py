"""From the corpus to token files: everything that needs no accelerator."""

import json
import platform
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo_training.data.corpus import Text, collect
from demo_training.data.pairs import make_pairs
from demo_training.data.prompts import make_prompts
from demo_training.data.vocabulary import END_ID, train_tokenizer, write_tokenizer

SEED = 20261121
TRAIN_PAIRS = 10_000
HELD_OUT_PAIRS = 150
PROSE = {"topic", "docstring"}
# Topics are few and well written; they are read three times per pass.
REPEATS = {"topic": 3}

Tokens = NDArray[np.uint16]


def prepare(work: Path, demo: Path) -> None:
    """Writes `tokens.npz` to `work`; the tokenizer, prompts and lists to `demo`.

    Args:
        work: A folder for what only training needs.
        demo: The package's demo folder.
    """
    texts = collect()
    tokenizer = train_tokenizer(t.body for t in texts if t.split == "train")
    arrays = write_tokens(texts, tokenizer, work)
    demo.mkdir(parents=True, exist_ok=True)
    write_tokenizer(tokenizer, work)
    write_json(demo / "prompts.json", make_prompts(texts, tokenizer, SEED))
    write_json(demo / "corpus.json", listing(texts, arrays))


def prepare_again(work: Path, tokenizer: Path) -> None:
    """Writes `tokens.npz` to `work` for models whose tokenizer exists.

    The same Python gives the same tokens; another one's library differs in some files,
    and the split, which hangs on their names, is the same.

    Args:
        work: A folder for what only training needs.
        tokenizer: The file `tokenizer.json`.
    """
    write_tokens(collect(), Tokenizer.from_file(str(tokenizer)), work)


def write_tokens(
    texts: list[Text], tokenizer: Tokenizer, work: Path
) -> dict[str, Tokens]:
    """Writes the tokens, and the held-out texts' sizes; returns the tokens."""
    train = [text for text in texts if text.split == "train"]
    held = [text for text in texts if text.split == "held-out"]
    groups = {
        "code": [text.body for text in held if text.kind == "library"],
        "prose": [text.body for text in held if text.kind in PROSE],
        "edit": make_pairs(held, HELD_OUT_PAIRS, SEED + 1),
    }
    bodies = [text.body for text in train for _ in range(REPEATS.get(text.kind, 1))]
    arrays = {
        "text": encode(tokenizer, bodies),
        "pairs": encode(tokenizer, make_pairs(train, TRAIN_PAIRS, SEED)),
    }
    for group, members in groups.items():
        arrays[f"held_{group}"] = encode(tokenizer, members)
    sizes = {group: sum(len(m.encode()) for m in groups[group]) for group in groups}
    work.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(work / "tokens.npz", allow_pickle=False, **arrays)
    write_json(work / "held_out_bytes.json", sizes)
    return arrays


def encode(tokenizer: Tokenizer, bodies: list[str]) -> Tokens:
    """All texts in one row, each followed by the end-of-text token."""
    rows = [[*encoding.ids, END_ID] for encoding in tokenizer.encode_batch(bodies)]
    return np.concatenate([np.array(row, dtype=np.uint16) for row in rows])


def listing(texts: list[Text], arrays: dict[str, Tokens]) -> dict[str, object]:
    """What `corpus.json` records."""
    return {
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "licence": "PSF-2.0 (files with another licence notice were left out)",
        "seed": SEED,
        "tokens": {name: int(array.size) for name, array in arrays.items()},
        "texts": [
            {
                "name": text.name,
                "kind": text.kind,
                "split": text.split,
                "bytes": len(text.body.encode()),
                "sha256": text.sha256,
            }
            for text in texts
        ],
    }


def write_json(path: Path, content: object) -> None:
    """Indented, with a newline at the end."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
