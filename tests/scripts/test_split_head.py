"""A head split from the shards is unchanged, and so is the target."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model
from split_head import SIDECAR, app, split_head
from typer.testing import CliRunner

from mlx_speculation import demo_models
from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models import MtpConvention, load
from mlx_speculation.models.safetensors_layout import places_in
from support.covering import others_slow
from support.models.mtp_checkpoints import (
    EACH_KIND,
    LAYOUTS,
    flat,
    read_mtp_head,
    save,
    write,
)


def stored(*files: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    parts = {}
    for file in files:
        whole = file.read_bytes()
        for name, place in places_in(file).items():
            parts[name] = place.dtype, place.shape, whole[place.begin : place.end]
    return parts


@pytest.mark.parametrize("name", others_slow(LAYOUTS, EACH_KIND))
def test_every_byte_is_where_it_belongs_and_mlx_lm_alone_loads_the_target(
    name: str, tmp_path: Path
) -> None:
    made = write(tmp_path / "model", name)
    before = stored(*made.folder.glob("*.safetensors"))
    done = split_head(made.folder, tmp_path / "out")
    head = stored(done.folder / SIDECAR)
    trunk = stored(*done.folder.glob("model*.safetensors"))
    assert head.keys() == made.tensors.keys() == set(done.head)
    assert not head.keys() & trunk.keys()
    assert head | trunk == before
    assert done.trunk == len(trunk)
    index = json.loads(
        (done.folder / "model.safetensors.index.json").read_text(encoding="utf-8")
    )
    assert index["weight_map"].keys() == trunk.keys()
    assert index["metadata"]["total_size"] == sum(len(t[2]) for t in trunk.values())
    model, _ = load_model(done.folder)
    assert flat(model).keys() == flat(made.target).keys()
    known = read_mtp_head(made.folder, made.target)
    after = read_mtp_head(done.folder, model)
    assert after.convention == known.convention
    ours, theirs = flat(after), flat(known)
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[n], theirs[n]) for n in ours)


def test_weights_that_the_index_does_not_name_are_left(tmp_path: Path) -> None:
    made = write(tmp_path / "model", "qwen3_5")
    files = sorted(made.folder.glob("*.safetensors"))
    before = stored(*files)
    weights: Any = mx.load(str(files[0]))
    others = {name: value * 0.5 for name, value in weights.items()}
    save(made.folder / "model-old.safetensors", others)
    done = split_head(made.folder, tmp_path / "out")
    assert stored(*done.folder.glob("*.safetensors")) == before


def test_a_quantized_head_stays_as_it_is(tmp_path: Path) -> None:
    folder = demo_models()["hybrid"]
    done = split_head(folder, tmp_path / "out")
    before = stored(folder / "model.safetensors")
    head = stored(done.folder / SIDECAR)
    assert head | stored(done.folder / "model.safetensors") == before
    assert "F16" in {dtype for dtype, *_ in head.values()}
    assert "U32" in {dtype for dtype, *_ in head.values()}
    model, _ = load(done.folder)
    convention = MtpConvention(norms="stored")
    ours = flat(read_mtp_head(done.folder, model, convention=convention))
    theirs = flat(read_mtp_head(folder, model, convention=convention))
    assert all(mx.array_equal(ours[n], theirs[n]) for n in theirs)


def test_other_dtypes_stay_as_they_are(tmp_path: Path) -> None:
    made = write(tmp_path / "model", "mimo")
    kinds = [mx.bfloat16, mx.float16, mx.int8, mx.uint16, mx.int64, mx.bool_]
    shard = made.folder / "model-00002-of-00002.safetensors"
    tensors = {
        name: value.astype(kinds[i % len(kinds)])
        for i, (name, value) in enumerate(made.tensors.items())
    }
    save(shard, tensors)
    raw = shard.read_bytes().replace(b'"dtype":"U16"', b'"dtype":"I16"')
    raw = raw.replace(b'"dtype":"I8"', b'"dtype":"U8"')
    shard.write_bytes(raw)
    before = stored(shard)
    done = split_head(made.folder, tmp_path / "out")
    assert stored(done.folder / SIDECAR) == before
    assert {kind for kind, *_ in before.values()} == {
        "BF16", "F16", "U8", "I16", "I64", "BOOL",
    }  # fmt: skip


def test_what_else_is_in_the_folder_goes_along(tmp_path: Path) -> None:
    made = write(tmp_path / "model", "mimo")
    (made.folder / "more").mkdir()
    (made.folder / "more" / "notes.txt").write_text("notes", encoding="utf-8")
    done = split_head(made.folder, tmp_path / "out")
    assert (done.folder / "more" / "notes.txt").read_text(encoding="utf-8") == "notes"
    for name in ("config.json", "tokenizer.json"):
        same = (done.folder / name).read_bytes() == (made.folder / name).read_bytes()
        assert same


def test_what_cannot_be_split_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    made = write(tmp_path / "model", "mimo")
    (tmp_path / "there").mkdir()
    with pytest.raises(ModelFolderError, match="exists, and a new folder"):
        split_head(made.folder, tmp_path / "there")
    done = split_head(made.folder, tmp_path / "out")
    with pytest.raises(ModelFolderError, match=r"already in mtp\.safetensors"):
        split_head(done.folder, tmp_path / "again")
    (done.folder / SIDECAR).unlink()
    with pytest.raises(ModelFolderError, match="holds no MTP head"):
        split_head(done.folder, tmp_path / "again")
    with pytest.raises(ModelFolderError, match="of this family are not known"):
        split_head(demo_models()["dense"], tmp_path / "again")
    shard: Any = made.folder / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    (made.folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelFolderError, match="cannot be read"):
        split_head(made.folder, tmp_path / "again")
    assert {each.name for each in tmp_path.iterdir()} == {"model", "there", "out"}


def test_the_script_splits_and_says_what_it_did(tmp_path: Path) -> None:
    made = write(tmp_path / "model", "mimo")
    folders = [str(made.folder), str(tmp_path / "out")]
    done = CliRunner().invoke(app, folders, catch_exceptions=False)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["head"] == len(made.tensors)
    assert said["model"] == len(stored(*(tmp_path / "out").glob("model*.safetensors")))
    assert (tmp_path / "out" / SIDECAR).is_file()
