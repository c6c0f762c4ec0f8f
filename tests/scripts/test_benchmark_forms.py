"""Prompts in the forms of a benchmark: drawn from templates and texts, none its own."""

import bz2
import json
import random
import re
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo_training.prompts.benchmark_forms import SHARES, Forms, draw_prompts
from demo_training.prompts.overlap import Overlap, read_questions, words_of
from demo_training.prompts.templates import TURNS, fill, read_templates
from demo_training.prompts.texts import find_texts

LISTS, SHAPES = read_templates()
FILLED = LISTS | {"name": ["ada lovelace"], "article": ["A ferry sank. Nobody died."]}
SENTENCE = "The council met with Ada Miller on the third day to speak of the flood. "
GERMAN = "Wir haben heute in diesem Hause lange genug über die Straße geredet . "


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Files as packages hold them, with texts of their kinds."""
    news = "".join(SENTENCE.replace("third", f"{n}th") for n in range(60))
    with zipfile.ZipFile(tmp_path / "NewsArticles.zip", "w") as held:
        rows = "".join(f'{n},"{news} So ended {n}."\n' for n in range(8))
        held.writestr("news.csv", "article_id,text\n" + rows)
    with zipfile.ZipFile(tmp_path / "parlspeech-sample-bundestag.zip", "w") as held:
        speech = "".join(GERMAN.replace("heute", f"{n} mal") for n in range(80))
        held.writestr("de.csv", f'"date","text"\n"2000-01-28","{speech}"\n')
    article = " ".join(f"Rivers are a kind of water in place {n}." for n in range(90))
    page = f"<page><title>River</title><text xml:x='y'>{article}</text></page>"
    with bz2.open(tmp_path / "enwiki-part.bz2", "wt") as opened:
        opened.write(f"<x>{page}{page.replace('River', 'Lake')}</x>")
    return tmp_path


@given(
    st.sampled_from([shape for own in SHAPES.values() for shape in own]),
    st.integers(0, 999),
)
def test_every_slot_of_every_template_is_filled(shape: str, seed: int) -> None:
    turns = fill(shape, FILLED, random.Random(seed))
    assert len(turns) == len(shape.split(TURNS))
    assert not re.search(r"[{}]|/s?he\b", " ".join(turns))
    assert all(turn.strip() for turn in turns)


def test_a_conversation_keeps_its_names_and_pronouns() -> None:
    lists = {"person": ["Ada/she", "Alan/he"], "film": ["jaws", "rocky"]}
    for seed in range(20):
        first, second = fill(
            "{person} met {person2} at {film}. {His} friend. || {person}, {film2}?",
            lists,
            random.Random(seed),
        )
        name = first.split()[0]
        assert second.startswith(name)
        assert ("Her friend" in first) == (name == "Ada")
        assert "Ada" in first
        assert "Alan" in first
        assert ("jaws" in first) != ("jaws" in second)


@given(st.integers(0, 30), st.integers(1, 30), st.integers(1, 9), st.integers())
def test_numbers_are_in_their_range_and_on_their_steps(
    first: int, width: int, step: int, seed: int
) -> None:
    slot = f"{{{first}-{first + width}:{step}}}"
    (text,) = fill(slot, {}, random.Random(seed))
    assert first <= int(text) <= first + width
    assert (int(text) - first) % step == 0


def test_prompts_of_all_groups_are_drawn_once_and_of_no_question(
    packages: Path,
) -> None:
    forms = Forms(find_texts(packages), seed=3)
    own = forms.groups["summarization"]()[0]
    question = " ".join(own.split()[1:40])
    overlap = Overlap([question, "Who wrote dracula?"])
    found, refused = draw_prompts(forms, 150, overlap)
    counts = {group: sum(own == group for own, _ in found) for group in SHARES}
    assert refused["summarization"] > 0  # all of them begin alike
    assert counts["summarization"] == 0
    for group in ("mt_bench", "translation", "qa", "math_reasoning"):
        assert counts[group] == round(SHARES[group] * 150), group
    turns = [tuple(turns) for _, turns in found]
    assert len(set(turns)) == len(turns)
    assert not any(overlap.finds(each) for each in turns)


def test_the_forms_are_those_of_the_benchmark(packages: Path) -> None:
    texts = find_texts(packages)
    assert len(texts.news) == 8
    assert len(texts.articles) == 2
    forms = Forms(texts, seed=5)
    for _ in range(20):
        (translation,) = forms.translation()
        assert re.fullmatch(
            r"Translate German to English: Wir haben .* geredet \.", translation
        )
        (summary,) = forms.summarization()
        assert summary.startswith("Summarize: ")
        assert summary.endswith(".")
        (rag,) = forms.rag()
        assert rag.count("\n") == 5
        assert rag.endswith("?")
        assert len(forms.groups["mt_bench"]()) == 2


WORDS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=30)


@given(WORDS, WORDS, st.integers(1, 6))
def test_an_overlap_is_a_run_of_words_that_both_have(
    question: list[str], prompt: list[str], words: int
) -> None:
    def runs(found: list[str]) -> set[tuple[str, ...]]:
        return {tuple(found[at : at + words]) for at in range(len(found) - words + 1)}

    shared = bool(runs(question) & runs(prompt))
    short = len(question) < words and question == prompt
    overlap = Overlap([" ".join(question)], words)
    assert overlap.finds([" ".join(prompt)]) == (shared or short)


def test_an_overlap_is_seen_through_capitals_and_punctuation(tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    file.write_text(json.dumps({"turns": ["Who, then, was he?", "And why?"]}) + "\n")
    overlap = Overlap(read_questions(file))
    assert words_of("Who, then?") == ["who", "then"]
    assert overlap.finds(["Good.", "and WHY"])
    assert overlap.finds(["who then was he"])
    assert not overlap.finds(["who then was she"])


def test_a_missing_package_is_named(packages: Path, tmp_path: Path) -> None:
    (tmp_path / "enwiki-part.bz2").unlink()
    with pytest.raises(FileNotFoundError, match="enwiki"):
        find_texts(packages)
