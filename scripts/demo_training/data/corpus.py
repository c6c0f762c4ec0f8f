"""The corpus: what text any machine with Python has, and how it is split.

Three sources: the standard library's files, its documentation by topic
(`pydoc_data.topics`), and docstrings (of the library's files, and of modules that are
written in C). A text belongs to one split for good: the split hangs on its name, and
training texts that share much with a held-out text are dropped. This module knows
nothing about tokens.
"""

import ast
import hashlib
import importlib
import inspect
import re
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

SKIPPED_FOLDERS = {
    "site-packages",
    "ensurepip",
    "pydoc_data",
    "__pycache__",
    "encodings",
    "lib-dynload",
    "encoded_modules",
    "data",
}
TEST_FOLDERS = {"test", "tests", "idle_test"}
# Files with a licence notice of their own are left out; the rest is PSF-licensed.
OWN_LICENCE = re.compile(
    r"Permission to use, copy|Permission is hereby granted|Redistribution and use"
    r"|SPDX-License-Identifier: MIT|GNU General Public|under the Apache License"
)
MAX_BYTES = 200_000
TEST_BYTES = 14_000_000
SHINGLE_WORDS = 8
NEAR_DUPLICATE = 0.5


@dataclass(frozen=True, slots=True)
class Text:
    """One text of the corpus.

    `kind` is `library`, `test`, `topic` or `docstring`; `split` is `train` or
    `held-out`.
    """

    name: str
    kind: str
    split: str
    body: str

    @property
    def sha256(self) -> str:
        """The hash that `corpus.json` records."""
        return hashlib.sha256(self.body.encode()).hexdigest()


def bucket(name: str, count: int) -> int:
    """A number below `count` that depends on the name alone."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % count


def collect() -> list[Text]:
    """Every text after filtering, splitting and removal of near-duplicates."""
    files = without_near_duplicates([*library_files()])
    docs = [*docstrings(files), *topics(), *extension_docstrings()]
    return files + without_near_duplicates(docs)


def library_files() -> Iterator[Text]:
    """The standard library's Python files; tests up to a fixed number of bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    left = TEST_BYTES
    for name in sorted(names, key=lambda name: bucket(str(name), 1 << 30)):
        path = root / name
        if SKIPPED_FOLDERS.intersection(name.parts) or path.name.startswith("bad"):
            continue
        body = read_source(path)
        if body is None:
            continue
        kind = "test" if TEST_FOLDERS.intersection(name.parts) else "library"
        if kind == "test":
            left -= len(body)
            if left < 0:
                continue
        held = bucket(str(name), 20 if kind == "library" else 50) == 0
        yield Text(str(name), kind, "held-out" if held else "train", body)


def read_source(path: Path) -> str | None:
    """The file's text, or None where it is no text worth learning."""
    try:
        body = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    if not 400 <= len(body) <= MAX_BYTES or OWN_LICENCE.search(body):
        return None
    letters = sum(character.isalpha() or character.isspace() for character in body)
    longest = max(map(len, body.splitlines()))
    # Tables of numbers and escapes would fill the vocabulary with noise.
    if letters < 0.6 * len(body) or longest > 400:
        return None
    return body.expandtabs().replace("\r", "").replace("\f", "")


def topics() -> Iterator[Text]:
    """The documentation of the language, by topic."""
    found: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(found):
        held = bucket("topic:" + name, 12) == 0
        yield Text(
            f"topic:{name}", "topic", "held-out" if held else "train", found[name]
        )


def docstrings(files: list[Text]) -> Iterator[Text]:
    """The docstrings of each library file, as one prose text per file."""
    for text in files:
        if text.kind != "library":
            continue
        try:
            tree = ast.parse(text.body)
        except SyntaxError:
            continue
        module = text.name.removesuffix(".py").replace("/", ".")
        body = "\n\n".join(documented(tree, module.removesuffix(".__init__")))
        if len(body) > 400:
            yield replace(
                text, name=f"docstrings:{text.name}", kind="docstring", body=body + "\n"
            )


def documented(node: ast.AST, name: str) -> Iterator[str]:
    """`name(arguments)` and the docstring of everything below a node."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if not isinstance(node, kinds):
        return
    doc = ast.get_docstring(node)
    if doc and len(doc) > 60:
        arguments = ""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = f"({ast.unparse(node.args)})"
        yield f"{name}{arguments}\n\n{doc}"
    for child in ast.iter_child_nodes(node):
        if isinstance(child, kinds) and not isinstance(child, ast.Module):
            yield from documented(child, f"{name}.{child.name}")


def extension_docstrings() -> Iterator[Text]:
    """The docstrings of modules written in C, one text per module."""
    folder = Path(sysconfig.get_path("stdlib")) / "lib-dynload"
    names = {path.name.split(".")[0] for path in folder.glob("*.so")}
    names |= set(sys.builtin_module_names)
    for name in sorted(names):
        if "test" in name or name.startswith("_xx"):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        body = "\n\n".join(described(module, name))
        if len(body) > 400:
            held = bucket(name, 20) == 0
            yield Text(
                f"docstrings:{name}",
                "docstring",
                "held-out" if held else "train",
                body + "\n",
            )


def described(module: object, name: str) -> Iterator[str]:
    """Docstrings of a module's functions, classes and their methods."""
    seen: set[str] = set()
    members = [(name, module)]
    for key, value in sorted(vars(module).items()):
        if key.startswith("__"):
            continue
        members.append((f"{name}.{key}", value))
        if inspect.isclass(value):
            members += [
                (f"{name}.{key}.{k}", v) for k, v in sorted(vars(value).items())
            ]
    for key, value in members:
        doc = getattr(value, "__doc__", None)
        if isinstance(doc, str) and len(doc) > 100 and doc not in seen:
            seen.add(doc)
            yield f"{key}\n\n{inspect.cleandoc(doc)}"


def shingles(body: str) -> set[int]:
    """A sample of one in four of the hashes of all runs of eight words."""
    words = re.findall(r"\w+", body)
    hashes = (
        zlib.crc32(" ".join(words[i : i + SHINGLE_WORDS]).encode())
        for i in range(len(words) - SHINGLE_WORDS + 1)
    )
    return {value for value in hashes if value % 4 == 0}


def without_near_duplicates(texts: list[Text]) -> list[Text]:
    """Drops a text when an earlier one holds half of its runs of eight words.

    Held-out texts come first, so that a training text near to one of them goes.
    Containment, not Jaccard similarity: a copy inside a longer file counts too.
    """
    owners: dict[int, list[int]] = {}
    sizes: list[int] = []
    kept: list[Text] = []
    for text in sorted(texts, key=lambda text: (text.split, text.kind, text.name)):
        marks = shingles(text.body)
        shared = Counter(owner for mark in marks for owner in owners.get(mark, ()))
        if any(
            count > NEAR_DUPLICATE * min(len(marks), sizes[owner])
            for owner, count in shared.items()
        ):
            continue
        for mark in marks:
            owners.setdefault(mark, []).append(len(kept))
        sizes.append(max(len(marks), 8))
        kept.append(text)
    return kept
