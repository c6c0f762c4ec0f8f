"""In training, block drafters draft from each position (slot) as in rounds."""

import json
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map
from numpy.typing import NDArray

from mlx_speculation.engine import DFlashDraft, DSparkDraft
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import load
from mlx_speculation.models.dflash import is_dflash
from mlx_speculation.models.dspark import DSpark, is_dspark
from mlx_speculation.training.data.dialogues import Dialogue
from mlx_speculation.training.data.row_batches import RowBatch, RowBatches
from mlx_speculation.training.kinds import block_drafter
from mlx_speculation.training.kinds.block_drafter import (
    BlockTrainee,
    mask_id,
    usual_layers,
)
from mlx_speculation.training.options import TrainOptions
from mlx_speculation.training.step import HARD, TrainingStep
from mlx_speculation.training.teacher import TargetModel
from mlx_speculation.training.unroll import Recorded
from support.identity import prompt_of
from support.models.chat_folders import VOCAB, chat_folder
from support.references.reference_target import target

CONFIG = {
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 500.0,
}
ROWS, SLOTS, BLOCK = 2, 12, 5
IDS = np.flatnonzero(np.arange(256) % 4)
KINDS = ("dflash", "dspark")


def drafter(
    kind: Any, ids: NDArray[np.int64] | None = IDS, **options: Any
) -> BlockTrainee:
    """Return a drafter of two layers; its matrices have standard deviation 0.12."""
    given: dict[str, Any] = {"draft_layers": 2, "layers": [1, 4, 7], "seed": 3}
    if kind == "dspark":
        given["markov_rank"] = 8
    train = TrainOptions(kind=kind, block=BLOCK, **given | options)
    made = BlockTrainee(train, target(), CONFIG, ids, 255)
    module: Any = made.module
    key = mx.random.key(5)

    def drawn(value: mx.array) -> mx.array:
        nonlocal key
        key, leaf_key = mx.random.split(key)
        return (
            0.12 * mx.random.normal(value.shape, key=leaf_key)
            if value.ndim > 1
            else value
        )

    module.update(tree_map(drawn, module.parameters()))
    return made


def text(made: BlockTrainee) -> tuple[mx.array, list[mx.array]]:
    """Return rows of tokens, and what the drafter reads of the target's forward."""
    assert made.most is not None
    length = SLOTS + made.most + 1
    flat = prompt_of(ROWS * length)
    tokens = mx.array([flat[i * length :][:length] for i in range(ROWS)])
    return tokens, TargetModel(target(), made).lesson(tokens).inputs


def drafted(
    made: BlockTrainee, tokens: mx.array, inputs: list[mx.array], row: int, slot: int
) -> list[mx.array]:
    """Return the logits of each token that a round drafts from a slot: [ids] each."""
    head, rows = made.module, []
    kind = DSpark if made.kind == "dspark" else type(made.dflash)
    model: Any = kind(head, made.taps, made.dflash.layers)
    ours = [each[row : row + 1] for each in inputs]
    context = head.joined(ours)

    # The drafter goes on with the recorded token, not with the one it drafted.
    def choose(logits: mx.array) -> mx.array:
        rows.append(logits[0])
        return tokens[row, slot + 1 + len(rows)][None]

    caches = head.new_caches()
    known = tokens[row : row + 1, : slot + 2]
    if slot:
        model.history(context[:, :slot], known[:, 1 : slot + 1], caches)
    now = context[:, slot : slot + 1]
    model.draft(now, known[:, -1:], caches, head.depth, choose)
    return rows


def rounds(
    made: BlockTrainee, tokens: mx.array, inputs: list[mx.array]
) -> NDArray[np.float64]:
    """Return the logits of a round from each slot: [rows, slots, depths, ids]."""
    every = [
        [mx.stack(drafted(made, tokens, inputs, row, slot)) for slot in range(SLOTS)]
        for row in range(ROWS)
    ]
    return np.array(
        mx.stack([mx.stack(depth_rows) for depth_rows in every]), np.float64
    )


