"""The HTML page of a generation shows every text, and no text can break the page."""

import json
from collections import Counter
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.cli.html_page import page_of
from mlx_speculation.engine import Chunk, Origin, Result, Statistics
from mlx_speculation.engine.memory import Memory
from mlx_speculation.engine.result import LogProb
from support.drafters.scripted_drafter import ScriptedDrafter
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

HOSTILE = ("</script>", "<!--", "<script>alert(1)</script>", "&lt;", "\u2028", "${x}")
TOKENIZER = byte_tokenizer(extra=HOSTILE)
TEXTS = st.one_of(
    st.sampled_from([*HOSTILE, "", "\n", " \n\n", "'\"", "é", "$title", "<i>"]),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=8),
)
ORIGINS = st.one_of(
    st.sampled_from([Origin("step"), Origin("correction"), Origin("bonus")]),
    st.builds(Origin, st.just("accepted"), st.integers(0, 20)),
)
VALUES = st.floats(-50, 0) | st.just(float("-inf"))
LOGPROBS = st.builds(
    LogProb,
    st.floats(-50, 0),
    st.lists(st.tuples(st.integers(0, 261), VALUES), max_size=5).map(tuple),
)
CHUNKS = st.builds(
    Chunk,
    TEXTS,
    st.integers(0, 261),
    logprob=st.none() | LOGPROBS,
    origin=ORIGINS,
)


class Reader(HTMLParser):
    """Reads a page as a browser would."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.spans: list[tuple[str, str]] = []  # (classes, text) of each token
        self.prompt = self.details = self.titles = ""
        self.rows: list[list[str]] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(
        self, tag: str, attributes: list[tuple[str, str | None]]
    ) -> None:
        given = dict(attributes)
        self.tags[tag] += 1
        self.attributes |= given.keys()
        if tag not in ("meta", "html"):
            self._open.append((tag, given))
        if "data-n" in given:
            self.spans.append((str(given["class"]), ""))
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1][0] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        tag, given = self._open[-1] if self._open else ("", {})
        if given.get("id") == "details":
            self.details += data
        elif tag in ("title", "h1"):
            self.titles += data
        elif given.get("class") == "prompt":
            self.prompt += data
        elif "data-n" in given:
            classes, text = self.spans[-1]
            self.spans[-1] = (classes, text + data)
        elif tag == "td":
            self.rows[-1].append(data)


def result_of(chunks: list[Chunk]) -> Result:
    return Result(
        text="".join(chunk.text for chunk in chunks),
        tokens=[chunk.token for chunk in chunks],
        finish_reason="length",
        stats=Statistics(rounds=1, emitted=len(chunks)),
        seed=1,
        cached_tokens=[],
        next_token=None,
        memory=Memory(0, 0, 0, 0, 0, 0),
        origins=tuple(chunk.origin for chunk in chunks),
    )


@given(chunks=st.lists(CHUNKS, max_size=12), prompt=TEXTS, name=TEXTS)
def test_a_page_shows_the_text_whatever_it_holds(
    chunks: list[Chunk], prompt: str, name: str
) -> None:
    result = result_of(chunks)
    page = page_of(result, chunks, TOKENIZER, name, "length", prompt)
    read = Reader(page)
    assert "".join(text for _, text in read.spans) == result.text
    assert read.prompt == prompt
    assert read.titles == 2 * name
    assert [classes.split()[1] for classes, _ in read.spans] == [
        {"accepted": "a", "correction": "c", "bonus": "b", "step": "s"}[o.writer]
        for o in result.origins
    ]

    details = json.loads(read.details)
    assert [each["id"] for each in details] == result.tokens
    for each, chunk in zip(details, chunks, strict=True):
        assert json.loads(each["shown"]) == TOKENIZER.decode([chunk.token])
        assert (each["logprob"] is None) == (chunk.logprob is None)
    counts = Counter(str(o.writer) for o in result.origins)
    by_row = [(row[0].split(",")[0].split(":")[0], int(row[1])) for row in read.rows]
    assert sum(count for _, count in by_row) == len(chunks)
    assert sum(count for word, count in by_row if word == "draft") == counts["accepted"]

    # Nothing is loaded from elsewhere, and no text became a tag.
    assert not read.attributes & {"src", "href", "srcset", "onload", "onerror"}
    assert read.tags["script"] == 2
    assert read.tags["title"] == read.tags["body"] == 1
    assert read.tags["span"] - len(chunks) - len(read.rows) == 1


def test_a_page_of_a_real_generation_marks_rounds_and_counts() -> None:
    prompt = list(b"def add(")
    model = build("llama")
    plain = SpeculativeGenerator(model, TOKENIZER)
    text = plain.generate(prompt, max_tokens=40, stop_tokens=()).tokens
    drafter = ScriptedDrafter(prompt + text, right=0.7)
    generator = SpeculativeGenerator(model, TOKENIZER, draft=drafter, draft_length=3)
    stream = generator.stream(prompt, max_tokens=30, stop_tokens=(), logprobs=3)
    chunks = list(stream)
    page = page_of(stream.result, chunks, TOKENIZER, "m", "length", "x")
    read = Reader(page)
    stats = stream.stats
    assert sum("first" in classes for classes, _ in read.spans) == stats.rounds
    counted = {row[0]: int(row[1]) for row in read.rows}
    for place, reached in enumerate(stats.reached):
        assert reached - counted.get(f"draft, accepted at place {place + 1}", 0) in (
            0,
            1,  # max_tokens can cut the last round
        )
    for each, chunk in zip(json.loads(read.details), chunks, strict=True):
        assert chunk.logprob is not None
        assert abs(each["logprob"] - chunk.logprob.value) < 1e-5
        assert [token for token, _, _ in each["top"]] == [
            token for token, _ in chunk.logprob.top
        ]
