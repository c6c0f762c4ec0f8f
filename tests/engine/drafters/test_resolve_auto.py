"""draft="auto": the draft that a folder offers, the fallbacks, and the notices."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest

from mlx_speculation import (
    ConventionError,
    DraftNotice,
    InvalidRequestError,
    ModelFolderError,
    Sampling,
    SpeculativeGenerator,
)
from mlx_speculation.engine import LookupDraft, MtpDraft
from mlx_speculation.engine.drafters.draft import members_of
from mlx_speculation.engine.drafters.draft_model import ModelDraft
from mlx_speculation.engine.drafters.registry import FOLDER_DRAFTS, draft_of_config
from mlx_speculation.models import MtpConvention
from support.identity import plain_text, prompt_of
from support.models.block_checkpoints import write_block
from support.models.demo_folders import copy_of
from support.models.eagle_checkpoints import write_eagle
from support.models.mtp_checkpoints import flat, make, write, write_folder, write_tiny

AUTO: dict[str, Any] = {"draft": "auto"}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_SPECULATION_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@contextmanager
def said() -> Iterator[list[str]]:
    notices: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notices
    notices += [str(w.message) for w in caught if w.category is DraftNotice]
    assert len(notices) == len(caught)


def pair(folder: Path, **fields: Any) -> None:
    (folder / "speculation.json").write_text(json.dumps(fields), encoding="utf-8")


@pytest.fixture(name="hybrid", scope="module")
def _hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "hybrid"
    return copy_of("hybrid", folder)


@pytest.mark.slow  # quick tests: test_load_with_convention.py, test_front_doors.py
@pytest.mark.usefixtures("short_probe")
@pytest.mark.parametrize("draft", ["auto", "mtp"])
def test_a_trained_head_is_found_probed_and_drafts(draft: str, hybrid: Path) -> None:
    with said() as notices:
        made = SpeculativeGenerator.from_pretrained(hybrid, draft=draft)
    assert notices == list(made.notices) == []
    head: Any = members_of(made._setup.draft)[0]
    assert (draft == "auto") == (members_of(made._setup.draft)[-1].kind == "lookup")
    assert head.mtp.head.convention == MtpConvention(norms="stored")
    prompt = made.tokenizer.encode("def add(first, second):\n")
    result = made.generate(prompt, max_tokens=16)
    assert result.tokens == plain_text(made.model, prompt, 16)
    assert result.stats.accepted_per_position[0] > 0.7
    assert result.stats.sources["mtp"].accepted > 10


def test_without_a_head_a_lookup_is_alone(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "llama")
    with said() as notices:
        made = SpeculativeGenerator.from_pretrained(tmp_path / "llama", **AUTO)
        result = made.generate(prompt_of(20), max_tokens=12)
        made.generate(prompt_of(20), max_tokens=2)
    assert notices == list(made.notices) == []
    assert isinstance(made._setup.draft, LookupDraft)
    assert result.tokens == plain_text(model, prompt_of(20), 12)
    assert made.draft_length is None


def test_a_declared_head_that_is_not_there_is_said(tmp_path: Path) -> None:
    config, target, _ = make("mimo")
    write_folder(tmp_path, config, [flat(target)], kind="mlx")
    with said() as notices:
        SpeculativeGenerator.from_pretrained(tmp_path, **AUTO)
    assert "config.json has num_nextn_predict_layers = 1" in notices[0]


def test_a_head_that_the_probe_refuses_is_said_with_its_scores(tmp_path: Path) -> None:
    made = write(tmp_path / "mimo", "mimo")
    with said() as notices:
        generator = SpeculativeGenerator.from_pretrained(made.folder, **AUTO)
    assert isinstance(generator._setup.draft, LookupDraft)
    assert len(notices) == 1
    assert notices[0].count("agrees") >= 4
    with pytest.raises(ConventionError, match=r"not predict .* with any convention"):
        SpeculativeGenerator.from_pretrained(made.folder, draft="mtp")


@pytest.mark.parametrize("where", ["target/draft", "small"])
def test_the_model_that_a_folder_names_drafts(where: str, tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "target")
    write_tiny(tmp_path / where)
    path = "draft" if where == "target/draft" else "../small"
    pair(tmp_path / "target", draft=path, kind="model", draft_length=2)
    with said() as notices:
        made = SpeculativeGenerator.from_pretrained(tmp_path / "target", **AUTO)
    assert notices == []
    assert isinstance(made._setup.draft, ModelDraft)
    sampling = Sampling(temperature=0.8, seed=3)
    plain = SpeculativeGenerator(target, made.tokenizer)
    expected = plain.generate(prompt_of(20), max_tokens=20, sampling=sampling)
    result = made.generate(prompt_of(20), max_tokens=20, sampling=sampling)
    assert result.tokens == expected.tokens
    assert len(result.stats.reached) == 2
    longer = SpeculativeGenerator.from_pretrained(
        tmp_path / "target", draft_length=5, **AUTO
    )
    assert longer.draft_length == 5


def test_a_lookup_that_is_named_is_no_fall_back(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    pair(tmp_path, draft="lookup", draft_length=3)
    with said() as notices:
        made = SpeculativeGenerator.from_pretrained(tmp_path, **AUTO)
    assert notices == list(made.notices) == []
    assert isinstance(made._setup.draft, LookupDraft)
    assert made.draft_length == 3


def test_a_convention_in_the_file_counts_as_a_named_one(tmp_path: Path) -> None:
    """Other fields are the family's: MiMo heads read states before the final norm."""
    made = write(tmp_path / "mimo", "mimo")
    pair(made.folder, draft="mtp", convention={"order": "embedding_first"})
    with said() as notices:
        generator = SpeculativeGenerator.from_pretrained(made.folder, **AUTO)
    assert notices == []
    draft: Any = members_of(generator._setup.draft)[0]
    assert isinstance(draft, MtpDraft)
    assert draft.mtp.head.convention == MtpConvention(
        "before_norm", "before_norm", "embedding_first", "stored"
    )
    expected = plain_text(made.target, prompt_of(20), 12)
    assert generator.generate(prompt_of(20), max_tokens=12).tokens == expected


