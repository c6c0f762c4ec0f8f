"""Every Python snippet of the README and the documentation runs.

The snippets of a page share one namespace. Model paths lead to the smallest bundled
model. tests/docs/test_extending.py covers the pages in `ELSEWHERE`.
"""

from pathlib import Path
from typing import Any

import pytest

from mlx_speculation import SpeculativeGenerator
from support.pages import TEXTS, blocks, name_of
from support.pages_folder import CHAT, fill
from support.processes.reader import Reader
from support.processes.servers import serving

ADDRESS = "http://127.0.0.1:8080"
SHOWN = {
    name_of(page): blocks(page, "python") for page in TEXTS if blocks(page, "python")
}
ELSEWHERE = {"docs/extending.md", "docs/new_drafter.md"}


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    fill(folder)
    return folder


def test_pages_with_snippets_are_those_that_are_run() -> None:
    assert "README.md" in SHOWN
    assert len(SHOWN) >= 12
    assert not [name for name in SHOWN if name.startswith("docs/log/")]


@pytest.mark.parametrize("page", sorted(SHOWN.keys() - ELSEWHERE - {"docs/server.md"}))
def test_snippets_run(page: str, folder: Path, reader: Reader) -> None:
    assert reader.snippets(page, SHOWN[page], folder).out


def test_the_first_snippet_is_short_and_chats() -> None:
    code = [line for line in SHOWN["README.md"][0].splitlines() if line.strip()]
    assert len(code) <= 8
    assert CHAT in SHOWN["README.md"][0]


def test_clients_of_the_server_get_what_is_shown(folder: Path, reader: Reader) -> None:
    def make(prefixes: Any) -> SpeculativeGenerator:
        return SpeculativeGenerator.from_pretrained(
            folder / CHAT, draft="lookup", prefix_cache=prefixes
        )

    limits = {"max_tokens": 256}
    with serving(make, draft="lookup", limits=limits) as server:
        page = "docs/server.md"
        blocks = [block.replace(ADDRESS, server.url) for block in SHOWN[page]]
        said = reader.snippets(page, [*blocks, "client.close()"], folder)
    person = said.out.splitlines()[-1]
    assert "name" in person
    assert "age" in person
