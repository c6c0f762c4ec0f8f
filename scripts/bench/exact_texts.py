"""How many texts a draft changes, with `exact` and without, and what exact mode costs.

Each prompt is continued without a draft, then with each kind of draft, at each
temperature, with the seed of its number; a text counts as different where a token
differs, and its probabilities where a bit of one does. Rows that are verified together
differ from single rows by rounding on a GPU, so that texts differ without `exact`; with
it none may. Speeds are those of the same runs, without the prompts.

    python scripts/bench/exact_texts.py --texts 4 --tokens 40
    python scripts/bench/exact_texts.py --shape llama --size 1b --dtype bfloat16
        --bits 4 --texts 200 --tokens 200 --seconds 600 --json (in one line, on a GPU)

The drafts: a lookup in the text; an EAGLE-3 head with random weights, which is hardly
ever right, and reads the target's states; and tokens of the text without a draft, some
of them changed, in drafts of random length. The last line is a JSON object.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from mlx_speculation import Sampling, SpeculativeGenerator

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models import gemma3_text, llama, qwen3_5

from mlx_speculation.demo import demo_models, demo_prompts
from mlx_speculation.engine import (
    Choose,
    Draft,
    EagleDraft,
)
from mlx_speculation.engine import Sequence as Text
from mlx_speculation.environment import machine, versions
from mlx_speculation.models import find_parts, load
from mlx_speculation.models.checkpoints.joined_head import OwnEnds
from mlx_speculation.models.eagle import EagleHead
from mlx_speculation.models.eagle.config import EagleSettings

DTYPES = {name: getattr(mx, name) for name in ("float32", "float16", "bfloat16")}
TEMPERATURES = (0.0, 0.8)
DRAFTS = ("lookup", "eagle", "random")
PROMPT = 24  # tokens
LONGEST = 7  # drafted tokens in a round


@dataclass(slots=True)
class Arm:
    """The texts of one kind of draft, in one mode, at one temperature."""

    exact: int | None
    temperature: float
    draft: str | None
    texts: int = 0
    different: int = 0  # texts in which a token differs from those without a draft
    other_probabilities: int = 0  # texts in which a log-probability does in a bit
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of all rounds
    prompt_seconds: float = 0.0
    first: list[int] = field(default_factory=list)  # where texts begin to differ

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


class SometimesRight:
    """Drafts a known text, with some tokens changed, in random lengths."""

    def __init__(self, vocabulary: int) -> None:
        self.text: list[int] = []
        self.random = random.Random(0)
        self._vocabulary = vocabulary

    def begin(self, sequence: Text) -> None:
        """Nothing has to be read."""

    def propose(self, sequence: Text, limit: int, choose: Choose) -> Draft:
        """Propose up to `limit` tokens, each right with a probability of 0.8."""
        start, draw = len(sequence.tokens), self.random
        length = draw.randint(1, limit)
        tokens = (self.text[start : start + length] + [0] * length)[:length]
        wrong = (draw.randrange(self._vocabulary) for _ in count())
        said = [token if draw.random() < 0.8 else next(wrong) for token in tokens]
        return Draft(mx.array(said, mx.int32))

    def settle(self, accepted: int) -> None:
        """Nothing is kept."""

    def discard(self) -> None:
        """Nothing is kept."""


def shape_of(name: str, size: str, layers: int | None, vocabulary: int) -> nn.Module:
    """Return a model with random weights: llama's, gemma3's or qwen3.5's layers."""
    small = size == "tiny"
    common: dict[str, Any] = {
        "hidden_size": 64 if small else 2048,
        "intermediate_size": 128 if small else 8192,
        "num_hidden_layers": layers or (4 if small else 16),
        "num_attention_heads": 4 if small else 32,
        "num_key_value_heads": 2 if small else 8,
        "head_dim": 16 if small else 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }
    if name == "llama":
        return llama.Model(llama.ModelArgs.from_dict({"model_type": name, **common}))
    if name == "sliding":
        window = {"sliding_window": 16 if small else 512, "sliding_window_pattern": 4}
        own = {"model_type": "gemma3_text", "query_pre_attn_scalar": 64, **window}
        args = gemma3_text.ModelArgs.from_dict({**common, **own})
        return gemma3_text.Model(args)
    heads = 2 if small else 16
    linear = {
        "linear_num_value_heads": 2 * heads,
        "linear_num_key_heads": heads,
        "linear_key_head_dim": 16 if small else 64,
        "linear_value_head_dim": 16 if small else 64,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
        },
    }
    text = {"model_type": "qwen3_5_text", **common, **linear}
    args = {"model_type": "qwen3_5", "text_config": text}
    return qwen3_5.Model(qwen3_5.ModelArgs.from_dict(args))


def randomise(model: nn.Module) -> None:
    """Give matrices weights of a scale at which the text goes on changing."""
    pairs: Any = tree_flatten(model.parameters())
    made = []
    for number, (path, weight) in enumerate(pairs):
        if weight.ndim > 1 and mx.issubdtype(weight.dtype, mx.floating):
            inputs = weight.shape[-1] if weight.shape[-1] > 1 else weight.shape[-2]
            scale = 0.25 if "embed" in path else 2 / inputs**0.5
            noise = mx.random.normal(weight.shape, key=mx.random.key(number))
            made.append((path, noise * scale))
    model.update(tree_unflatten(made))