def test_a_named_head_that_the_probe_refuses_falls_back(tmp_path: Path) -> None:
    made = write(tmp_path / "mimo", "mimo")
    pair(made.folder, draft="mtp", draft_length=1)
    with said() as notices:
        generator = SpeculativeGenerator.from_pretrained(made.folder, **AUTO)
    assert "with any convention" in notices[0]
    assert isinstance(generator._setup.draft, LookupDraft)
    assert generator.draft_length == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft": "mtp"}, "are not supported; supported families are Qwen"),
        ({"draft": "../small", "kind": "eagle"}, "is of kind 'model'"),
        ({"draft": "../small", "convention": {}}, "it is for MTP heads"),
        ({"draft": "../empty"}, "lacks config.json"),
        ({"draft": "../nothing"}, "no such folder"),
        ({"draft": "small", "colour": 1}, "'colour'"),
    ],
)
def test_a_file_that_is_wrong_is_an_error_and_no_fall_back(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_tiny(tmp_path / "target")
    write_tiny(tmp_path / "small")
    (tmp_path / "empty").mkdir()
    pair(tmp_path / "target", **fields)
    with pytest.raises((ModelFolderError, TypeError), match=message):
        SpeculativeGenerator.from_pretrained(tmp_path / "target", **AUTO)


def test_the_file_counts_where_it_is_asked_for_alone(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    pair(tmp_path, draft="nonsense")
    assert SpeculativeGenerator.from_pretrained(tmp_path)._setup.draft is None
    made = SpeculativeGenerator.from_pretrained(tmp_path, draft="lookup")
    assert isinstance(made._setup.draft, LookupDraft)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("dflash2", "dflash2"),
        ("dspark", "deepspec"),
        ("dspark", "prism"),
        ("peagle", "aws"),
    ],
)
def test_the_file_may_name_a_head_of_any_kind(
    kind: str, name: str, tmp_path: Path
) -> None:
    """A head with an ambiguous list of layers is probed, and refused if random."""
    target = write_tiny(tmp_path / "target", layers=4)
    write_head = write_eagle if kind == "peagle" else write_block
    write_head(tmp_path / "head", name)
    pair(tmp_path / "target", draft="../head", kind=kind, draft_length=2)
    with said() as notices:
        made = SpeculativeGenerator.from_pretrained(tmp_path / "target", **AUTO)
    draft = made._setup.draft
    assert draft is not None
    if name in ("prism", "aws"):  # their lists of layers are ambiguous
        assert "clearly better than by chance" in notices[0]
        assert isinstance(draft, LookupDraft)
    else:
        assert notices == []
        assert draft.kind == kind
    result = made.generate(prompt_of(20), max_tokens=12)
    assert result.tokens == plain_text(target, prompt_of(20), 12)
    pair(tmp_path / "target", draft="../head", kind="dflash")
    with pytest.raises(ModelFolderError, match=f"is of kind '{kind}'"):
        SpeculativeGenerator.from_pretrained(tmp_path / "target", **AUTO)


def test_every_kind_has_a_name_and_the_last_one_fits_all() -> None:
    names = [draft.kind for draft in FOLDER_DRAFTS]
    assert len(set(names)) == len(names)
    assert draft_of_config({}).kind == names[-1] == "model"


def test_a_draft_that_is_chosen_is_quantized_where_it_has_weights(
    tmp_path: Path,
) -> None:
    write_tiny(tmp_path / "target")
    pair(tmp_path / "target", draft="lookup")
    SpeculativeGenerator.from_pretrained(tmp_path / "target", quantize_draft=4, **AUTO)
    write_tiny(tmp_path / "target" / "draft")
    pair(tmp_path / "target", draft="draft")
    made = SpeculativeGenerator.from_pretrained(
        tmp_path / "target", quantize_draft=4, **AUTO
    )
    draft: Any = made.draft_models[0]
    assert isinstance(draft.layers[0].mlp.up_proj, nn.QuantizedLinear)
    with pytest.raises(InvalidRequestError, match="7"):
        SpeculativeGenerator.from_pretrained(
            tmp_path / "target", quantize_draft=7, **AUTO
        )
