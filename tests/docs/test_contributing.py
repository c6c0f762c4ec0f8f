"""CONTRIBUTING says why tests are slow."""

import re
from fnmatch import fnmatch

from support.pages import ROOT

TESTS = ROOT / "tests"
# Columns: a folder, file or pattern; what its tests add; why it is slow; minutes.
LINE = re.compile(r"^\| `([\w/.*]+)` \| .+ \| .+ \|.*\|$", re.MULTILINE)


def test_every_slow_test_is_in_the_table_and_each_line_has_some() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    lines = LINE.findall(text[text.index("## Quick and slow tests") :])
    slow = [
        path.relative_to(ROOT)
        for path in TESTS.rglob("test_*.py")
        if re.search(r"\bmark\.slow\b", path.read_text("utf-8"))
    ]
    by_line = {
        line: [
            path
            for path in slow
            if path.is_relative_to(line) or fnmatch(str(path), line)
        ]
        for line in lines
    }
    assert [line for line, paths in by_line.items() if not paths] == []
    listed = {path for paths in by_line.values() for path in paths}
    assert [str(path) for path in slow if path not in listed] == []
