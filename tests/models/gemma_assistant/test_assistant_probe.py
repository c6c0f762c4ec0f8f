"""The position of an assistant: scores of both anchors, and refusals."""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.errors import ConventionError
from mlx_speculation.models import HiddenStates
from mlx_speculation.models.checkpoints.probe_text import OwnText
from mlx_speculation.models.gemma_assistant import (
    SharedKv,
    probe_anchor,
)
from mlx_speculation.models.gemma_assistant.probe import (
    AssistantProbe,
    _whole,
    position_of,
)
from support.covering import covering
from support.models.assistant_checkpoints import HEADS, TARGETS, make

STARTS = [[5, 9, 200, 31, 7], [77, 3, 12, 140, 90]]


@cache
def probe_of(name: str, head: str) -> tuple[AssistantProbe, OwnText]:
    """Return a probe with a random assistant, and the text of its target."""
    made = make(name, head)
    taps = HiddenStates(made.target, before_norm=True, after_norm=True)
    text = OwnText.of(made.target, taps, STARTS, steps=20)
    return AssistantProbe(made.assistant, made.target, taps, text), text


@pytest.mark.parametrize(
    ("name", "head", "anchor"), covering(TARGETS, HEADS, ("state", "token"))
)
def test_proposals_are_those_of_a_round_that_begins_there(
    name: str, head: str, anchor: Any
) -> None:
    """The probe guesses what a round that begins at the same position proposes."""
    trial, text = probe_of(name, head)
    made = make(name, head)
    target: Any = made.target
    shared = SharedKv(target, made.assistant)
    taps = HiddenStates(target, after_norm=True)
    for place in (text.written, 19, text.positions - 1):
        row, known = 1, place - 1
        caches = make_prompt_cache(target)
        with taps.collect() as states:
            target(text.tokens[row : row + 1, :known], cache=caches)
        read, stop = shared.read(caches, 0)
        assert stop == known
        newest = text.tokens[row : row + 1, known : known + 1]
        out = made.assistant.step(
            taps.embed(newest, scaled=True),
            states.after_norm[:, -1:],
            read,
            known - 1 if anchor == "state" else known,
        )
        wanted = _whole(out.logits, out.ids, 256)
        logits = trial._rows_at(place, anchor)[row]
        assert mx.allclose(logits, wanted, atol=1e-3), place


def test_ids_that_were_not_looked_at_are_below_the_rest() -> None:
    assistant = make("shared", "centroids").assistant
    scores, ids = assistant.logits(mx.random.normal((1, 32), key=mx.random.key(1)))
    assert ids is not None
    whole = np.full(256, float(scores.min()) - 1)
    whole[np.array(ids[0])] = np.array(scores[0])
    # Ids of the assistant that the target does not have are dropped.
    for count in (256, 200):
        assert np.array_equal(np.array(_whole(scores, ids, count))[0], whole[:count])


@pytest.mark.parametrize("name", TARGETS)
def test_a_random_assistant_is_refused_with_its_scores(name: str) -> None:
    made = make(name)
    with pytest.raises(ConventionError, match=r"'state' agrees.*; 'token' agrees"):
        probe_anchor(made.assistant, made.target, STARTS)


def test_anchors_are_one_position_apart() -> None:
    assert position_of("state", 10) == 9
    assert position_of("token", 10) == 10
