"""The position at which an assistant drafts, by the anchors' scores, and refusals."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation.errors import ConventionError
from mlx_speculation.models.gemma_assistant import probe_anchor
from mlx_speculation.models.gemma_assistant.probe import _whole, position_of
from support.models.assistant_checkpoints import TARGETS, make

STARTS = [[5, 9, 200, 31, 7], [77, 3, 12, 140, 90]]


def test_ids_that_were_not_looked_at_are_below_the_rest() -> None:
    assistant = make("shared", "centroids").assistant
    scores, ids = assistant.logits(mx.random.normal((1, 32), key=mx.random.key(1)))
    assert ids is not None
    whole = np.full(256, float(scores.min()) - 1)
    whole[np.array(ids[0])] = np.array(scores[0])
    # Ids that only the assistant has are dropped.
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
