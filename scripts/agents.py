"""Compares lookups by replaying recorded agent sessions and edits of files.

No model runs, so the figures are the same on every machine. A drafted token is accepted
if the recorded answer has it at that position.

    python scripts/agents.py SESSIONS.jsonl --tokenizer FOLDER

SESSIONS has one session a line, {"messages": [{"role", "content", "tool_calls"?}]};
every message of the assistant is the answer to a request. Edits are files of which 2
to 20 % of the lines changed between two releases of httpx, rich and attrs, which are
fetched from the package index. The old file is in the prompt and is passed as the
prediction.

A draft has at most 16 tokens. Speed is tokens in the time of a plain step, where each
drafted token costs c plain steps. The last line is a JSON object with the figures of
every arm at every c.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from mlx_lm.tokenizer_utils import load as load_tokenizer

from bench.replays.lookup_arms import (
    Arm,
    Ours,
    PromptLookup,
    SuffixDecoding,
    Tally,
    draft_calls,
    replay,
)
from bench.replays.sessions import Turn, by_turns, edits, read_sessions, unrelated

COSTS = {"1/32": 1 / 32, "1/8": 1 / 8, "1/2": 1 / 2}
HISTORY = 200_000  # tokens of earlier answers that our lookup keeps
COUNTED = 8  # sessions whose draft calls are counted

Sessions = Sequence[Sequence[Turn]]


def others() -> dict[str, Callable[[], Arm]]:
    """Return the lookups of other engines, by name."""
    result: dict[str, Callable[[], Arm]] = {
        "prompt lookup as vLLM's": partial(PromptLookup, 3, 5, latest=True),
        "prompt lookup as transformers'": partial(PromptLookup, 1, 3, latest=False),
    }
    for longest in (4, 8, 16, 32):
        result[f"suffix decoding, {longest}"] = partial(SuffixDecoding, longest)
    return result


def run(arm: Arm, sessions: Sessions) -> Tally:
    """Replay all sessions, one after the other."""
    tally = Tally()
    for turns in sessions:
        replay(arm, turns, tally)
    return tally


def figures(tally: Tally, cost: float) -> dict[str, float]:
    """Return the figures of an arm."""
    return {
        "tokens_a_round": round(tally.tokens / tally.rounds, 3),
        "drafted": tally.drafted,
        "accepted": tally.accepted,
        "speed": round(tally.speed(cost), 3),
        "draft_microseconds": round(1e6 * mean(tally.seconds), 1),
    }


def ours(sessions: Sessions, history: int) -> dict[str, dict[str, float]]:
    """Return the figures of our lookup and draft length rule at each cost."""
    return {
        name: figures(run(Ours(cost, history), sessions), cost)
        for name, cost in COSTS.items()
    }


def compare(arms: Mapping[str, Sessions], *, history: bool = True) -> dict[str, object]:
    """Return figures of our lookup on all sets, of other lookups on the first set."""
    result: dict[str, object] = {}
    for name, sessions in arms.items():
        result[name] = ours(sessions, HISTORY)
        _say(name, result[name])
    first = next(iter(arms.values()))
    if history:
        result["ours, no history"] = ours(first, 0)
        _say("ours, no history", result["ours, no history"])
    result["draft call"] = draft_calls(first[:COUNTED], COSTS["1/8"], HISTORY)
    sys.stdout.write(f"{'ours, each draft call':38} {result['draft call']}\n")
    for name, make in others().items():
        tally = run(make(), first)
        result[name] = {each: figures(tally, cost) for each, cost in COSTS.items()}
        _say(name, result[name])
    return result


def _say(name: str, result: object) -> None:
    assert isinstance(result, dict)
    columns = (
        f"{c}: {one['tokens_a_round']:6.3f} a round, {one['accepted']} of "
        f"{one['drafted']}, speed {one['speed']:.3f}"
        for c, one in result.items()
    )
    sys.stdout.write(f"{name:38} {'   '.join(columns)}\n")
    sys.stdout.flush()


def main() -> None:
    """Replay sessions and edits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sessions", type=Path, help="JSON lines, .gz or not")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder")
    parser.add_argument("--wheels", type=Path, help="a folder to keep the releases in")
    parser.add_argument("--no-edits", action="store_true", help="sessions only")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer)
    sessions = read_sessions(options.sessions, tokenizer)
    eight = list(by_turns(sessions, 8))
    report = {"sessions": compare({"ours": sessions, "ours, eight by turns": eight})}
    if not options.no_edits:
        files = edits(tokenizer, options.wheels)
        bare = [Turn(turn.tokens, turn.answer) for turn in files]
        sets = {
            "ours, predicted": [files],
            "ours, not predicted": [bare],
            "ours, another file predicted": [unrelated(files)],
        }
        report["edits"] = compare(sets, history=False)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
