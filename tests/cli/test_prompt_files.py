"""`generate --prompt-cache-file`: tokens in the file are not read again."""

import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import cache_prompt
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

from mlx_speculation import Sampling, SpeculativeGenerator, demo_models
from mlx_speculation.caches import save_caches
from support.covering import others_slow
from support.models.demo_folders import copy_of, with_length
from support.processes.commands import Commands

MODELS = demo_models()
DRAFT = str(MODELS["draft"])
BEGIN, REST = "def add(first, second):\n    return", " first + second\n\ndef sub("
PAIR = ["--draft", DRAFT, "--draft-length", "3", "-m", "14"]


def made_by_mlx_lm(file: Path, model: str, *options: str) -> Path:
    command = ["--model", model, "--prompt", BEGIN, "--prompt-cache-file", str(file)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["cache_prompt", *command, *options])
        cache_prompt.main()
    return file


@pytest.mark.parametrize("name", others_slow(["draft", "hybrid", "sliding"], ["draft"]))
def test_the_text_is_that_of_the_whole_prompt(
    commands: Commands, tmp_path: Path, name: str
) -> None:
    generator = SpeculativeGenerator.from_pretrained(MODELS[name])
    caches = make_prompt_cache(generator.model)
    ids = generator.encode(BEGIN)
    list(
        generate_step(mx.array(ids), generator.model, max_tokens=0, prompt_cache=caches)
    )
    file = tmp_path / "begun.safetensors"
    save_prompt_cache(str(file), caches, {"model": str(MODELS[name])})
    before = file.read_bytes()
    command = [
        "generate",
        MODELS[name],
        *PAIR,
        "-p",
        REST,
        "--prompt-cache-file",
        file,
    ]
    report = commands.object(*command)
    rest = generator.encode(REST)
    assert report["prompt_tokens"] == len(rest)
    assert report["tokens"] == generator.generate([*ids, *rest], max_tokens=14).tokens
    assert report["statistics"]["accepted"] > 0
    assert file.read_bytes() == before


def test_numbers_take_the_dtype_of_the_model(
    commands: Commands, tmp_path: Path
) -> None:
    """mlx-lm saves float16; on a Linux CPU this library runs the model in float32."""
    file = made_by_mlx_lm(tmp_path / "begun.safetensors", DRAFT)
    command = ["generate", DRAFT, *PAIR, "-p", REST, "--prompt-cache-file", file]
    report = commands.object(*command)
    assert report["tokens"] == commands.object(*command, "--draft-length", 0)["tokens"]
    whole = commands.object("generate", DRAFT, *PAIR, "-p", BEGIN + REST)
    assert report["text"][:12] == whole["text"][:12]


def test_files_of_ours_name_their_tokens(commands: Commands, tmp_path: Path) -> None:
    generator = SpeculativeGenerator.from_pretrained(DRAFT)
    caches = make_prompt_cache(generator.model)
    read = generator.generate(BEGIN, max_tokens=0, prompt_cache=caches)
    file = tmp_path / "begun.safetensors"
    save_caches(file, caches, read.cached_tokens)
    # The penalty applies to all known tokens, also to those in the file.
    sampled = ["--temp", "0.9", "--seed", "4", "-m", "14", "--repetition-penalty", "2"]
    report = commands.object(
        "generate", DRAFT, "-p", REST, *sampled, "--prompt-cache-file", file
    )
    ids = [*read.cached_tokens, *generator.encode(REST)]
    sampling = Sampling(temperature=0.9, seed=4, repetition_penalty=2.0)
    whole = generator.generate(ids, max_tokens=14, sampling=sampling)
    assert report["tokens"] == whole.tokens


def test_a_template_goes_on_with_the_message(
    commands: Commands, tmp_path: Path
) -> None:
    folder = copy_of("draft", tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    file = made_by_mlx_lm(tmp_path / "begun.safetensors", str(folder))
    report = commands.object(
        "generate", folder, *PAIR, "-p", REST, "--prompt-cache-file", file
    )
    tokenizer = SpeculativeGenerator.from_pretrained(folder).tokenizer
    rest = tokenizer.encode(f"{REST}<assistant>", add_special_tokens=False)
    assert report["prompt_tokens"] == len(rest)


@pytest.mark.parametrize(
    "options", [["--kv-bits", "8", "--quantized-kv-start", "0"], ["--max-kv-size", "9"]]
)
def test_the_kinds_of_the_file_stay(
    commands: Commands, tmp_path: Path, options: list[str]
) -> None:
    file = made_by_mlx_lm(tmp_path / "begun.safetensors", DRAFT, *options)
    command = ["generate", DRAFT, "-p", REST, "-m", "14", "--prompt-cache-file", file]
    plain = commands.object(*command)
    lookup = commands.object(*command, "--draft", "lookup", "--draft-length", "3")
    assert lookup["tokens"] == plain["tokens"]
    assert len(plain["tokens"]) == 14


def test_what_the_file_holds_counts_for_the_start_of_quantization(
    commands: Commands, tmp_path: Path
) -> None:
    file = made_by_mlx_lm(tmp_path / "begun.safetensors", DRAFT)
    count = len(SpeculativeGenerator.from_pretrained(DRAFT).encode(BEGIN))
    command = ["generate", DRAFT, "-p", "x", "-m", "5", "--kv-bits", "7"]
    command += ["--quantized-kv-start", str(count + 6)]  # reached only with the file
    assert commands(*command).exit_code == 0
    said = commands.refused(*command, "--prompt-cache-file", file)
    assert "kv_bits is 7 and kv_group_size 64" in said


def test_what_the_file_holds_counts_for_the_context(
    commands: Commands, tmp_path: Path
) -> None:
    folder = copy_of("draft", tmp_path / "short")
    file = made_by_mlx_lm(tmp_path / "begun.safetensors", str(folder))
    count = len(SpeculativeGenerator.from_pretrained(DRAFT).encode(BEGIN))
    with_length(folder, count + 1)
    command = ["generate", folder, "-m", "1", "--prompt-cache-file", file, "-p"]
    assert commands(*command, "x").exit_code == 0
    assert f"The prompt has {count + 3} tokens" in commands.refused(*command, "x = ")


def test_a_file_that_does_not_fit_is_refused(
    commands: Commands, tmp_path: Path
) -> None:
    file = made_by_mlx_lm(tmp_path / "begun.safetensors", DRAFT)

    def said(model: object, path: object, *options: str) -> str:
        command = ["-p", "x", "-m", "2", "--prompt-cache-file", path, *options]
        return commands.refused("generate", model, *command)

    assert "--prompt-cache-file is 'nowhere', which cannot be read: No such f" in said(
        DRAFT, "nowhere"
    )
    assert "which cannot be read: Is a directory" in said(DRAFT, tmp_path)
    assert "--max-kv-size is 9, but the caches come from" in said(
        DRAFT, file, "--max-kv-size", "9"
    )
    dense = said(MODELS["dense"], file)
    assert "it holds 2 caches in a list, but the live list has 6" in dense
    other = copy_of("draft", tmp_path / "other")
    assert f"was made for the model {DRAFT!r}, but the target is" in said(other, file)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(file.read_bytes()[:-9])
    assert "cannot be loaded" in said(DRAFT, cut)
    generator = SpeculativeGenerator.from_pretrained(DRAFT)
    save_prompt_cache(str(cut), make_prompt_cache(generator.model), {})
    assert "hold 0 tokens, but at least 1 is needed" in said(DRAFT, cut)
