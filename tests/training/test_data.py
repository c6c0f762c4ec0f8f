"""The texts of a training: prompts, the target's answers, and rows cut from them."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import load
from mlx_speculation.training.acceptance_check import ROUND
from mlx_speculation.training.data.answers import LEAST, write_answers
from mlx_speculation.training.data.collect import Collector
from mlx_speculation.training.data.dialogues import Dialogue, Dialogues
from mlx_speculation.training.data.draft_ids import choose_ids, coverage
from mlx_speculation.training.data.own_prompts import frame_of, write_prompts
from mlx_speculation.training.data.prompts import read_prompts
from mlx_speculation.training.data.row_batches import RowBatches
from support.models.chat_folders import chat_folder
from support.short_training import OPTIONS


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return load(chat_folder(tmp_path_factory.mktemp("target")))


def dialogue(tokens: list[int], *, held_out: bool = False, begin: int = 0) -> Dialogue:
    ids = np.array(tokens, np.uint32)
    return Dialogue(ids, np.arange(len(ids)) >= begin, held_out, False, 0.0)


def test_prompts_of_every_form_are_read(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines: list[Any] = [
        "plain",
        {"prompt": "a"},
        {"text": "b"},
        {"turns": ["c", "d"], "category": "x"},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "e"},
                {"role": "assistant", "content": "an answer of another model"},
                {"role": "user", "content": "f"},
            ]
        },
    ]
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    prompts = read_prompts(file)
    assert [[each["content"] for each in one] for one in prompts] == [
        ["plain"],
        ["a"],
        ["b"],
        ["c", "d"],
        ["s", "e", "f"],
    ]
    assert prompts[4][0]["role"] == "system"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has 0 prompts"),
        ("{", "is not JSON"),
        ("7", "is no prompt"),
        ('{"question": "a"}', "is no prompt"),
        ('{"messages": [{"role": "system", "content": "s"}]}', "is no prompt"),
        ('{"turns": []}', "is no prompt"),
        ('""', "is no prompt"),
    ],
)
def test_what_is_no_prompt_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidRequestError, match=said):
        read_prompts(file)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_prompts(tmp_path / "nothing.jsonl")


def test_greedy_answers_are_those_of_plain_decoding(pair: tuple[Any, Any]) -> None:

    model, _ = pair
    prompts = [[1, 2, 3], [9], [70, 71, 72, 73, 74]]
    answers = write_answers(model, prompts, most=12, temperature=0, ends=[256], seed=1)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected: list[int] = []
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=12):
            expected.append(int(token))
            if token == 256:
                break
        assert answer == expected


def test_sampled_answers_follow_from_the_seed(pair: tuple[Any, Any]) -> None:
    def answers(seed: int, **more: Any) -> list[list[int]]:
        return write_answers(
            pair[0], [[1], [2]], most=16, temperature=1.0, ends=[], seed=seed, **more
        )

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)
    greedy = write_answers(pair[0], [[1]], most=16, temperature=0, ends=[], seed=1)
    assert answers(3, min_p=1.0)[0] == greedy[0]


def test_answers_that_are_cut_can_be_evaluated(pair: tuple[Any, Any]) -> None:
    """Answers are longer than a round, however early they are stopped."""
    cut = write_answers(
        pair[0],
        [[1], [2]],
        most=64,
        temperature=0,
        ends=[],
        seed=1,
        stop=lambda: True,
    )
    assert list(map(len, cut)) == [LEAST, LEAST]
    assert LEAST > ROUND + 2


def test_own_prompts_stand_in_the_template(pair: tuple[Any, Any]) -> None:
    model, tokenizer = pair
    before, after = frame_of(tokenizer)
    assert tokenizer.decode(before) == "<user>"
    assert tokenizer.decode(after) == "<end><assistant>"
    prompts = write_prompts(model, tokenizer, 12, most=10, seed=3)
    assert prompts == write_prompts(model, tokenizer, 12, most=10, seed=3)
    assert prompts
    for prompt in prompts:
        assert prompt[: len(before)] == before
        assert prompt[-len(after) :] == after
        inner = prompt[len(before) : -len(after)]
        assert len(inner) >= 4
        assert not {256} & set(inner)


def test_a_template_that_changes_texts_is_refused(pair: tuple[Any, Any]) -> None:
    class Upper:
        has_chat_template = True

        def apply_chat_template(self, messages: Any, **_: Any) -> str:
            return str(messages[0]["content"].upper())

    with pytest.raises(InvalidRequestError, match="does not repeat"):
        frame_of(Upper())


def collected(
    pair: tuple[Any, Any], file: Path, prompts: Any, **more: Any
) -> Dialogues:
    options = replace(OPTIONS, **more)
    dialogues = Dialogues.open(file, "target")
    Collector(*pair, options, prompts).fill(dialogues, lambda done, whole: None)
    return dialogues


def test_dialogues_are_held_out_and_learned_from(
    pair: tuple[Any, Any], tmp_path: Path
) -> None:
    dataset = collected(pair, tmp_path / "d.safetensors", [])
    assert Counter(each.temperature for each in dataset.held_out) == {0.0: 3, 0.8: 3}
    assert len(dataset.training) == 12
    for each in dataset.dialogues:
        assert each.own_prompt
        assert each.counts.all() == (not each.evaluates)
        begin = int(each.counts.argmax())
        if each.evaluates:
            assert pair[1].decode(each.tokens[:begin].tolist()).endswith("<assistant>")


def test_a_file_of_dialogues_is_extended(pair: tuple[Any, Any], tmp_path: Path) -> None:
    file = tmp_path / "d.safetensors"
    first = collected(pair, file, [], dialogues=6).dialogues
    more = collected(pair, file, [], dialogues=15)
    assert len(more.training) == 15
    for one, other in zip(first, more.dialogues, strict=False):
        assert one.tokens.tolist() == other.tokens.tolist()
    again = Dialogues.open(file, "target")
    assert again.batches == more.batches
    for one, other in zip(again.dialogues, more.dialogues, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.counts.tolist() == other.counts.tolist()
        assert (one.evaluates, one.own_prompt) == (other.evaluates, other.own_prompt)
        assert one.temperature == pytest.approx(other.temperature)
    with pytest.raises(InvalidRequestError, match="written by another target"):
        Dialogues.open(file, "other")
    file.write_bytes(b"text")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        Dialogues.open(file, "target")


def test_conversations_are_answered_turn_by_turn(
    pair: tuple[Any, Any], tmp_path: Path
) -> None:
    prompts = [
        [{"role": "user", "content": f"{number} a"}, {"role": "user", "content": "b"}]
        for number in range(8)
    ]
    dataset = collected(
        pair, tmp_path / "d.safetensors", prompts, batch=4, held_out=2, own_prompts=0.0
    )
    assert dataset.used == 8
    assert not any(each.own_prompt for each in dataset.dialogues)
    texts = [pair[1].decode(each.tokens.tolist()) for each in dataset.dialogues]
    assert len(texts) == 16
    assert sum(text.startswith("<user>3 a<end><assistant>") for text in texts) == 2
    for each, text in zip(dataset.dialogues, texts, strict=True):
        prompt = pair[1].decode(each.tokens[~each.counts].tolist())
        assert prompt.endswith("<end><assistant>")
        assert text.startswith(prompt)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    rows=st.integers(1, 3),
    slots=st.integers(4, 16),
    more=st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_each_slot_of_a_pass_is_in_one_row(
    lengths: list[int], rows: int, slots: int, more: int, seed: int
) -> None:
    ends = np.cumsum(lengths)
    dialogues = [
        dialogue(list(range(end - length, end)), begin=length // 2)
        for length, end in zip(lengths, ends, strict=True)
    ]
    total = int(ends[-1])
    batches = RowBatches(dialogues, rows, slots, more, seed)
    seen: Counter[int] = Counter()
    for number in range(batches.per_pass):
        batch = batches.batch(number)
        assert batch.tokens.shape == batch.counts.shape == (rows, slots + more)
        seen.update(batch.tokens[:, :slots].flatten().tolist())
        again = RowBatches(dialogues, rows, slots, more, seed).batch(number)
        assert np.array_equal(batch.tokens, again.tokens)
        assert np.array_equal(batch.counts, again.counts)
    if total - more >= rows * slots:
        assert max(seen.values()) == 1
        assert len(seen) >= total - more - rows * slots - slots
    learned = {int(t) for each in dialogues for t in each.tokens[each.counts]}
    batch = batches.batch(0)
    for token, counts in zip(batch.tokens.flat, batch.counts.flat, strict=True):
        assert counts == (int(token) in learned)


def test_slots_that_draft_what_is_learned_are_drawn_first() -> None:
    dialogues = [dialogue(list(range(8 * i, 8 * i + 8)), begin=5) for i in range(20)]
    batches = RowBatches(dialogues, 3, 16, 5, 0, anchors=4, first=2)
    drawn: set[tuple[int, ...]] = set()
    for number in range(4):
        batch = batches.batch(number)
        assert batch.slots is not None
        assert batch.slots.shape == (3, 4)
        again = RowBatches(dialogues, 3, 16, 5, 0, anchors=4, first=2)
        same = again.batch(number).slots
        assert same is not None
        assert np.array_equal(batch.slots, same)
        for row, slots in enumerate(batch.slots):
            assert slots.tolist() == sorted({*slots.tolist()})
            assert 0 <= slots[0] <= slots[-1] < 16
            learned = batch.counts[row, 2:18]
            assert learned[slots].sum() == min(4, learned.sum())
            drawn.add(tuple(slots))
    assert len(drawn) > 6
    whole = RowBatches(dialogues, 3, 16, 5, 0, anchors=99, first=2).batch(0).slots
    assert whole is not None
    assert whole.tolist() == [list(range(16))] * 3


def test_passes_have_other_orders() -> None:
    dialogues = [dialogue([number] * 8) for number in range(20)]
    batches = RowBatches(dialogues, 2, 16, 2, 0)
    assert not np.array_equal(
        batches.batch(0).tokens, batches.batch(batches.per_pass).tokens
    )


def test_the_most_frequent_ids_to_learn_are_chosen() -> None:
    texts = [dialogue([7, 7, 5, 5, 5, 9, 3, 3], begin=2), dialogue([9, 9, 5])]
    assert choose_ids(texts, 2, 16, []).tolist() == [5, 9]
    assert choose_ids(texts, 3, 16, [0]).tolist() == [0, 5, 9]
    assert choose_ids(texts, 6, 16, []).tolist() == [0, 1, 2, 3, 5, 9]
    assert choose_ids(texts, 99, 4 + 6, []).tolist() == list(range(10))
    assert coverage(texts, np.array([5, 9])) == pytest.approx(7 / 9)


@given(st.lists(st.sampled_from([0.0, 0.3, 0.7, 0.8, 1.0]), min_size=1, max_size=5))
def test_temperatures_come_back_as_they_were(temperatures: list[float]) -> None:
    """A resumed run counts dialogues by temperature: 0.8 has to stay 0.8."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "dialogues.safetensors"
        written = Dialogues(file, "t")
        more = [replace(dialogue([1, 2]), temperature=each) for each in temperatures]
        written.add(more, used=0)
        again = Dialogues.open(file, "t")
        assert [each.temperature for each in again.dialogues] == temperatures
