"""A session of an agent reads its context once; tokens that are read again are counted.

A prompt ends with `OPEN`, the opening of an answer. In later prompts this answer's
opening lacks two tokens, as with some chat templates. So each answer is read again.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from mlx_speculation import PrefixCache, SpeculativeGenerator
from mlx_speculation.engine import BatchGenerator
from support.covering import covering
from support.drafters.batch_heads import eagle_on, mtp_on
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

HEAD, TURNS, ANSWER, RESULT = 8000, 20, 12, 60
# The end of a turn; the opening of an answer
END, OPEN = 255, [254, 10, 253, 10]
MOST, MOST_AFTER_RESTART = 0.03, 0.05
# A turn may read again the answer, its opening, and three more tokens.
MOST_A_TURN = ANSWER + len(OPEN) + 3

Made = tuple[Any, Any]
KINDS: dict[str, Callable[[], Made]] = {
    "dense": lambda: (build("llama"), None),
    "sliding": lambda: (build("gemma3_text"), None),
    "hybrid": lambda: (build("qwen3_5"), None),
    "hybrid, mtp": lambda: mtp_on("qwen3_5"),
    "dense, eagle": lambda: eagle(build("llama", layers=4)),
}
QUICK = ("sliding", "hybrid, mtp", "dense, eagle")
Run = Callable[[list[int]], Any]
Runs = Callable[[SpeculativeGenerator], Run]


def eagle(model: Any) -> Made:
    return model, eagle_on(model, "specforge")


@cache
def made(kind: str) -> Made:
    return KINDS[kind]()


def noise(seed: int, count: int) -> list[int]:
    """Return ids below 250 that depend on the seed."""
    return [(seed * 7919 + 31 * i * i + seed * i) % 250 for i in range(count)]


class Session:
    def __init__(self, head: list[int], seed: int) -> None:
        self.history, self.seed = [*head, *noise(seed, 40), END], seed
        self.turns = self.prompts = 0
        self.again: list[int] = []  # how many tokens each later turn reads again

    def turn(self, run: Run) -> None:
        """Ask for an answer, and let the result of a tool follow it."""
        prompt = [*self.history, *OPEN]
        result = run(prompt)
        if self.turns:  # new in this prompt: a result, and an opening
            new = RESULT + 1 + len(OPEN)
            self.prompts += len(prompt)
            self.again.append(len(prompt) - result.stats.reused - new)
        self.turns += 1
        self.history += [*OPEN[:-2], *result.tokens, END]
        self.history += [*noise(self.seed + 100 * self.turns, RESULT), END]


def streams(generator: SpeculativeGenerator) -> Run:
    return lambda prompt: generator.generate(prompt, max_tokens=ANSWER, stop_tokens=())


def batches(generator: SpeculativeGenerator) -> Run:
    batch = BatchGenerator(generator)

    def run(prompt: list[int]) -> Any:
        uid = batch.insert(prompt, max_tokens=ANSWER, stop_tokens=())
        while batch.waiting or batch.running:
            batch.next()
        return batch.remove(uid)

    return run


def generator(kind: str, prefixes: PrefixCache) -> SpeculativeGenerator:
    model, draft = made(kind)
    tokenizer = byte_tokenizer()
    tokenizer.add_eos_token(str(END))
    return SpeculativeGenerator(
        model,
        tokenizer,
        draft=draft,
        draft_length=2 if draft else None,
        prefix_cache=prefixes,
    )


def play(run: Run, sessions: list[Session], turns: int, side: bool) -> None:
    """Let sessions take turns; if `side`, a small request follows each turn."""
    for turn in range(turns):
        for session in sessions:
            session.turn(run)
            if side:
                run(noise(1000 + turn, 30))


def share(sessions: list[Session]) -> float:
    again = sum(sum(session.again) for session in sessions)
    return again / sum(session.prompts for session in sessions)


def check(kind: str, runs: Runs, several: bool, head: int, turns: int) -> None:
    run = runs(generator(kind, PrefixCache(1 << 30, every=head // 16)))
    start = noise(1, head)
    sessions = [Session(start, seed) for seed in ((2, 3) if several else (2,))]
    play(run, sessions, turns, side=several)
    assert share(sessions) <= MOST
    assert max(max(session.again) for session in sessions) <= MOST_A_TURN


@pytest.mark.parametrize(
    ("kind", "runs", "several"),
    covering(KINDS, (streams, batches), (False, True), quick=(0, QUICK)),
)
def test_a_tool_loop_reads_its_context_once(
    kind: str, runs: Runs, several: bool
) -> None:
    check(kind, runs, several, HEAD // 16, TURNS // 5)


@pytest.mark.parametrize("kind", ["sliding", "hybrid"])
def test_a_third_session_reads_nothing_of_what_the_first_two_share(kind: str) -> None:
    """The shared part ends inside of a chunk that the first session read at once."""
    run = streams(generator(kind, PrefixCache(1 << 30, every=64)))
    head = noise(1, 300)
    reused = [run([*head, *noise(seed, 40)]).stats.reused for seed in (2, 3, 4)]
    assert reused == [0, 256, 300]


def after_a_restart(kind: str, runs: Runs, head: int, before: int) -> None:
    with TemporaryDirectory() as folder:
        sessions = [Session(noise(1, head), seed) for seed in (2, 3)]
        for after, turns in enumerate((before, 1)):
            place = Path(folder, "own")
            prefixes = PrefixCache(1 << 30, every=head // 16, folder=place)
            run = runs(generator(kind, prefixes))
            for session in sessions:
                session.again.clear()
                session.prompts = 0
            play(run, sessions, turns, side=not after)
            prefixes.flush()
        assert share(sessions) <= MOST_AFTER_RESTART
        for session in sessions:
            assert max(session.again) <= MOST_A_TURN


@pytest.mark.parametrize(
    ("kind", "runs"),
    covering(KINDS, (streams, batches), quick=(0, ["sliding", "hybrid, mtp"])),
)
def test_a_restart_with_the_folder_reads_little_again(kind: str, runs: Runs) -> None:
    after_a_restart(kind, runs, HEAD // 16, 2)


def test_where_the_tokens_of_a_prompt_come_from_is_counted(tmp_path: Path) -> None:
    prompt, folder = noise(1, 300), tmp_path / "own"
    for reused in ([0, 299], [299, 299]):
        prefixes = PrefixCache(1 << 30, every=64, folder=folder)
        ours = generator("hybrid", prefixes)
        stats = [ours.generate(prompt, max_tokens=2).stats for _ in range(2)]
        assert [each.reused for each in stats] == reused
        assert [each.reused_from_disk for each in stats] == [reused[0], 0]
        prefixes.flush()
    assert prefixes.restore_points > 0
    assert prefixes.evictions == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("runs", [streams, batches])
@pytest.mark.parametrize("several", [False, True])
def test_a_tool_loop_of_eight_thousand_tokens(
    kind: str, runs: Runs, several: bool
) -> None:
    check(kind, runs, several, HEAD, TURNS)
