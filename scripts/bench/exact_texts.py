"""How many texts a draft changes, with `exact` and without, and what exact mode costs.

Each prompt is continued without a draft, then with each kind of draft, at each
temperature, with the seed of its number; a text counts as different where a token
differs, and its probabilities where a bit of one does. Rows that are verified together
differ from single rows by rounding on a GPU, so that texts differ without `exact`; with
it none may. Speeds are those of the same runs, without the prompts, the first round and
the first text of each arm, in which kernels are compiled.

    python scripts/bench/exact_texts.py --texts 4 --tokens 40
    python scripts/bench/exact_texts.py --model FOLDER --drafts lookup --adaptive
        --texts 6 --tokens 100 (what exact mode costs)
    python scripts/bench/exact_texts.py --shape llama --size 1b --layers 4
        --dtype bfloat16 --bits 4 --texts 200 --tokens 200 --seconds 200 --jobs 8
        --control-every 4 --json (in one line, on a GPU)

The drafts: a lookup in the text; an EAGLE-3 head with random weights, which is hardly
ever right, and reads the target's states; and tokens of the text without a draft, some
of them changed, in drafts of random length. Prompts are of several lengths, so that
texts of 200 tokens reach the second view of exact mode at different places.

Texts run one at a time, as they must in exact mode, and a GPU then mostly waits for the
host. So `--jobs` processes share the texts that follow the first three, of which alone
the speeds are. The last line is a JSON object.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from mlx_speculation import Sampling, SpeculativeGenerator

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `bench`, in a program
from bench.random_models import random_head, randomise, shape_of
from mlx_speculation.demo import demo_models, demo_prompts
from mlx_speculation.engine import Choose, EagleDraft, Proposal
from mlx_speculation.engine import Sequence as Text
from mlx_speculation.environment import machine, versions
from mlx_speculation.models import find_parts, load

DTYPES = {name: getattr(mx, name) for name in ("float32", "float16", "bfloat16")}
TEMPERATURES = (0.0, 0.8)
DRAFTS = ("lookup", "eagle", "random")
PROMPTS = tuple(range(61, 125, 8))  # tokens; with 200 more, all pass position 256
COUNTS = ("texts", "different", "other_probabilities", "drafted", "accepted")
LONGEST = 7  # drafted tokens in a round
EAGLE_LONGEST = 3  # of a random head, each of whose tokens costs a step and is wrong
ALONE = 3  # texts before other processes run: one to compile, two to be timed


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
    timed_tokens: int = 0
    seconds: float = 0.0  # of all rounds of those; a text's first one is not timed
    processor_seconds: float = 0.0  # likewise, which a busy machine leaves alone
    prompt_seconds: float = 0.0
    first: int | None = None  # the earliest token that differs

    def add(self, other: dict[str, Any]) -> None:
        """Add the counts that another process found; its times were not its own."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + other[name])
        self._differs_at(other["first"])

    def compare(self, found: Any, plain: Any) -> None:
        """Count a text as different, or not, from that without a draft."""
        pairs = zip(found.tokens, plain.tokens, strict=True)
        parting = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        self.different += parting is not None
        self.other_probabilities += found.logprobs != plain.logprobs
        self._differs_at(parting)

    def _differs_at(self, place: int | None) -> None:
        if place is not None:
            self.first = place if self.first is None else min(self.first, place)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.timed_tokens / self.seconds if self.seconds else 0.0

    @property
    def cost(self) -> float:
        """Milliseconds of the processor for a token."""
        return 1e3 * self.processor_seconds / max(self.timed_tokens, 1)


class SometimesRight:
    """Drafts a known text, with some tokens changed, in random lengths."""

    def __init__(self, vocabulary: int) -> None:
        self.text: list[int] = []
        self.random = random.Random(0)
        self._vocabulary = vocabulary

    def begin(self, sequence: Text) -> None:
        """Nothing has to be read."""

    def propose(self, sequence: Text, limit: int, choose: Choose) -> Proposal:
        """Propose up to `limit` tokens, each right with a probability of 0.8."""
        start, draw = len(sequence.tokens), self.random
        length = draw.randint(1, limit)
        tokens = (self.text[start : start + length] + [0] * length)[:length]
        wrong = (draw.randrange(self._vocabulary) for _ in count())
        said = [token if draw.random() < 0.8 else next(wrong) for token in tokens]
        return Proposal(mx.array(said, mx.int32))

    def settle(self, accepted: int) -> None:
        """Nothing is kept."""

    def discard(self) -> None:
        """Nothing is kept."""


