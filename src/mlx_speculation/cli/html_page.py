"""A self-contained HTML page of a text: colours show the origin of each token.

All text of the model is escaped.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from mlx_speculation.cli.stream_view import figures

if TYPE_CHECKING:
    from mlx_speculation.engine import Chunk, Origin, Result

_TEMPLATE = Path(__file__).with_name("page.html")
_SHADES = 8  # one for each place in the draft; later places share the last
_CLASSES = {"accepted": "a", "correction": "c", "bonus": "b", "step": "s"}
_WORDS = {
    "correction": "correction: the target's own, after a rejected draft",
    "bonus": "bonus: the target's own, after a draft accepted to its end",
    "step": "plain step: the target's own, without a draft",
}


def page_of(
    result: "Result",
    chunks: Sequence["Chunk"],
    tokenizer: Any,
    title: str,
    ended: str,
    prompt: str,
) -> str:
    """Return the page as HTML; hovering over a token shows its log-probabilities."""
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        heading=escape(title),
        subtitle=escape(
            f"mlx-speculation; finish reason: {ended}; seed: {result.seed}"
        ),
        numbers=_numbers(result),
        legend=_legend(result),
        prompt=escape(prompt),
        tokens=_spans(chunks),
        footnote=escape(_footnote(chunks)),
        details=_safe_json(_details(chunk, tokenizer) for chunk in chunks),
    )


def _numbers(result: "Result") -> str:
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in figures(result).items()
    )


def _legend(result: "Result") -> str:
    """Return a table row for each origin in the text, with its share of the tokens."""
    counts = Counter(result.origins)
    order, rows = [*_CLASSES], []
    for origin in sorted(counts, key=lambda o: (order.index(o.writer), o.place or 0)):
        count, share = counts[origin], counts[origin] / len(result.origins)
        kind = f"t swatch {_CLASSES[origin.writer]}"
        swatch = f'<span class="{kind}"{_shade(origin)}>abc</span>'
        rows.append(
            f"<tr><td>{swatch}</td><td>{escape(_writer(origin))}</td>"
            f'<td class="n">{count}</td><td class="n">{share:.0%}</td>'
            f'<td class="bar"><i style="width:{share:.1%}"></i></td></tr>'
        )
    return "".join(rows)


def _spans(chunks: Sequence["Chunk"]) -> str:
    """Return a span for each token; added marks are in <i>."""
    spans = []
    ends = [True, *(one.origin.place is None for one, _ in pairwise(chunks))]
    for index, (chunk, first) in enumerate(zip(chunks, ends, strict=False)):
        kind = _CLASSES[chunk.origin.writer]
        classes = f"t {kind}{' first' if first else ''}"
        text = escape(chunk.text).replace("\n", "<i>⏎</i>\n") or "<i>·</i>"
        spans.append(
            f'<span class="{classes}"{_shade(chunk.origin)} data-n="{index}" '
            f'tabindex="0">{text}</span>'
        )
    return "".join(spans)


def _details(chunk: "Chunk", tokenizer: Any) -> dict[str, Any]:
    logprob = chunk.logprob
    top = () if logprob is None else logprob.top
    return {
        "id": chunk.token,
        "shown": _shown(tokenizer, chunk.token),
        "writer": _writer(chunk.origin),
        "logprob": None if logprob is None else round(logprob.value, 6),
        "top": [
            [token, _shown(tokenizer, token), round(value, 6)]
            for token, value in top
            if value > -1e30  # forbidden tokens have minus infinity, or almost
        ],
    }


def _shown(tokenizer: Any, token: int) -> str:
    """Return a token in quotes, with escapes for invisible characters."""
    return json.dumps(tokenizer.decode([token]), ensure_ascii=False)


def _writer(origin: "Origin") -> str:
    if origin.place is not None:
        return f"draft, accepted at place {origin.place + 1}"
    return _WORDS[origin.writer]


def _shade(origin: "Origin") -> str:
    if origin.place is None:
        return ""
    return f' style="--i:{min(origin.place, _SHADES - 1)}"'


def _footnote(chunks: Sequence["Chunk"]) -> str:
    said = "A gap begins a round; ⏎ is a line break, · a token without text of its own."
    if chunks and chunks[0].logprob is None:
        return said
    return (
        f"{said} Hover over a token for its probability under the target, after "
        "processors and before filters and temperature."
    )


def _safe_json(values: Iterable[Any]) -> str:
    """Return JSON for a script element, with <, > and & escaped."""
    text = json.dumps(list(values), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