def random_head(model: nn.Module) -> EagleHead:
    """Return an EAGLE-3 head with random weights, whose ends are the target's."""
    dim = find_parts(model).dim
    heads = max(dim // 64, 1)
    layer = llama.ModelArgs(
        model_type="llama",
        hidden_size=dim,
        num_hidden_layers=1,
        intermediate_size=2 * dim,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        rms_norm_eps=1e-5,
        vocab_size=1,
    )
    settings = EagleSettings(layer, dim, None, False, False, False)
    head = EagleHead(settings, 3, OwnEnds())
    randomise(head)
    return head


def prompts_of(tokenizer: Any, count: int) -> Iterator[list[int]]:
    """Yield windows of the bundled texts."""
    ids = [i for one in demo_prompts() for i in tokenizer.encode(one.text)]
    step = max((len(ids) - PROMPT) // count, 1)
    for number in range(count):
        start = number * step % (len(ids) - PROMPT)
        yield ids[start : start + PROMPT]


def prepared(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """Return the target, in the numbers that were asked for, and its tokenizer."""
    folder = args.model or demo_models()["dense"]
    model, tokenizer = load(folder)
    if args.shape is not None:
        width = max(tokenizer.get_vocab().values()) + 1
        model = shape_of(args.shape, args.size, args.layers, width)
        randomise(model)
    kind = DTYPES[args.dtype]
    floating = mx.floating
    cast = tree_map(
        lambda x: x.astype(kind) if mx.issubdtype(x.dtype, floating) else x,
        model.parameters(),
    )
    model.update(cast)
    if args.bits is not None:
        nn.quantize(model, group_size=args.group, bits=args.bits)
    mx.eval(model.parameters())
    return model, tokenizer


def run(
    generator: SpeculativeGenerator, arm: Arm, prompt: list[int], seed: int, length: int
) -> Any:
    """Write a text, and add it to the sums of its arm."""
    started = time.perf_counter()
    result = generator.generate(
        prompt,
        max_tokens=length,
        sampling=Sampling(temperature=arm.temperature, seed=seed),
        stop_tokens=(),
        logprobs=0,
    )
    arm.seconds += time.perf_counter() - started - result.stats.prefill_seconds
    arm.prompt_seconds += result.stats.prefill_seconds
    arm.texts += 1
    arm.tokens += len(result.tokens)
    arm.drafted += result.stats.drafted
    arm.accepted += result.stats.accepted
    assert not result.stats.drafter_faults, result.stats.drafter_faults[0].details
    return result


def compare(
    model: nn.Module, tokenizer: Any, args: argparse.Namespace, say: Any
) -> list[Arm]:
    """Write all texts in all ways, until the time is over."""
    layers = len(find_parts(model).layers)
    read = tuple(sorted({0, layers // 2, layers - 1}))
    while len(read) < 3:
        read = (*read, read[-1])
    sometimes = SometimesRight(max(tokenizer.get_vocab().values()) + 1)
    drafts: dict[str, Any] = {"lookup": "lookup", "random": sometimes}
    if "eagle" in args.drafts:
        drafts["eagle"] = EagleDraft(model, random_head(model), read)
    modes = [args.rows, False]
    made = {
        (mode, draft): SpeculativeGenerator(
            model,
            tokenizer,
            draft=None if draft is None else drafts[draft],
            draft_length=0 if draft is None else args.draft_length,
            exact=mode,
        )
        for mode in modes
        for draft in (None, *args.drafts)
    }
    arms = {
        (mode, warmth, draft): Arm(made[mode, draft].exact, warmth, draft)
        for mode in modes
        for warmth in TEMPERATURES
        for draft in (None, *args.drafts)
    }
    ends = time.perf_counter() + args.seconds
    for seed, prompt in enumerate(prompts_of(tokenizer, args.texts)):
        for (mode, _, draft), arm in arms.items():
            if draft is None:
                plain = run(made[mode, None], arm, prompt, seed, args.tokens)
                sometimes.text = prompt + plain.tokens
                sometimes.random = random.Random(seed)
                continue
            found = run(made[mode, draft], arm, prompt, seed, args.tokens)
            pairs = zip(found.tokens, plain.tokens, strict=True)
            parting = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if parting is not None:
                arm.different += 1
                arm.first.append(parting)
            arm.other_probabilities += found.logprobs != plain.logprobs
        say(f"{seed + 1} of {args.texts} texts")
        if time.perf_counter() > ends:
            break
    return list(arms.values())


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what is to be run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="folder; default: a bundled one")
    parser.add_argument(
        "--shape", choices=("llama", "sliding", "hybrid"), help="random weights instead"
    )
    parser.add_argument("--size", choices=("tiny", "1b"), default="tiny")
    parser.add_argument("--layers", type=int, help="of a shape; default: 4 or 16")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--bits", type=int, help="quantize the weights")
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8, help="of a forward")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--draft-length", type=int, default=LONGEST)
    parser.add_argument("--drafts", nargs="*", choices=DRAFTS, default=DRAFTS)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no text after that"
    )
    parser.add_argument("--json", action="store_true", help="print nothing else")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Compare, print a table and the JSON object, and return that."""
    args = arguments(given)
    model, tokenizer = prepared(args)
    say = (lambda line: None) if args.json else print
    arms = compare(model, tokenizer, args, say)
    for arm in arms:
        mode = "" if arm.exact is None else f"exact={arm.exact}"
        say(
            f"{mode:8} temperature {arm.temperature} {arm.draft or 'no draft':9}"
            f"{arm.different:4} of {arm.texts} texts differ, probabilities of "
            f"{arm.other_probabilities}; {arm.accepted} of {arm.drafted} drafted "
            f"tokens accepted; {arm.speed:.1f} tokens/s"
        )
    options = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
    }
    found = {
        "program": "exact_texts",
        "options": options,
        "arms": [{**asdict(arm), "speed": arm.speed} for arm in arms],
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
