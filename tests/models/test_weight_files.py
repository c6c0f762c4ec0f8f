"""Only the weight files that a folder's index names are read.

mlx-lm reads every model*.safetensors, so a stray file would replace weights silently.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import EagleDraft, SpeculativeGenerator
from mlx_speculation.engine.drafters.registry import draft_of_folder
from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models import load
from mlx_speculation.models.load_model import _load_trunk
from mlx_speculation.models.mtp import find_mtp_head
from mlx_speculation.models.safetensors_layout import INDEX, named_files_only
from mlx_speculation.training.options import TrainOptions
from mlx_speculation.training.training_run import train
from support.models import assistant_checkpoints, eagle_checkpoints, mtp_checkpoints
from support.models.block_checkpoints import write_block
from support.models.chat_folders import chat_folder

PROMPT = [1, 2, 3]


def text_of(folder: Path, **options: Any) -> list[int]:
    generator = SpeculativeGenerator.from_pretrained(folder, **options)
    return generator.generate(PROMPT, max_tokens=8, stop_tokens=()).tokens


def tensors(file: Path) -> dict[str, mx.array]:
    loaded: Any = mx.load(str(file))
    return dict(loaded)


def save(file: Path, arrays: dict[str, mx.array]) -> None:
    mx.eval(arrays)
    mx.save_safetensors(str(file), arrays, {"format": "mlx"})


def divide(folder: Path, *, index: bool = True) -> None:
    """Divide the weights into two files; with `index`, write their index."""
    arrays = tensors(folder / "model.safetensors")
    mx.eval(arrays)
    (folder / "model.safetensors").unlink()
    names = sorted(arrays)
    parts = {f"model-{n}.safetensors": names[n - 1 :: 2] for n in (1, 2)}
    for file, tensor_names in parts.items():
        save(folder / file, {each: arrays[each] for each in tensor_names})
    if index:
        weight_map = {
            each: file for file, tensor_names in parts.items() for each in tensor_names
        }
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def other_weights(folder: Path, name: str) -> None:
    """Write a file of other values under the names of the model's tensors."""
    arrays = tensors(sorted(folder.glob("model*.safetensors"))[0])
    save(folder / name, {key: value * 0.5 for key, value in arrays.items()})


@pytest.mark.parametrize("family", ["llama", "qwen3", "mamba"])
@pytest.mark.parametrize("stray", ["model-old.safetensors", "model.bak.safetensors"])
def test_a_file_that_no_index_names_changes_nothing(
    family: str, stray: str, tmp_path: Path
) -> None:
    folder = chat_folder(tmp_path / "model", family)
    text = text_of(folder)
    divide(folder)
    assert text_of(folder) == text
    other_weights(folder, stray)
    # mlx-lm reads files in any order, so an equal text alone could be chance
    with named_files_only(folder) as files:
        ordered = sorted(file.name for file in files.glob("*.safetensors"))
        assert ordered == ["model-1.safetensors", "model-2.safetensors"]
        assert (files / "config.json").read_text() == (
            folder / "config.json"
        ).read_text()
    assert text_of(folder) == text
    assert text_of(folder, draft=folder) == text  # read as a draft model too


def test_without_an_index_files_that_overlap_are_refused(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "model")
    text = text_of(folder)
    other_weights(folder, "model-old.safetensors")
    both = r"'model-old.safetensors' and 'model.safetensors' in .* both hold '"
    for draft in (None, "lookup"):
        with pytest.raises(ModelFolderError, match=both):
            text_of(folder, draft=draft)
    (folder / "model-old.safetensors").unlink()
    divide(folder, index=False)  # disjoint files are one model
    assert text_of(folder) == text


def test_an_older_single_file_beside_shards_changes_nothing(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "model")
    text = text_of(folder)
    divide(folder)
    other_weights(folder, "model.safetensors")  # stands for older weights
    assert text_of(folder) == text


