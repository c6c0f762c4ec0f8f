"""Finding a head: places, their precedence, and the tensors that are read."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models import load
from mlx_speculation.models.checkpoints.convention import MtpConvention
from mlx_speculation.models.mtp.families import family_of
from mlx_speculation.models.mtp.family import MtpFamily, without_wrappers
from mlx_speculation.models.mtp.files import HeadFiles, find_head
from mlx_speculation.models.mtp.head import MtpHead
from mlx_speculation.models.mtp.load_with_convention import load_mtp_head
from support.models.mtp_checkpoints import (
    LAYOUTS,
    Weights,
    flat,
    head_tensors,
    make,
    read_mtp_head,
    save,
    trunk_tensors,
    write_folder,
)

QWEN = LAYOUTS["qwen3_5"]
STORED = MtpConvention(norms="stored")
PLACES = [
    "mtp.safetensors",
    "mtp/weights.safetensors",
    "model-mtp.safetensors",
    "model-mtp-head.safetensors",
    "optiq/mtp.safetensors",
    "my-mtp-head.safetensors",
    "the_mtp_part/a.safetensors",
]


@pytest.fixture(name="made", scope="module")
def _made() -> tuple[dict[str, Any], nn.Module, MtpHead]:
    return make("qwen3_5")


Made = tuple[dict[str, Any], nn.Module, MtpHead]


def converted(folder: Path, made: Made, **keys: Any) -> Weights:
    """Write a converted target without a head; return the head's tensors."""
    config, target, head = made
    write_folder(folder, {**config, **keys}, [flat(target)], kind="mlx")
    return head_tensors(QWEN, target, head, raw=False)


def head_files(folder: Path, made: Made) -> HeadFiles:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return find_head(folder, config, _family(), len(made[1].layers))


def _family() -> MtpFamily:
    family = family_of("mlx_lm.models.qwen3_5")
    assert family is not None
    return family


def marked(tensors: Weights, value: float) -> Weights:
    """Return tensors whose final norm has the given value, to identify their file."""
    return {**tensors, "mtp.norm.weight": mx.full((64,), value)}


@pytest.mark.parametrize("place", PLACES)
def test_a_head_beside_the_target_is_found(
    place: str, made: Made, tmp_path: Path
) -> None:
    tensors = converted(tmp_path, made)
    save(tmp_path / place, tensors)
    files = head_files(tmp_path, made)
    assert (files.source, files.in_shards, len(files.tensors)) == (place, False, 15)
    model, _ = load(tmp_path)
    head = load_mtp_head(tmp_path, model, convention=STORED)
    assert all(mx.array_equal(v, flat(head)[n]) for n, v in flat(made[2]).items())


def test_the_first_place_wins(made: Made, tmp_path: Path) -> None:
    tensors = converted(tmp_path, made)
    config = tmp_path / "config.json"
    named = {"mlx_lm_extra_tensors": {"mtp_file": "named.safetensors"}}
    text = json.dumps(json.loads(config.read_text(encoding="utf-8")) | named)
    config.write_text(text, encoding="utf-8")
    places = ["named.safetensors", *PLACES]
    for value, place in enumerate(places):
        save(tmp_path / place, marked(tensors, value))
    for value, place in enumerate(places):
        files = head_files(tmp_path, made)
        assert files.source == place
        assert files.read()["layers.0.final.weight"][0].item() == value
        (tmp_path / place).unlink()
        if value == 0:
            text = text.replace("mlx_lm_extra_tensors", "was")
            config.write_text(text, encoding="utf-8")


def test_a_file_without_a_head_is_passed_by(made: Made, tmp_path: Path) -> None:
    tensors = converted(tmp_path, made)
    save(tmp_path / "mtp.safetensors", {"something.else": mx.ones(3)})
    save(tmp_path / "model-mtp.safetensors", tensors)
    assert head_files(tmp_path, made).source == "model-mtp.safetensors"


