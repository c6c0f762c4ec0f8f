"""Edit pairs: a text, then the text again with small changes.

They teach copying, which is what makes drafting pay on edits. The header before the
second text names the change, so that the changed words can be predicted too. The
bundled prompts of the group `edit` use the same layout.
"""

import keyword
import random
import re
from collections import Counter

from demo_training.data.corpus import Text

BEFORE = "### Before\n"
AFTER = "### After: "
END = "### End\n"
NAMES = [
    *("value", "item", "result", "entry", "node", "index", "buffer", "parser"),
    *("handler", "source", "context", "state", "record", "field", "limit", "offset"),
    *("stream", "token", "record_list", "total", "first_line", "reader", "writer"),
    *("name_map", "options", "config", "target", "output", "input_path", "prefix"),
    *("counter", "cache"),
]
WORDS = [
    *("object", "method", "string", "example", "function", "module", "number"),
    *("argument", "sequence", "type", "statement", "expression", "class"),
    *("attribute", "element", "list", "mapping", "key", "interface"),
]


def block(body: str, rng: random.Random, least: int, most: int) -> str | None:
    """Whole lines of a text, at most `most` characters, from a random line on."""
    lines = body.splitlines(keepends=True)
    start = rng.randrange(len(lines))
    # Start where a definition or a paragraph starts when one is near.
    for index in range(start, min(start + 40, len(lines))):
        line = lines[index]
        if re.match(r"\s*(def|class|@|async def)\b", line) or (
            index and not lines[index - 1].strip() and line.strip()
        ):
            start = index
            break
    size, chosen = rng.randint(least, most), ""
    for line in lines[start:]:
        if len(chosen) + len(line) > size:
            break
        chosen += line
    chosen = chosen.rstrip() + "\n"
    return chosen if len(chosen) >= least // 2 else None


def change(body: str, prose: bool, rng: random.Random) -> tuple[str, str]:
    """The instruction and the changed text."""
    kinds = ["rename", "rename", "rename", "number", "copy"]
    kinds += ["copy"] if prose else ["comments", "quotes"]
    rng.shuffle(kinds)
    for kind in kinds:
        done = apply(kind, body, prose, rng)
        if done is not None:
            return done
    return "no change", body


def apply(
    kind: str, body: str, prose: bool, rng: random.Random
) -> tuple[str, str] | None:
    """One change of a kind, or None where the text offers nothing to change."""
    if kind == "copy":
        return "no change", body
    if kind == "rename":
        return rename(body, WORDS if prose else NAMES, rng)
    if kind == "number":
        return renumber(body, rng)
    if kind == "quotes":
        changed = re.sub(r"(?<!['\w])'([^'\"\n\\]*)'(?!')", r'"\1"', body)
        return ("use double quotes", changed) if changed != body else None
    changed = re.sub(r"^[ ]*#.*\n", "", body, flags=re.MULTILINE)
    return ("remove comments", changed) if changed != body else None


def rename(body: str, names: list[str], rng: random.Random) -> tuple[str, str] | None:
    """Another name for a word that occurs two to twelve times."""
    found = Counter(re.findall(r"\b[A-Za-z_]\w{2,}\b", body))
    old = [w for w, n in found.items() if 2 <= n <= 12 and not keyword.iskeyword(w)]
    if not old:
        return None
    was = rng.choice(sorted(old))
    free = [name for name in names if name not in found] or names
    now = rng.choice(free)
    return f"rename {was} to {now}", re.sub(rf"\b{was}\b", now, body)


def renumber(body: str, rng: random.Random) -> tuple[str, str] | None:
    """Another value for one number, wherever it stands."""
    found = sorted(set(re.findall(r"(?<![\w.])\d{1,4}(?![\w.])", body)))
    if not found:
        return None
    was, now = rng.choice(found), str(rng.randrange(100))
    changed = re.sub(rf"(?<![\w.]){was}(?![\w.])", now, body)
    return f"replace {was} with {now}", changed


def pair(
    text: Text, rng: random.Random, least: int, most: int
) -> tuple[str, str] | None:
    """A prompt that ends after the instruction, and the text that should follow."""
    body = block(text.body, rng, least, most)
    if body is None:
        return None
    instruction, changed = change(body, text.kind in {"topic", "docstring"}, rng)
    return f"{BEFORE}{body}{AFTER}{instruction}\n", f"{changed}{END}"


def make_pairs(texts: list[Text], count: int, seed: int) -> list[str]:
    """`count` pairs from random places; longer texts are chosen more often."""
    rng = random.Random(seed)
    weights = [len(text.body) for text in texts]
    pairs: list[str] = []
    while len(pairs) < count:
        for text in rng.choices(texts, weights, k=256):
            made = pair(text, rng, 300, 1500)
            if made is not None:
                pairs.append("".join(made))
    return pairs[:count]
