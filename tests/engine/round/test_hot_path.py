"""Python calls of one round, and its modules in order; `pytest -s` prints them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mlx_speculation
from mlx_speculation import BatchGenerator, SpeculativeGenerator
from support.identity import prompt_of
from support.models import tiny_vision
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer
from support.models.tiny_vision import WITHOUT_MLX_VLM

PACKAGE = Path(mlx_speculation.__file__).parent
FOLDERS = {
    f"{(PACKAGE / name).resolve()}/": name
    for name in ("engine", "models", "caches", "samplers", ".")
}

# Modules of the steps of a round, in order; see `engine.round`.
STEPS = {
    "engine/stream": "asked for a chunk",
    "engine/round/decoder": "1. how many tokens to draft",
    "engine/draft_length/base": "   by the policy",
    "engine/drafters/fault_guard": "2. the drafter proposes",
    "engine/drafters/draft_model": "   with a model of its own",
    "caches/speculation": "   journals of the draft model; 3. journals of the target",
    "samplers/verifier": "   chosen by the request's sampler",
    "engine/round/verify": "4. one forward of the target; 5. choices, acceptance",
    "engine/round/outcome": "6. one evaluation",
    "engine/detokenizer": "7. cut at stop tokens and budget; settle; commit",
    "engine/stats": "8. counted",
}


@dataclass(slots=True)
class Walk:
    """The project's calls in one round; `files`: the modules in order of entry."""

    calls: int = 0
    depth: int = 0
    files: list[str] = field(default_factory=list)
    tree: list[str] = field(default_factory=list)
    _now: int = 0

    def see(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "return"):
            return
        module = module_of(frame.f_code.co_filename)
        if module is None:
            return
        if event == "return":
            self._now -= 1
            return
        self._now += 1
        self.calls += 1
        self.depth = max(self.depth, self._now)
        self.tree.append(f"{'  ' * self._now}{module} {frame.f_code.co_qualname}")
        if module not in self.files:
            self.files.append(module)


@cache
def module_of(filename: str) -> str | None:
    """Return a file of the project as its module, such as engine/round/round."""
    path = str(Path(filename).resolve().with_suffix(""))
    for root, name in FOLDERS.items():
        if path.startswith(root):
            return str(Path(name, path.removeprefix(root)))
    return None


def walk(act: Callable[[], object]) -> Walk:
    walked = Walk()
    sys.setprofile(walked.see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return walked


def walk_of_a_round(length: int) -> Walk:
    """Return the calls of a round of `length` drafted tokens in a text's middle."""
    return walk_of_target(build("llama"), byte_tokenizer(), 256, length)


def walk_of_target(target: Any, tokenizer: Any, vocab: int, length: int) -> Walk:
    generator = SpeculativeGenerator(
        target,
        tokenizer,
        draft=build("llama", seed=1, vocab=vocab) if length else None,
        draft_length=length,
    )
    stream = generator.stream(prompt_of(21), max_tokens=200, stop_tokens=())
    for _ in range(8):
        stream.next_round()
    rounds = stream.stats.rounds
    walked = walk(lambda: next(stream))
    assert stream.stats.rounds == rounds + 1
    assert (stream.stats.drafts > 0) == (length > 0)
    return walked


@pytest.mark.parametrize(
    ("length", "files", "calls", "depth"), [(4, 22, 228, 12), (0, 18, 60, 10)]
)
def test_a_round_makes_few_calls_in_few_files(
    length: int, files: int, calls: int, depth: int
) -> None:
    walked = walk_of_a_round(length)
    counts = f"{len(walked.files)} files, {walked.calls} calls, {walked.depth} deep"
    sys.stdout.write(f"\nk = {length}: {counts}\n")
    assert len(walked.files) <= files, walked.files
    assert walked.calls <= calls
    assert walked.depth <= depth


@pytest.mark.parametrize("length", [4, 0])
def test_a_round_of_eight_makes_few_calls(length: int) -> None:
    one = walk_of_a_round(length)
    generator = SpeculativeGenerator(
        build("llama"),
        byte_tokenizer(),
        draft=build("llama", seed=1) if length else None,
        draft_length=length,
    )
    with BatchGenerator(generator) as batch:
        for n in range(8):
            batch.insert(prompt_of(21 + n), max_tokens=200, stop_tokens=())
        for _ in range(9):
            batch.next()
        eight = walk(batch.next)
        assert batch.stats.rounds == 10
    sys.stdout.write(f"\nk = {length}: one {one.calls} calls, eight {eight.calls}\n")
    assert eight.calls <= 3 * one.calls


@pytest.mark.parametrize("length", [4, 0])
def test_a_round_of_text_knows_nothing_of_images(length: int) -> None:
    files = walk_of_a_round(length).files
    assert not [module for module in files if "vision" in module or "image" in module]


@WITHOUT_MLX_VLM
@pytest.mark.parametrize("length", [4, 0])
def test_a_text_costs_a_target_that_reads_images_what_it_costs_another(
    length: int,
) -> None:
    """A target that reads images makes up to six more calls in a round."""
    target, tokenizer = tiny_vision.tiny("qwen3_vl"), tiny_vision.tokenizer()
    text = walk_of_a_round(length)
    before = walk_of_target(target, tokenizer, tiny_vision.VOCAB, length)
    made = SpeculativeGenerator(target, tokenizer)
    open_request = made.stream(tiny_vision.prompt_with("qwen3_vl", [(4, 6)]))
    next(open_request)
    after = walk_of_target(target, tokenizer, tiny_vision.VOCAB, length)
    assert after.tree == before.tree
    added = set(before.files) - set(text.files)
    assert added == {"models/vision/vision_target", "caches/types/leaves"}
    assert sum(call.split()[0] in added for call in before.tree) <= 6


def test_the_round_reads_in_one_sitting() -> None:
    names = ("decoder", "round", "verify", "outcome")
    files = [Path(PACKAGE, "engine", "round", f"{name}.py") for name in names]
    texts = [file.read_text() for file in files]
    assert sum(text.count("\n") for text in texts) < 840  # lines
    steps = [number for number in range(1, 9) if f"# {number}. " in "".join(texts)]
    assert steps == [*range(1, 9)]


def test_a_drafted_round_enters_its_modules_in_the_order_of_its_steps() -> None:
    walked = walk_of_a_round(4)
    for module in walked.files:
        sys.stdout.write(f"{module:32} {STEPS.get(module, '')}\n")
    assert [module for module in walked.files if module in STEPS] == [*STEPS]


if __name__ == "__main__":
    sys.stdout.write("\n".join(walk_of_a_round(int(sys.argv[1])).tree) + "\n")