@pytest.mark.parametrize("name", ["nowhere.safetensors", "../out.safetensors"])
def test_a_named_file_that_is_not_in_the_folder_is_refused(
    name: str, made: Made, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    tensors = converted(folder, made, mlx_lm_extra_tensors={"mtp_file": name})
    save(tmp_path / "out.safetensors", tensors)
    with pytest.raises(ModelFolderError, match="as the file of the MTP head"):
        head_files(folder, made)


@pytest.mark.parametrize(
    "prefix",
    [
        "mtp.",
        "model.mtp.",
        "language_model.mtp.",
        "language_model.model.mtp.",
        "model.language_model.mtp.",
        "draft.mtp.",
        "",
    ],
)
def test_names_may_have_wrappers_or_no_beginning(
    prefix: str, made: Made, tmp_path: Path
) -> None:
    tensors = converted(tmp_path, made)
    file = tmp_path / "model-mtp.safetensors"  # mlx-lm takes it for a shard
    save(file, {prefix + n.removeprefix("mtp."): v for n, v in tensors.items()})
    model, _ = load(tmp_path)
    head = load_mtp_head(tmp_path, model, convention=STORED)
    assert flat(head).keys() == flat(made[2]).keys()


def test_wrappers_are_taken_off() -> None:
    for wrapper in ("model.", "language_model.model.", "model.language_model."):
        name = f"{wrapper}layers.61.eh_proj.weight"
        assert without_wrappers(name) == "layers.61.eh_proj.weight"
    assert without_wrappers("backbone.layers.3.x") == "layers.3.x"
    assert without_wrappers("models.layers.3.x") == "models.layers.3.x"


@pytest.mark.parametrize("index", [True, False])
def test_a_head_in_the_shards_is_found_with_and_without_an_index(
    index: bool, made: Made, tmp_path: Path
) -> None:
    config, target, head = made
    parts = [trunk_tensors(QWEN, target), head_tensors(QWEN, target, head)]
    write_folder(tmp_path, config, parts, index=index)
    files = head_files(tmp_path, made)
    assert files.in_shards
    assert {s.file.name for s in files.tensors.values()} == {
        "model-00002-of-00002.safetensors"
    }
    loaded = load_mtp_head(tmp_path, target, convention=MtpConvention())
    assert loaded.convention.norms == "plus_one"


def test_an_index_of_before_the_conversion_does_not_make_a_head(
    made: Made, tmp_path: Path
) -> None:
    config, target, _ = made
    write_folder(tmp_path, config, [flat(target)])
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text(encoding="utf-8"))
    index["weight_map"]["mtp.fc.weight"] = "model-00001-of-00001.safetensors"
    file.write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelFolderError, match="holds no MTP head"):
        head_files(tmp_path, made)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_a_cut_file_is_refused_by_its_name(
    keep: int, made: Made, tmp_path: Path
) -> None:
    tensors = converted(tmp_path, made)
    file = tmp_path / "mtp.safetensors"
    save(file, tensors)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelFolderError, match=r"mtp\.safetensors' cannot be read"):
        load_mtp_head(tmp_path, made[1], convention=STORED)


def test_the_same_tensor_in_two_files_of_one_place_is_refused(
    made: Made, tmp_path: Path
) -> None:
    tensors = converted(tmp_path, made)
    save(tmp_path / "a-mtp.safetensors", tensors)
    save(tmp_path / "b-mtp.safetensors", {"mtp.fc.weight": tensors["mtp.fc.weight"]})
    with pytest.raises(ModelFolderError, match="are the same tensor"):
        head_files(tmp_path, made)


def test_a_head_may_be_in_several_files_of_one_place(
    made: Made, tmp_path: Path
) -> None:
    tensors = converted(tmp_path, made)
    names = sorted(tensors)
    for i in range(2):
        part = {name: tensors[name] for name in names[i::2]}
        save(tmp_path / "mtp" / f"{i}.safetensors", part)
    assert len(head_files(tmp_path, made).tensors) == 15


def test_only_the_wanted_tensors_are_read(made: Made, tmp_path: Path) -> None:
    tensors = converted(tmp_path, made)
    file = tmp_path / "mtp.safetensors"
    save(file, tensors)
    _append_sparse(file, "model.layers.0.huge.weight", gigabytes=40)
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    read_mtp_head(tmp_path, made[1], convention=STORED)
    assert mx.get_peak_memory() - active < 2**24


def _append_sparse(file: Path, name: str, *, gigabytes: int) -> None:
    """Add a tensor larger than memory to a safetensors file, without data on disk."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    rows = gigabytes * 2**30 // 4096
    header[name] = {
        "dtype": "F32",
        "shape": [rows, 1024],
        "data_offsets": [len(data), len(data) + rows * 4096],
    }
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text + data)
        out.truncate(8 + len(text) + len(data) + rows * 4096)
