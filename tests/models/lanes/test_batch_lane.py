"""Rows of a batch with ragged acceptance equal each row decoded alone.

Every row is prefilled alone, and all rows are merged. Each round verifies random drafts
of all rows in one forward, and commits a number of tokens for each row. A row that is
done leaves the batch by `filter`. Families whose sums depend on padding may differ at a
near-tie, as in tests/engine/test_text_is_unchanged.py.
"""

import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation import Sampling
from mlx_speculation.caches import Speculation
from mlx_speculation.models import Lane, ModelHooks
from mlx_speculation.samplers import Chooser
from support.identity import assert_same_text, plain_text
from support.models.recurrent_models import RECURRENT_MODELS
from support.models.tiny_models import TINY_MODELS, build_tiny

TOKENS = 18
LONGEST_DRAFT = 6
LENGTHS = (17, 6, 40, 23)  # below and above the window of 16
MODELS = TINY_MODELS | RECURRENT_MODELS
SIZES = (1, 2, 3, 4)
QUICK = {  # batch sizes in the default run
    "llama": (1, 2, 3),
    "gemma3_text": (4,),
    "qwen3_5": (3,),
    "lfm2": (3,),
    "mamba2": (3,),
    "falcon_h1": (3,),
    "kimi_linear": (3,),
}
CASES = [
    pytest.param(
        name, size, marks=[] if size in QUICK.get(name, ()) else [pytest.mark.slow]
    )
    for name in MODELS
    for size in SIZES
]


def prompt_of(length: int) -> list[int]:
    """Return a prompt that does not repeat itself."""
    return [(37 * i * i + 11 * i + length) % 256 for i in range(length)]


class Batch:
    """Rows that are decoded together.

    Args:
        model: the model that decodes them.
        prompts: one for each row.
        right: the text of each row under plain decoding.
        rng: decides which drafts are right.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: list[list[int]],
        right: list[list[int]],
        rng: random.Random,
    ) -> None:
        self.model, self.right, self.rng = model, right, rng
        self.texts: list[list[int]] = [[] for _ in prompts]
        self.pending = [prompt[-1] for prompt in prompts]
        self.rows = list(range(len(prompts)))
        self.rounds = self.ragged = 0
        alone = [Lane(model) for _ in prompts]
        for lane, prompt in zip(alone, prompts, strict=True):
            lane.feed(prompt[:-1])
        layers = zip(*(lane.caches for lane in alone), strict=True)
        self.caches: list[Any] = [type(rows[0]).merge(list(rows)) for rows in layers]

    def decode(self) -> list[list[int]]:
        """Decode all rows and return their texts."""
        while self.rows:
            self.round(self.rng.randint(0, LONGEST_DRAFT))
            stay = [i for i, r in enumerate(self.rows) if len(self.texts[r]) < TOKENS]
            if stay and len(stay) < len(self.rows):
                for cache in self.caches:
                    cache.filter(mx.array(stay))
            self.rows = [self.rows[index] for index in stay]
        return [text[:TOKENS] for text in self.texts]

    def round(self, k: int) -> None:
        """Draft k tokens for every row, verify all together, commit accepted ones."""
        drafts = [self.draft(row, k) for row in self.rows]
        tokens = [[self.pending[r], *d] for r, d in zip(self.rows, drafts, strict=True)]
        with Speculation(self.caches) as speculation:
            logits = self.model(mx.array(tokens), cache=speculation.caches)
            values: Any = mx.argmax(logits, axis=-1).tolist()
            keep = [
                1 + agreed(draft, choices)
                for draft, choices in zip(drafts, values, strict=True)
            ]
            speculation.commit(keep)
            assert not speculation.reran
        for row, choices, kept in zip(self.rows, values, keep, strict=True):
            self.texts[row] += choices[:kept]
            self.pending[row] = choices[kept - 1]
        self.rounds += 1
        self.ragged += len(set(keep)) > 1

    def draft(self, row: int, k: int) -> list[int]:
        """Return k tokens, each of them right with probability 0.8."""
        at = len(self.texts[row])
        right = [*self.right[row], *[0] * (at + k)][at : at + k]
        wrong = [(token + 1) % 256 for token in right]
        pairs = zip(right, wrong, strict=True)
        return [one if self.rng.random() < 0.8 else other for one, other in pairs]


def agreed(draft: list[int], choices: list[int]) -> int:
    """Return the number of first drafted tokens that the model chose."""
    for index, token in enumerate(draft):
        if token != choices[index]:
            return index
    return len(draft)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_ragged_rows_equal_each_row_decoded_alone(name: str, size: int) -> None:
    model, chooser = build_tiny(MODELS[name]), Chooser(Sampling(seed=0), 256)
    recorders = ModelHooks(model)
    prompts = [prompt_of(length) for length in LENGTHS[:size]]
    right = [plain_text(model, prompt, TOKENS) for prompt in prompts]
    batch = Batch(model, prompts, right, random.Random(size))
    texts = batch.decode()
    recorders.remove()
    assert batch.ragged > batch.rounds // 4 or size == 1
    for row, text in enumerate(texts):
        assert_same_text(
            model,
            chooser,
            prompts[row],
            right[row],
            text,
            width=LONGEST_DRAFT + 1,
            bitwise=MODELS[name].bitwise,
        )
