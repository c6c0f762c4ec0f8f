"""speculation.json: its fields, and a draft in the target's folder or beside it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models import read_config
from mlx_speculation.models.checkpoints import read_pair
from mlx_speculation.models.checkpoints.speculation_json import NAME
from mlx_speculation.models.config_json import read_json

KINDS = ("mtp", "eagle", "model")


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    for name in ("all/target/draft/deep", "all/small", "far"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "all/target/draft/file").write_text("", encoding="utf-8")
    (tmp_path / "all/target/link").symlink_to(tmp_path / "far")
    (tmp_path / "all/near").symlink_to(tmp_path / "all/small")
    return tmp_path / "all" / "target"


def said(folder: Path, value: Any) -> None:
    (folder / NAME).write_text(json.dumps(value), encoding="utf-8")


def test_without_a_file_nothing_is_said(folder: Path) -> None:
    assert read_pair(folder, KINDS) is None
    (folder / NAME).symlink_to(folder / "nothing")
    with pytest.raises(ModelFolderError, match="cannot be read"):
        read_pair(folder, KINDS)


def test_all_fields_are_read(folder: Path) -> None:
    convention = {"hidden": "before_norm", "norms": ["norm_e"]}
    said(
        folder,
        {"draft": "mtp", "kind": "mtp", "convention": convention, "draft_length": 2},
    )
    pair = read_pair(folder, KINDS)
    assert pair is not None
    assert (pair.draft, pair.kind, pair.draft_length) == ("mtp", "mtp", 2)
    assert pair.convention == convention
    assert pair.folder is None


@pytest.mark.parametrize(
    ("draft", "where"),
    [
        ("draft", "target/draft"),
        ("./draft/deep", "target/draft/deep"),
        ("../small", "small"),
        ("../near", "small"),
    ],
)
def test_a_folder_in_the_target_s_or_beside_it_is_named(
    draft: str, where: str, folder: Path
) -> None:
    said(folder, {"draft": draft})
    pair = read_pair(folder, KINDS)
    assert pair is not None
    assert pair.folder == (folder.parent / where).resolve()


@pytest.mark.parametrize(
    "draft",
    [
        "",
        ".",
        "..",
        "../target",
        "../../far",
        "draft/..",
        "link",
        "missing",
        "draft/file",
        "~",
        "~/draft",
        "https://example.org/draft",
        "C:\\draft",
        "draft\\deep",
        "dra\0ft",
        "organisation/model",
        "/",
        None,
        7,
        ["draft"],
        True,
    ],
)
def test_other_paths_are_refused(draft: Any, folder: Path) -> None:
    said(folder, {"draft": draft})
    with pytest.raises(ModelFolderError, match=r"speculation\.json' has draft = "):
        read_pair(folder, KINDS)


@pytest.mark.parametrize("draft", [".", "..", "../target"])
def test_the_target_s_own_folder_and_its_parent_are_named(
    draft: str, folder: Path
) -> None:
    said(folder, {"draft": draft})
    with pytest.raises(ModelFolderError, match="', which leads to '/"):
        read_pair(folder, KINDS)


def test_an_absolute_path_is_refused_also_to_the_right_folder(folder: Path) -> None:
    said(folder, {"draft": str(folder / "draft")})
    with pytest.raises(ModelFolderError, match="next to it, such as"):
        read_pair(folder, KINDS)


parts = st.sampled_from(
    ["..", ".", "draft", "deep", "small", "link", "target", "~", "", "near", "a b"]
)


@given(pieces=st.lists(parts, max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_path_leads_away(pieces: list[str], folder: Path) -> None:
    said(folder, {"draft": "/".join(pieces)})
    try:
        pair = read_pair(folder, KINDS)
    except ModelFolderError:
        return
    assert pair is not None
    assert pair.folder in {
        folder / "draft",
        folder / "draft" / "deep",
        folder.parent / "small",
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"draft": "mtp", "drafts": 4},
            "the field 'drafts', and only draft, kind, convention",
        ),
        ({}, "draft = None"),
        ({"draft": "mtp", "kind": "eagle"}, "kind = 'eagle', and one of mtp is"),
        ({"draft": "lookup", "kind": "mtp"}, "kind = 'mtp', and one of lookup is"),
        ({"draft": "draft", "kind": "lookup"}, "one of eagle, model, mtp is needed"),
        ({"draft": "mtp", "kind": 3}, "kind = 3"),
        ({"draft": "mtp", "kind": ["mtp"]}, r"kind = \['mtp'\]"),
        ({"draft": "mtp", "draft_length": -1}, "draft_length = -1, and a whole number"),
        ({"draft": "mtp", "draft_length": 2.0}, "draft_length = 2.0"),
        ({"draft": "mtp", "draft_length": True}, "draft_length = True"),
        ({"draft": "mtp", "draft_length": "2"}, "draft_length = '2'"),
        ({"draft": "mtp", "convention": {"position": 1}}, "unknown field 'position'"),
        ({"draft": "mtp", "convention": {"order": "sum"}}, "order of a convention is"),
        ({"draft": "mtp", "convention": "stored"}, "is a str, and an object"),
        ({"draft": "mtp", "convention": {"norms": ["norm"]}}, "norms of a convention"),
        ({"draft": "mtp", "convention": {"norms": []}}, "norms of a convention"),
        ({"draft": "lookup", "convention": {}}, 'a convention and draft = "lookup"'),
    ],
)
def test_a_field_that_is_wrong_is_refused_with_both_values(
    fields: dict[str, Any], message: str, folder: Path
) -> None:
    said(folder, fields)
    with pytest.raises(ModelFolderError, match=message):
        read_pair(folder, KINDS)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '"mtp"'])
def test_what_is_no_object_is_refused(text: str, folder: Path) -> None:
    (folder / NAME).write_text(text, encoding="utf-8")
    with pytest.raises(ModelFolderError, match=r"speculation\.json"):
        read_pair(folder, KINDS)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["hidden", "order", "norms", "x"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@given(
    fields=st.fixed_dictionaries(
        {"draft": st.sampled_from(["mtp", "lookup", "draft", 1])},
        optional=dict.fromkeys(("kind", "convention", "draft_length"), values),
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_stands_in_it_is_understood_or_refused(
    fields: dict[str, Any], folder: Path
) -> None:
    said(folder, fields)
    try:
        pair = read_pair(folder, KINDS)
    except ModelFolderError:
        return
    assert pair is not None
    assert pair.draft_length is None or pair.draft_length >= 0
    assert pair.kind is None or pair.kind in (*KINDS, "lookup")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "has more than 65536 bytes"),
        ("[" * 50_000, "nested too deep"),
        ('{"draft":' * 7_000, "nested too deep"),
        ('{"draft": "lookup", "draft": "mtp"}', "has the key 'draft' twice"),
        ('{"draft": "mtp", "convention": {"order": 1, "order": 2}}', "'order' twice"),
        (" " * (1 << 16) + '{"draft": "lookup"}', "has more than 65536 bytes"),
        ('{"draft": "\\ud800"}', "draft"),
        ('{"draft": "%s"}' % ("long" * 2000), "draft"),
    ],
)
def test_a_file_that_means_harm_is_refused_with_its_name_and_what_to_do(
    text: str, why: str, folder: Path
) -> None:
    (folder / NAME).write_text(text, encoding="utf-8")
    with pytest.raises(ModelFolderError, match=why) as refused:
        read_pair(folder, KINDS)
    assert str(folder / NAME) in str(refused.value)
    assert "or pass another draft= than 'auto'" in str(refused.value)


@pytest.mark.parametrize("read", [read_config, read_json])
def test_other_files_of_a_folder_are_refused_likewise(read: Any, folder: Path) -> None:
    file = folder / "config.json"
    file.write_text('{"a":' * 100_000, encoding="utf-8")
    with pytest.raises(ModelFolderError, match=r"nested too deep.*Download it again"):
        read(folder if read is read_config else file)