@pytest.mark.parametrize(("kind", "reduced"), [("dflash", False), ("dspark", True)])
def test_each_slot_drafts_as_a_round_does(
    kind: Any, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_drafter, "_AT_ONCE", 5)
    made = drafter(kind, IDS if reduced else None)
    depths = BLOCK if kind == "dspark" else BLOCK - 1
    assert made.most == depths
    tokens, inputs = text(made)
    wanted = rounds(made, tokens, inputs)
    assert wanted.shape[2:] == (depths, IDS.size if reduced else 256)
    scale = np.abs(wanted).max()

    def logits(**options: Any) -> NDArray[np.float64]:
        recorded = Recorded(inputs, tokens, depths, **options)
        slots = made.run(recorded, lambda _, each: each)
        return np.array(mx.stack(slots, axis=2), np.float64)

    assert np.abs(logits() - wanted).max() < 1e-4 * scale

    @settings(max_examples=settings().max_examples // 2)
    @given(
        chosen=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=4),
        checkpoint=st.booleans(),
    )
    def some(chosen: list[int], checkpoint: bool) -> None:
        rows = np.array([chosen, chosen[::-1]], np.int32)  # each row has its own slots
        got = logits(slots=mx.array(rows), checkpoint=checkpoint)
        expected = wanted[np.arange(ROWS)[:, None], rows]
        assert np.abs(got - expected).max() < 1e-4 * scale

    some()


CHOSEN = np.array([[0, 3, 4, 9], [2, 5, 10, 11]], np.int32)


def lesson(made: BlockTrainee) -> tuple[TrainingStep, RowBatch]:
    """Return a step, and a batch in which some tokens do not count for the loss."""
    assert made.most is not None
    tokens = np.array(text(made)[0])
    counts = np.ones(tokens.shape, np.bool_)
    counts[0, :6] = counts[1, 8] = False
    step = TrainingStep(
        made, TargetModel(target(), made), made.most, mx.float32, checkpoint=False
    )
    return step, RowBatch(tokens, counts, CHOSEN)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_the_drafts_of_rounds(kind: Any) -> None:
    made = drafter(kind)
    step, batch = lesson(made)
    loss, _ = step.gradients(batch)
    tokens, inputs = text(made)
    wanted = log_softmax(rounds(made, tokens, inputs))
    logits = np.array(TargetModel(target(), made).lesson(tokens).logits, np.float64)
    target_log_probs = log_softmax(logits[..., IDS])
    expected = 0.0
    for depth in range(wanted.shape[2]):
        losses = []
        for place, slot in enumerate(CHOSEN.flatten()):
            row = place // CHOSEN.shape[1]
            token = slot + 2 + depth  # place of the drafted token
            best = int(logits[row, token - 1].argmax())
            if not batch.counts[row, token] or not best % 4:
                continue
            log_probs_of_slot = wanted[row, slot, depth]
            theirs = target_log_probs[row, token - 1]
            soft = (np.exp(theirs) * (theirs - log_probs_of_slot)).sum()
            losses.append(soft - HARD * log_probs_of_slot[np.searchsorted(IDS, best)])
        assert 0 < len(losses) < CHOSEN.size
        expected += np.exp(-2 * depth / BLOCK) * np.mean(losses)
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    highest = logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = logits - highest
    result -= np.log(np.exp(result).sum(-1, keepdims=True))
    return result


@pytest.mark.parametrize(
    ("kind", "count"),
    [("dspark", 1), pytest.param("dflash", 3, marks=pytest.mark.slow)],
)
def test_gradients_are_the_slopes_of_the_loss(kind: Any, count: int) -> None:
    """A slope is a finite difference in the direction of a parameter's gradient."""
    made = drafter(kind, draft_layers=count)
    module: Any = made.module
    module.update(tree_map(lambda w: w / 3, module.parameters()))
    step, batch = lesson(made)
    _, gradients = step.gradients(batch)
    weights: Any = dict(tree_flatten(module.trainable_parameters()))
    flat: Any = dict(tree_flatten(gradients))
    assert flat.keys() == weights.keys()
    for name, gradient in flat.items():
        size = float(mx.linalg.norm(gradient))
        assert size > 0, name
        direction = gradient / size
        reach = 0.02 * float(mx.linalg.norm(weights[name])) / (1 + size)

        def moved(by: float, name: str = name, to: mx.array = direction) -> float:
            module.load_weights([(name, weights[name] + by * to)], strict=False)
            return float(step.gradients(batch)[0])

        slope = (moved(reach) - moved(-reach)) / (2 * reach)
        module.load_weights([(name, weights[name])], strict=False)
        assert slope == pytest.approx(size, rel=0.03, abs=2e-3), name