@pytest.mark.parametrize("keep", [1, 2])
def test_a_shard_that_is_gone_is_named(keep: int, tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "model")
    divide(folder)
    gone = f"model-{3 - keep}.safetensors"
    (folder / gone).unlink()
    with pytest.raises(ModelFolderError, match=rf"'{gone}' holds .* no such file"):
        load(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hosts"])
def test_an_index_does_not_lead_out_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "model")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelFolderError, match="is outside its folder"):
        load(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": 1}}))
    with pytest.raises(ModelFolderError, match="no weight_map of tensors and files"):
        load(folder)


def index_of(folder: Path) -> dict[str, str]:
    text = (folder / INDEX).read_text(encoding="utf-8")
    places: dict[str, str] = json.loads(text)["weight_map"]
    return places


def write_index(folder: Path, places: dict[str, str]) -> None:
    text = json.dumps({"weight_map": places})
    (folder / INDEX).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_file_that_lacks_what_the_index_says_is_named(
    family: str, tmp_path: Path
) -> None:
    """mlx-lm alone would tie the output layer to the embedding instead."""
    folder = chat_folder(tmp_path / "model", family)
    divide(folder)
    places = index_of(folder)
    write_index(folder, {**places, "lm_head.weight": "model-2.safetensors"})
    said = "'model-2.safetensors' in .* holds 'lm_head.weight', and it does not"
    with pytest.raises(ModelFolderError, match=said):
        load(folder)
    unused = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_index(folder, {**places, unused: "model-2.safetensors"})
    load(folder)


def test_a_tensor_in_two_named_files_is_refused(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "model")
    divide(folder)
    first, second = (folder / f"model-{n}.safetensors" for n in (1, 2))
    name = sorted(tensors(first))[0]
    twice = {**tensors(second), name: tensors(first)[name] * 0.5}
    save(second, twice)
    with pytest.raises(ModelFolderError, match=f"both hold '{name}', but only one"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', ""])
def test_a_damaged_index_is_refused(text: str, tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "model")
    head = eagle_checkpoints.write_eagle(tmp_path / "head", "specforge")
    for each in (folder, head):
        (each / INDEX).write_text(text, encoding="utf-8")
    with pytest.raises(ModelFolderError, match=r"index\.json"):
        load(folder)
    (folder / INDEX).unlink()
    with pytest.raises(ModelFolderError, match=r"index\.json"):
        text_of(folder, draft=head)


def test_the_only_file_is_named_where_it_is_gone(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "model")
    names = tensors(folder / "model.safetensors")
    write_index(folder, dict.fromkeys(names, "model-1-of-1.safetensors"))
    with pytest.raises(ModelFolderError, match=r"'model-1-of-1\.safetensors' holds"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"'model-1-of-1\.safetensors' holds"):
        load(folder)


def test_a_named_file_may_have_any_name(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "model")
    text = text_of(folder)
    divide(folder)
    (folder / "parts").mkdir()
    (folder / "model-1.safetensors").rename(folder / "parts" / "a.safetensors")
    moved = {"model-1.safetensors": "parts/a.safetensors"}
    places = {name: moved.get(file, file) for name, file in index_of(folder).items()}
    write_index(folder, places)
    other_weights(folder, "model.safetensors")
    assert text_of(folder) == text


def test_weights_are_read_after_the_links_are_gone(tmp_path: Path) -> None:
    """Ranks load weights lazily: each rank reads its part after the load."""
    folder = chat_folder(tmp_path / "model")
    divide(folder)
    other_weights(folder, "model-old.safetensors")
    model, _ = _load_trunk(folder, False, lazy=True)
    names = index_of(folder)
    for name, value in mtp_checkpoints.flat(model).items():
        stored = tensors(folder / names[name])[name]
        assert mx.array_equal(value, stored), name


@pytest.mark.parametrize("name", ["model-mtp.safetensors", "consolidated.safetensors"])
def test_copies_in_a_file_beside_the_model_are_not_read(
    name: str, tmp_path: Path
) -> None:
    """The file of a head may hold the target's embedding in another precision."""
    folder = chat_folder(tmp_path / "model")
    text = text_of(folder)
    other_weights(folder, name)
    with named_files_only(folder) as files:
        kept = [file.name for file in files.glob("model*.safetensors")]
    assert kept == ["model.safetensors"]
    assert text_of(folder) == text


def head_in_shards(folder: Path) -> tuple[Any, dict[str, mx.array]]:
    """Write a checkpoint with the head in its index; return checkpoint and tensors."""
    made = mtp_checkpoints.write(folder, "qwen3_5")
    files = sorted(made.folder.glob("*.safetensors"))
    arrays = {key: value for file in files for key, value in tensors(file).items()}
    mx.eval(arrays)
    for file in files:
        file.unlink()
    head = {name: value for name, value in arrays.items() if "mtp." in name}
    trunk = {name: value for name, value in arrays.items() if name not in head}
    save(made.folder / "model-1.safetensors", trunk)
    save(made.folder / "model-2.safetensors", head)
    places = dict.fromkeys(trunk, "model-1.safetensors")
    places |= dict.fromkeys(head, "model-2.safetensors")
    write_index(made.folder, places)
    return made, arrays


def leave_out_head(folder: Path) -> None:
    places = index_of(folder)
    write_index(folder, {k: v for k, v in places.items() if "mtp." not in k})


def test_a_head_in_a_shard_that_the_index_leaves_out_is_found(tmp_path: Path) -> None:
    made, _ = head_in_shards(tmp_path)
    leave_out_head(made.folder)
    assert find_mtp_head(made.folder, made.target).files.in_shards


@pytest.mark.parametrize("name", ["mtp-old.safetensors", "model-mtp.safetensors"])
def test_a_head_that_the_index_names_rules_over_others(
    name: str, tmp_path: Path
) -> None:
    made, arrays = head_in_shards(tmp_path)
    head = {key: value * 0.5 for key, value in arrays.items() if "mtp." in key}
    save(made.folder / name, head)
    files = find_mtp_head(made.folder, made.target).files
    assert {each.file.name for each in files.tensors.values()} == {
        "model-2.safetensors"
    }
    (made.folder / "model-2.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"'model-2\.safetensors' holds"):
        find_mtp_head(made.folder, made.target)


def test_the_head_of_another_checkpoint_is_not_taken(tmp_path: Path) -> None:
    made, arrays = head_in_shards(tmp_path)
    (made.folder / "model-2.safetensors").unlink()
    leave_out_head(made.folder)
    save(made.folder / "model-old.safetensors", arrays)
    said = "holds no MTP head .*the head in 'model-old.safetensors' is not used"
    with pytest.raises(ModelFolderError, match=said):
        find_mtp_head(made.folder, made.target)


def test_a_stray_file_does_not_make_a_drafter_another(tmp_path: Path) -> None:
    folder = eagle_checkpoints.write_eagle(tmp_path / "head", "specforge")
    file = next(folder.glob("*.safetensors"))
    write_index(folder, dict.fromkeys(tensors(file), file.name))
    save(folder / "other.safetensors", {"markov_head.w1": mx.ones((2, 2))})
    assert draft_of_folder(folder) is EagleDraft


def test_two_files_of_a_head_without_an_index_are_refused(tmp_path: Path) -> None:
    folder = eagle_checkpoints.write_eagle(tmp_path / "head", "specforge")
    file = next(folder.glob("*.safetensors"))
    save(folder / "model-old.safetensors", tensors(file))
    target = chat_folder(tmp_path / "model")
    with pytest.raises(ModelFolderError, match="both hold"):
        text_of(target, draft=folder)


def an_eagle_head(folder: Path) -> Path:
    return eagle_checkpoints.write_eagle(folder / "head", "specforge")


def a_dflash_drafter(folder: Path) -> Path:
    return write_block(folder / "head", "dflash2")


def an_assistant(folder: Path) -> Path:
    made = assistant_checkpoints.make("shared")
    (folder / "head").mkdir()
    return assistant_checkpoints.write(made, folder / "head")


@pytest.mark.parametrize("make", [an_eagle_head, a_dflash_drafter, an_assistant])
def test_a_drafter_in_the_place_of_a_target_is_named(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = make(tmp_path)
    said = r"this is a drafter for another model.*--draft"
    for _ in range(2):
        with pytest.raises(ModelFolderError, match=said):
            load(folder)
        with pytest.raises(ModelFolderError, match=said):
            SpeculativeGenerator.from_pretrained(folder, draft="lookup")
        with pytest.raises(ModelFolderError, match=said):
            train(folder, tmp_path / "out", TrainOptions())
        (folder / "tokenizer_config.json").write_text("{}")  # again, with a tokenizer


def test_a_drafter_that_claims_to_be_a_llama_is_known_by_its_tensors(
    tmp_path: Path,
) -> None:
    folder = an_eagle_head(tmp_path)
    model = chat_folder(tmp_path / "model")
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        shutil.copy(model / name, folder / name)
    said = "holds EAGLE-3 head tensors: this is a drafter for another model"
    with pytest.raises(ModelFolderError, match=said):
        load(folder)
