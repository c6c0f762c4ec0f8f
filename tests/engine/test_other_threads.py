"""A generator that is made in one thread writes the same text in another.

mlx refuses to compute an array in another thread than the one that made it.
"""

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.models import HiddenStates, find_parts
from support.drafters.batch_heads import eagle_on, mtp_on
from support.identity import prompt_of
from support.models import census
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = prompt_of(5)
TOKENS = 4


@pytest.fixture(name="elsewhere", scope="module")
def _elsewhere() -> Iterator[Executor]:
    """Yield one thread for all tests: more would slow the end of the process."""
    with ThreadPoolExecutor(1) as other:
        yield other


def text(generator: SpeculativeGenerator, tokens: int = TOKENS) -> list[int]:
    return generator.generate(PROMPT, max_tokens=tokens, stop_tokens=()).tokens


def differs(elsewhere: Executor, model: nn.Module, **options: Any) -> str | None:
    """Return the difference between the texts of two threads; None: they are equal."""
    tokenizer = byte_tokenizer()
    there = SpeculativeGenerator(model, tokenizer, **options)
    try:
        result = elsewhere.submit(text, there).result()
    except RuntimeError as error:
        return str(error)
    expected = text(SpeculativeGenerator(model, tokenizer))
    return None if result == expected == text(there) else f"{result}, not {expected}"


@pytest.mark.parametrize(
    "names",
    [
        census.FEW,
        pytest.param(census.BUILT.keys() - census.FEW, marks=pytest.mark.slow),
    ],
    ids=["kinds", "others"],
)
def test_every_architecture_generates_in_another_thread_than_it_was_made_in(
    elsewhere: Executor, names: Collection[str]
) -> None:
    def fault(model: nn.Module, unequal: str | None) -> str | None:
        draft = None if unequal else "lookup"
        return differs(elsewhere, model, draft=draft, draft_length=2)

    faults = {
        name: fault(census.build(name), census.BUILT[name].unequal) for name in names
    }
    assert {name: difference for name, difference in faults.items() if difference} == {}


def reduced(draft: Any) -> dict[str, Any]:
    return {"draft": draft, "draft_vocabulary": range(0, 256, 2)}


def with_new_weights() -> tuple[nn.Module, dict[str, Any]]:
    """Return a target, and options with a head whose weights are not evaluated."""
    model, draft = mtp_on("exaone_moe")
    head: Any = draft.mtp.head
    head.update(tree_map(lambda weight: weight * 1, head.parameters()))
    return model, {"draft": draft}


def with_eagle() -> tuple[nn.Module, dict[str, Any]]:
    model = build("llama")
    return model, {"draft": eagle_on(model)}


DRAFTS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "model": lambda: (build("llama"), {"draft": census.build("gemma3n", seed=1)}),
    "few ids": lambda: (build("llama"), reduced(census.build("nanochat", seed=1))),
    "mtp": lambda: (mtp_on("qwen3_5")[0], {"draft": mtp_on("qwen3_5")[1]}),
    "mtp of few ids": lambda: (mtp_on("mimo")[0], reduced(mtp_on("mimo")[1])),
    "mtp, not evaluated": with_new_weights,
    "eagle": with_eagle,
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_is_used_in_another_thread_than_it_was_made_in(
    draft: str, elsewhere: Executor
) -> None:
    model, options = DRAFTS[draft]()
    assert differs(elsewhere, model, draft_length=2, **options) is None


def logits(model: Any) -> Any:
    return model(mx.array([PROMPT])).tolist()


def test_looking_for_parts_leaves_nothing_that_another_thread_cannot_compute(
    elsewhere: Executor,
) -> None:
    model = census.build("gemma3n")
    SpeculativeGenerator(model, byte_tokenizer())  # evaluates the arrays of the model
    expected = elsewhere.submit(logits, model).result()
    find_parts(model)
    assert elsewhere.submit(logits, model).result() == expected
    HiddenStates(model)
    assert elsewhere.submit(logits, model).result() == expected == logits(model)


def test_looking_for_parts_computes_no_weights(elsewhere: Executor) -> None:
    model: Any = build("llama")
    weight = mx.random.normal(model.lm_head.weight.shape, key=mx.random.key(0))
    model.lm_head.weight = weight
    find_parts(model)
    with pytest.raises(RuntimeError, match="no Stream"):
        elsewhere.submit(mx.eval, weight).result()
    SpeculativeGenerator(model, byte_tokenizer())
    elsewhere.submit(mx.eval, weight).result()
