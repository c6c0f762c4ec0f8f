"""An error at any step of a round leaves caches, statistics and tokens as before."""

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache

from mlx_speculation.caches import Speculation
from mlx_speculation.engine import SpeculativeGenerator
from mlx_speculation.engine.drafters.draft_model import ModelDrafter
from mlx_speculation.engine.round import outcome
from mlx_speculation.errors import NonFiniteLogitsError
from mlx_speculation.models import Lane, LaneRound
from mlx_speculation.samplers import Verifier, verifier
from support.caches.contents import assert_same_content, content
from support.covering import covering
from support.decoder_runs import InjectedError, Run, Step, label
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

MODELS = ("llama", "gemma3_text", "qwen3_5", "mamba", "recurrent_gemma")
TOKENS = 18


def run_of(model: nn.Module, draft: nn.Module | None, length: int) -> Run:
    drafter = None if draft is None else ModelDrafter(lambda: Lane(draft))
    return Run(model, drafter, length, TOKENS)


@cache
def plain_text(name: str) -> list[int]:
    return run_of(build(name), None, 0).finish()


# Calls in a round that drafts 3 tokens; the number says which call of a function.
DRAFTED_STEPS = [
    (LaneRound, "forward", 1),  # the draft model's first forward
    (LaneRound, "forward", 2),
    (LaneRound, "forward", 3),
    (LaneRound, "forward", 4),  # the target's
    (Verifier, "propose", 1),
    (Verifier, "propose", 3),
    (Verifier, "verify", 1),
    (verifier, "count_accepted", 1),
    (verifier, "peaks", 1),
    (outcome, "outcomes", 1),
    (Run, "cut", 1),
    (Speculation, "prepare", 1),
    (Speculation, "commit", 1),  # the draft model's
    (Speculation, "commit", 2),  # the target's
]
PLAIN_STEPS = [
    (LaneRound, "forward", 1),
    (Verifier, "verify", 1),
    (Speculation, "commit", 1),
    (outcome, "outcomes", 1),
    (Run, "cut", 1),
]


@pytest.mark.parametrize(("name", "step"), covering(MODELS, DRAFTED_STEPS), ids=label)
def test_an_error_in_a_drafted_round_changes_nothing(name: str, step: Step) -> None:
    model = build(name)
    expected = plain_text(name)
    draft = build(name)
    # Installs the hooks of both models.
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=draft)
    run = run_of(model, draft, 3)
    drafter: Any = run.decoder.request.drafter
    for count, error in ((0, InjectedError()), (3, KeyboardInterrupt())):
        while run.decoder.request.statistics.rounds < count:
            run.next_round()
        drafted = content(drafter.lane.caches)
        run.fail_one_round(step, error)
        if count:  # a failed first round leaves the prompt in the drafter
            assert_same_content(drafted, content(drafter.lane.caches))
    assert run.finish() == expected
    assert (
        run.decoder.request.statistics.acceptance_rate > 0.9
    )  # a wrong draft cache would lower it
    del generator


@pytest.mark.parametrize(("name", "step"), covering(MODELS, PLAIN_STEPS), ids=label)
def test_an_error_in_a_plain_round_changes_nothing(name: str, step: Step) -> None:
    model = build(name)
    expected = plain_text(name)
    run = run_of(model, None, 0)
    for count, error in ((0, InjectedError()), (3, KeyboardInterrupt())):
        while run.decoder.request.statistics.rounds < count:
            run.next_round()
        run.fail_one_round(step, error)
    assert run.finish() == expected


@pytest.mark.parametrize(("name", "drafted"), covering(MODELS, [False, True]))
def test_an_error_in_the_middle_of_a_forward_changes_nothing(
    name: str, drafted: bool
) -> None:
    """Half of the layers have written when the error comes."""
    model = build(name)
    expected = plain_text(name)
    recorders = SpeculativeGenerator(model, byte_tokenizer())
    run = run_of(model, build(name) if drafted else None, 3)
    run.next_round()
    layers = _layers(model)
    layer = layers[len(layers) // 2]
    kind = type(layer)

    def interrupted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    layer.__class__ = type(kind.__name__, (kind,), {"__call__": interrupted})
    run.raises_and_changes_nothing(KeyboardInterrupt)
    layer.__class__ = kind
    assert run.finish() == expected
    del recorders


@pytest.mark.parametrize(("name", "length"), covering(MODELS, [0, 3]))
def test_nan_logits_roll_the_round_back(name: str, length: int) -> None:
    model = build(name)
    expected = plain_text(name)
    recorders = SpeculativeGenerator(model, byte_tokenizer())
    run = run_of(model, build(name) if length else None, length)
    for _ in range(3):
        run.next_round()
    original = LaneRound.forward

    def poisoned(self: LaneRound, tokens: mx.array) -> mx.array:
        logits = original(self, tokens)
        return logits * mx.nan if self._lane is run.target else logits

    seen = run.target.seen
    LaneRound.forward = poisoned  # type: ignore[method-assign]
    try:
        if length == 0:  # a plain round reads what the round before submitted
            run.next_round()
        with pytest.raises(NonFiniteLogitsError, match="rolled back"):
            run.next_round()
    finally:
        LaneRound.forward = original  # type: ignore[method-assign]
    assert run.target.seen <= len(run.sequence.tokens)
    assert run.target.seen >= seen - 1
    twin = Lane(model)
    twin.feed(run.sequence.tokens[: run.target.seen], step=1)
    offsets = [c.offset for c in run.target.caches if isinstance(c, KVCache)]
    assert offsets == [c.offset for c in twin.caches if isinstance(c, KVCache)]
    assert run.finish() == expected
    del recorders


def test_a_drafter_that_cannot_roll_back_starts_over() -> None:
    """The draft model reruns over accepted tokens; then the target cannot commit."""
    target, draft = build("llama"), build("mamba")  # no hooks on the draft
    expected = run_of(target, None, 0).finish()
    run = run_of(target, draft, 4)
    run.next_round()
    run.fail_one_round((Speculation, "commit", 3), InjectedError())
    assert run.finish() == expected


def _layers(model: nn.Module) -> list[nn.Module]:
    for path in ("layers", "model.layers", "backbone.layers"):
        part_of_model: Any = model
        for part in path.split("."):
            part_of_model = getattr(part_of_model, part, None)
        if part_of_model is not None:
            return list(part_of_model)
    raise AssertionError("no layers")
