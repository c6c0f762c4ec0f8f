"""A string names the same kind of drafter in every interface, see `DOORS`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation import (
    ModelFolderError,
    PrefixCache,
    SpeculativeGenerator,
    load,
    stream_generate,
)
from mlx_speculation.cli.console import Screen
from mlx_speculation.cli.load_pair import open_pair
from mlx_speculation.cli.options import PairOptions
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.models import MtpConvention
from support.covering import covering, others_slow
from support.models.demo_folders import probed
from support.models.eagle_checkpoints import write_eagle
from support.models.mtp_checkpoints import write, write_tiny
from support.processes.servers import serving

PROMPT = "def area(width, height):\n"
TOKENS = 8
OPTIONS: dict[str, Any] = {"max_tokens": TOKENS}


def counted(generator: SpeculativeGenerator) -> Statistics:
    return generator.generate(PROMPT, **OPTIONS).stats


def constructor(folder: Path, draft: str) -> Statistics:
    return counted(SpeculativeGenerator(*load(folder), draft=draft))


def from_pretrained(folder: Path, draft: str) -> Statistics:
    return counted(SpeculativeGenerator.from_pretrained(folder, draft=draft))


def dropped_in(folder: Path, draft: str) -> Statistics:
    model, tokenizer = load(folder)
    responses = list(
        stream_generate(model, tokenizer, PROMPT, TOKENS, draft_model=draft)
    )
    stats = responses[-1].stats
    assert stats is not None
    return stats


def command_line(folder: Path, draft: str) -> Statistics:
    pair = PairOptions(model=str(folder), draft=draft)
    return counted(open_pair(pair, Screen(json=True)))


def server(folder: Path, draft: str) -> Statistics:
    stats: list[Statistics] = []

    def make(prefixes: PrefixCache | None) -> SpeculativeGenerator:
        pair = PairOptions(model=str(folder), draft=draft)
        made = open_pair(pair, Screen(json=True), prefix_cache=prefixes)
        stats.append(counted(made))
        return made

    with serving(make, draft=draft):
        return stats[0]


DOORS: dict[str, Callable[[Path, str], Statistics]] = {
    "constructor": constructor,
    "from_pretrained": from_pretrained,
    "drop-in": dropped_in,
    "command line": command_line,
    "server": server,
}


@pytest.fixture(name="hybrid", scope="module")
def _hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = write(tmp_path_factory.mktemp("doors"), "qwen3_5")
    convention = MtpConvention(norms="stored")
    return probed(written.folder, written.target, convention)


@pytest.mark.parametrize(("draft", "door"), covering(["mtp", "auto"], DOORS))
def test_a_head_in_the_targets_folder_drafts(
    draft: str, door: str, hybrid: Path
) -> None:
    stats = DOORS[door](hybrid, draft)
    assert set(stats.sources) == {"mtp"}
    assert stats.drafts > 0


@pytest.fixture(name="folders", scope="module")
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a target, a draft model that is always right, and a head that never is."""
    made = tmp_path_factory.mktemp("folders")
    write_tiny(made / "target", layers=4)
    write_tiny(made / "draft", layers=4)
    write_eagle(made / "eagle", "specforge")
    return made


KINDS = {"draft": "model", "eagle": "eagle", "lookup": "lookup"}


@pytest.mark.usefixtures("usual_layers")
@pytest.mark.parametrize(("draft", "door"), covering(KINDS, DOORS))
def test_a_path_and_a_lookup_draft(draft: str, door: str, folders: Path) -> None:
    kind = KINDS[draft]
    name = draft if draft == "lookup" else str(folders / draft)
    stats = DOORS[door](folders / "target", name)
    assert set(stats.sources) <= {kind}
    assert not stats.drafter_faults
    assert draft == "lookup" or stats.sources[kind].drafted > 0
    assert draft != "draft" or stats.sources[kind].accepted > 0


@pytest.mark.parametrize("door", others_slow(DOORS, ["constructor", "command line"]))
def test_the_length_in_the_targets_folder_counts(door: str, hybrid: Path) -> None:
    file = hybrid / "speculation.json"
    file.write_text('{"draft": "mtp", "draft_length": 2}', encoding="utf-8")
    try:
        assert len(DOORS[door](hybrid, "auto").reached) == 2
    finally:
        file.unlink()


@pytest.mark.parametrize("door", DOORS)
def test_what_is_no_draft_is_refused_alike(door: str, folders: Path) -> None:
    with pytest.raises(ModelFolderError, match="no folder 'no/such/draft'"):
        DOORS[door](folders / "target", "no/such/draft")
