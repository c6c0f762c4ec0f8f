"""In later prompts an answer gets the ids in which it was generated."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation import PrefixCache, SpeculativeGenerator
from mlx_speculation.caches import Left
from mlx_speculation.engine.prompt import replayed
from support.caches.prefix_roles import ROWS, bound
from support.models.tiny_models import build
from support.models.tiny_tokenizer import merging_tokenizer

# Tokens can be pairs of letters, so several lists of ids decode to one text.
TOKENIZER = merging_tokenizer(3, 140, letters=90)
IDS = st.lists(st.integers(0, 200), min_size=1, max_size=12)


def encode(text: str) -> list[int]:
    return [int(each) for each in TOKENIZER.encode(text, add_special_tokens=False)]


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids))


def filled(said: list[tuple[list[int], list[int]]]) -> tuple[PrefixCache, Any]:
    """Return a prefix cache that holds the texts, and the models it is bound to.

    `said` are prompts with their answers.
    """
    prefixes, owners = bound(1 << 30, ROWS)
    for prompt, answer in said:
        text = [*prompt, *answer]
        left = [Left(0, ROWS.fed(text), len(text), [])]
        prefixes.store(text, left, len(prompt))
    return prefixes, owners


@given(prompt=IDS, answers=st.lists(IDS, min_size=1, max_size=3), more=IDS)
def test_an_answer_has_its_own_ids_and_no_text_changes(
    prompt: list[int], answers: list[list[int]], more: list[int]
) -> None:
    prefixes, _owners = filled([(prompt, answer) for answer in answers])
    for answer in answers:
        later = [*prompt, *encode(decode(answer)), *encode(decode(more))]
        replay = replayed(prefixes, TOKENIZER, later)
        assert decode(replay) == decode(later)
        texts = {decode(each) for each in answers}
        if len(texts) == len(answers):
            others = [x for x in answers if x != answer]
            if not any(decode(answer).startswith(decode(x)) for x in others):
                assert replay[: len(prompt)] == prompt
                assert decode(replay[len(prompt) :]).startswith(decode(answer))
                assert replay[len(prompt) : len(prompt) + len(answer)] == answer


@given(said=st.lists(st.tuples(IDS, IDS), max_size=4), later=IDS)
def test_other_prompts_keep_their_text(
    said: list[tuple[list[int], list[int]]], later: list[int]
) -> None:
    prefixes, _owners = filled(said)
    for text in (later, [*later, *later], [*(said[0][0] if said else []), *later]):
        assert decode(replayed(prefixes, TOKENIZER, text)) == decode(text)


def test_answers_of_several_turns_come_back() -> None:
    prompt, first, result = encode("ask"), [5, 6, 7, 8], encode("tool")
    second = [9, 4, 9, 4]
    whole = [*prompt, *first, *result, *second]
    prefixes, _owners = filled([(prompt, first), (whole[: -len(second)], second)])
    later = [
        *prompt,
        *encode(decode(first)),
        *result,
        *encode(decode(second)),
        *encode("end"),
    ]
    assert replayed(prefixes, TOKENIZER, later) == [*whole, *encode("end")]


def test_thinking_of_another_session_never_comes_in() -> None:
    """Sessions that differ only in their thinking each get their own token ids."""
    prompt, seen = encode("ask"), encode("seen")
    thinking = [[5, 6, 7, 8], [9, 4, 9, 4]]
    prefixes, _owners = filled([(prompt, [*each, *seen]) for each in thinking])
    for each in thinking:
        later = [*prompt, *encode(decode(each)), *seen, *encode("more")]
        assert replayed(prefixes, TOKENIZER, later) == [
            *prompt,
            *each,
            *seen,
            *encode("more"),
        ]
    hidden = [*prompt, *seen, *encode("more")]
    assert replayed(prefixes, TOKENIZER, hidden) == hidden


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_conversation_as_text_is_not_read_again(
    on_disk: bool, tmp_path: Path
) -> None:
    model, prompt, reused = build("llama"), "what is it " * 4, {}
    for replay in (True, False):
        options: dict[str, Any] = {"replay": replay}
        folder = tmp_path / str(replay) if on_disk else None
        prefixes = PrefixCache(1 << 30, folder=folder)
        ours = SpeculativeGenerator(model, TOKENIZER, prefix_cache=prefixes, **options)
        first = ours.generate(prompt, max_tokens=30)
        if on_disk:
            prefixes.flush()
            prefixes = PrefixCache(1 << 30, folder=folder)
            ours = SpeculativeGenerator(
                model, TOKENIZER, prefix_cache=prefixes, **options
            )
        known = len(ours.encode(prompt)) + len(first.tokens) - 1
        later = prompt + first.text + " and more"
        assert ours.encode(later)[: known + 1] != ours.encode(prompt) + first.tokens
        second = ours.generate(later, max_tokens=2)
        reused[replay] = second.stats.reused
        prefixes.flush()
    assert reused[True] >= known
    assert reused[False] < known