def test_gradients_of_the_markov_table_add_up_in_float32() -> None:
    """In bfloat16, the sum of 1,000 equal numbers would be 256 times one of them."""
    made = drafter("dspark")
    made.module.set_dtype(mx.bfloat16)
    before = mx.array([[3] * 1000 + [1]])
    states = mx.zeros((1, 1001, 64), mx.bfloat16)

    def loss(table: mx.array) -> mx.array:
        made.module.markov_head.markov_w1.weight = table
        return made._logits(states, before)[..., 0].astype(mx.float32).sum()

    slope = mx.grad(loss)(made.module.markov_head.markov_w1.weight)
    assert slope.dtype == mx.bfloat16
    assert mx.allclose(slope[3], 1000 * slope[1], rtol=0.02)
    assert float(mx.abs(slope[1]).max()) > 0


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_loaded_as_it_was_written(
    kind: Any, bits: int | None, tmp_path: Path
) -> None:
    more = {"markov_rank": 32} if kind == "dspark" else {}
    made = drafter(kind, None if bits else IDS, **more)
    made.save(tmp_path, bits)
    source = DFlashDraft if kind == "dflash" else DSparkDraft
    draft = source.from_folder(tmp_path, target())
    assert draft.dflash.layers == (1, 4, 7)
    assert draft.head.settings == made.module.settings
    head: Any = draft.head
    module: Any = made.module
    loaded: Any = dict(tree_flatten(head.parameters()))
    expected: Any = dict(tree_flatten(module.parameters()))
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        error = float(mx.abs(loaded[name] - value).max())
        assert error <= 0.01 * float(mx.abs(value).max()), name
    assert (draft.head.ids is None) == (bits is not None)
    said = json.loads((tmp_path / "config.json").read_text())
    assert is_dspark(said) == (kind == "dspark")
    assert is_dflash(said)


def test_a_new_drafter_attends_to_the_nearest_positions() -> None:
    options = TrainOptions(kind="dflash", block=BLOCK, layers=[1, 4, 7], seed=3)
    made = BlockTrainee(options, target(), CONFIG, None, 255)
    head: Any = made.module
    assert float(mx.abs(head.fc.weight[:, -64:] - mx.eye(64)).max()) < 0.02
    for layer in head.layers:
        attention = layer.self_attn
        assert attention.q_proj.weight.shape == (64, 64)
        queries = attention.q_proj.weight.reshape(2, 2, 16, 64)
        keys = attention.k_proj.weight.reshape(2, 1, 16, 64)
        assert mx.array_equal(queries, mx.broadcast_to(keys, queries.shape))
        assert 0.11 < float(keys.std()) < 0.14


def test_layers_and_the_mask_of_a_new_drafter(tmp_path: Path) -> None:
    assert usual_layers(36) == [1, 9, 17, 25, 33]  # DFlash's layers of Qwen3-4B
    assert usual_layers(30) == [1, 8, 14, 20, 27]
    assert usual_layers(3) == [0, 1, 2]
    tokenizer: Any = load(chat_folder(tmp_path))[1]
    assert mask_id(tokenizer, VOCAB + 8) == VOCAB
    assert mask_id(tokenizer, VOCAB) == VOCAB - 1
    tokenizer.add_eos_token(VOCAB - 1)
    assert mask_id(tokenizer, VOCAB) == VOCAB - 2
    with pytest.raises(InvalidRequestError, match="must name at least 1 layer"):
        drafter("dflash", layers=[1, 1])


def test_a_timed_step_leaves_the_weights_and_compiling_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU the first step can take 70 seconds: the timing leaves it out."""
    made, gradients = drafter("dspark", draft_layers=1), TrainingStep.gradients
    before = dict(tree_flatten(made.module.parameters()))
    monotonic, passed = time.monotonic, [0.0]
    monkeypatch.setattr("time.monotonic", lambda: monotonic() + passed[0])

    def compiling(self: TrainingStep, batch: Any) -> Any:
        passed[0] = 70.0
        return gradients(self, batch)

    monkeypatch.setattr(TrainingStep, "gradients", compiling)
    tokens = np.array(prompt_of(80), np.uint32)
    text = Dialogue(tokens, tokens >= 0, False, True, 0.0)
    batches = RowBatches([text], 2, SLOTS, BLOCK + 1, 0, anchors=3, first=2)
    assert 0 < lesson(made)[0].seconds(batches) < 60
    after = dict(tree_flatten(made.module.parameters()))
    assert all(mx.array_equal(value, after[name]) for name, value in before.items())