def prompts_of(tokenizer: Any, count: int) -> Iterator[list[int]]:
    """Yield windows of the bundled texts."""
    ids = [i for one in demo_prompts() for i in tokenizer.encode(one.text)]
    last = len(ids) - max(PROMPTS)
    step = max(last // count, 1)
    for number in range(count):
        start = number * step % last
        yield ids[start : start + PROMPTS[number % len(PROMPTS)]]


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
    stream = generator.stream(
        prompt,
        max_tokens=length,
        sampling=Sampling(temperature=arm.temperature, seed=seed),
        stop_tokens=(),
        logprobs=0,
    )
    begun = len(stream.next_round())
    started, started_cpu = time.perf_counter(), time.process_time()
    for _ in stream:
        pass
    result = stream.result
    if arm.texts:
        arm.seconds += time.perf_counter() - started
        arm.processor_seconds += time.process_time() - started_cpu
        arm.prompt_seconds += result.stats.prefill_seconds
        arm.timed_tokens += len(result.tokens) - begun
    arm.texts += 1
    arm.drafted += result.stats.drafted
    arm.accepted += result.stats.accepted
    assert not result.stats.drafter_faults, result.stats.drafter_faults[0].details
    return result


def compare(
    model: nn.Module,
    tokenizer: Any,
    args: argparse.Namespace,
    numbers: Iterable[int],
    ends: float,
    say: Any,
) -> list[Arm]:
    """Write the texts of these numbers in all ways, until the time is over."""
    layers = len(find_parts(model).layers)
    read = tuple(sorted({0, layers // 2, layers - 1}))
    while len(read) < 3:
        read = (*read, read[-1])
    sometimes = SometimesRight(max(tokenizer.get_vocab().values()) + 1)
    drafts: dict[str | None, Any] = {
        None: None,
        "lookup": "lookup",
        "random": sometimes,
    }
    if "eagle" in args.drafts:
        drafts["eagle"] = EagleDraft(model, random_head(model), read)
    lengths = {None: 0, "eagle": EAGLE_LONGEST, "lookup": LONGEST, "random": LONGEST}
    made = {
        (mode, draft): SpeculativeGenerator(
            model,
            tokenizer,
            draft=drafts[draft],
            draft_length=None if args.adaptive else lengths[draft],
            exact=mode,
        )
        for mode in (args.rows, False)
        for draft in (None, *args.drafts)
    }
    arms = {
        (mode, warmth, draft): Arm(made[mode, draft].exact, warmth, draft)
        for mode in (args.rows, False)
        for warmth in TEMPERATURES
        for draft in (None, *args.drafts)
    }
    prompts = list(prompts_of(tokenizer, args.texts))
    for seed in numbers:
        for (mode, _, draft), arm in arms.items():
            if time.perf_counter() > ends:
                return list(arms.values())
            if not mode and seed >= ALONE and seed % args.control_every:
                continue
            found = run(made[mode, draft], arm, prompts[seed], seed, args.tokens)
            if draft is None:
                plain = found
                sometimes.text = prompts[seed] + plain.tokens
                sometimes.random = random.Random(seed)
            arm.compare(found, plain)
        say(f"text {seed + 1} of {args.texts}")
    return list(arms.values())


def share(given: Sequence[str], jobs: int, ends: float, arms: list[Arm]) -> None:
    """Let other processes write the texts that are left, and add what they found.

    Raises:
        CalledProcessError: one of them failed.
    """
    program = [sys.executable, __file__, *given, "--json", "--jobs", "1"]
    seconds = str(ends - time.perf_counter())
    running = [
        subprocess.Popen(
            [*program, "--seconds", seconds, "--numbers", str(ALONE + i), str(jobs)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(jobs)
    ]
    for process in running:
        printed, _ = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        for arm, other in zip(arms, json.loads(printed)["arms"], strict=True):
            arm.add(other)


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
    parser.add_argument("--adaptive", action="store_true", help="draft length")
    parser.add_argument("--drafts", nargs="*", choices=DRAFTS, default=DRAFTS)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no text after that"
    )
    parser.add_argument(
        "--control-every", type=int, default=1, help="texts for one without exact"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--numbers", type=int, nargs=2, help="the first text, and the step to the next"
    )
    parser.add_argument("--json", action="store_true", help="print nothing else")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Compare, print a table and the JSON object, and return that."""
    started = time.perf_counter()
    given = sys.argv[1:] if given is None else given
    args = arguments(given)
    ends = started + args.seconds
    model, tokenizer = prepared(args)
    say = (lambda line: None) if args.json else print
    first, step = args.numbers or (0, 1)
    last = args.texts if args.jobs == 1 else min(ALONE, args.texts)
    arms = compare(model, tokenizer, args, range(first, last, step), ends, say)
    if args.jobs > 1:
        share(given, args.jobs, ends, arms)
    for arm in arms:
        mode = "" if arm.exact is None else f"exact={arm.exact}"
        say(
            f"{mode:8} temperature {arm.temperature} {arm.draft or 'no draft':9}"
            f"{arm.different:4} of {arm.texts} texts differ, probabilities of "
            f"{arm.other_probabilities}; {arm.accepted} of {arm.drafted} drafted "
            f"tokens accepted; {arm.speed:.1f} tokens/s, {arm.cost:.1f} ms of "
            "the processor for one"
        )
    options = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
    }
    found = {
        "program": "exact_texts",
        "options": options,
        "seconds": round(time.perf_counter() - started, 1),
        "arms": [{**asdict(arm), "speed": round(arm.speed, 1)} for arm in arms],
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
