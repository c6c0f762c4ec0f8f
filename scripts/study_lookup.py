"""Which lookup is worth its while: rounds of many kinds of lookup, without the model.

Plain decoding makes texts of the bundled models once. Then rounds are played on them:
a lookup proposes, the text says how much is accepted, and a round costs what is
assumed here: a pipelined step 1, a checked round 1 + wait + rows * row. So many lookups
are compared on the same texts, and no noise of the machine is in the figures.

The first table tells, by the length of a match, how often it goes on with the right
token, and for how many. The second one plays rounds: the latest, the first and the most
frequent continuation of the longest suffix, n-grams, several least matches, and drafts
of one or two tokens for each token of a match. The last line is one JSON object.

    python scripts/study_lookup.py
    python scripts/study_lookup.py --target hybrid --temperature 1 --row 0.3
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, Any

import typer

from mlx_speculation.blas import use_blas
from mlx_speculation.cli import run
from mlx_speculation.demo import demo_models, demo_prompts

LONGEST_CONTEXT = 12
BUCKETS = (1, 2, 3, 4, 5, 7, 11, 16)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with its continuation."""

    group: str
    temperature: float
    prompt: list[int]
    tokens: list[int]


class Lookup:
    """An index that proposes: the latest place of the longest suffix.

    Args:
        index: makes the index.
    """

    def __init__(self, index: Callable[[], Any]) -> None:
        self._index = index()

    def append(self, token: int) -> None:
        """Index a token."""
        self._index.append(token)

    def propose(self, count: int) -> tuple[int, list[int]]:
        """Return the length of the match, and at most `count` tokens."""
        from mlx_speculation.engine.lookup.index import continuation

        match = self._index.match()
        if not match.length:
            return 0, []
        return match.length, continuation(self._index.tokens, match.end, count)


class Counted:
    """The most frequent or the first token after the longest known context."""

    def __init__(self, pick: Callable[[Counter[int]], int]) -> None:
        self._pick = pick
        self._tokens: list[int] = []
        self._seen: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def append(self, token: int) -> None:
        """Count a token after every context that it has."""
        for length in range(1, min(LONGEST_CONTEXT, len(self._tokens)) + 1):
            self._seen[tuple(self._tokens[-length:])][token] += 1
        self._tokens.append(token)

    def propose(self, count: int) -> tuple[int, list[int]]:
        """Return the length of the match, and at most `count` tokens."""
        text = self._tokens[-LONGEST_CONTEXT:]
        first, found = 0, []
        for _ in range(count):
            length = next((n for n in range(len(text), 0, -1) if self._has(text, n)), 0)
            if not length:
                break
            first = first or length
            found.append(self._pick(self._seen[tuple(text[-length:])]))
            text = [*text, found[-1]][-LONGEST_CONTEXT:]
        return first, found

    def _has(self, text: list[int], length: int) -> bool:
        return tuple(text[-length:]) in self._seen


def most_frequent(counts: Counter[int]) -> int:
    """Return the token that came most often."""
    return counts.most_common(1)[0][0]


def first_seen(counts: Counter[int]) -> int:
    """Return the token that came first."""
    return next(iter(counts))


@dataclass(slots=True)
class Played:
    """Rounds played on some texts."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    cost: float = 0.0

    def play(
        self, text: Text, lookup: Any, least: int, per: int, limit: int, price: Any
    ) -> None:
        """Play all rounds of a text, as `Decoder` runs them."""
        for token in text.prompt:
            lookup.append(token)
        place, behind = 0, 0  # behind: how many steps are on their way, 0 or 1
        while place < len(text.tokens):
            wanted = min(limit, len(text.tokens) - place - 1 - behind)
            length, found = lookup.propose(max(0, wanted) + behind)
            drafted = found[: length * per][behind:] if length >= least else []
            if behind or not drafted:
                self._emit(text.tokens[place : place + 1], lookup, 1)
                place += 1
            behind = int(not drafted)
            if drafted:
                accepted = common(drafted, text.tokens[place:])
                emitted = text.tokens[place : place + accepted + 1]
                self._emit(emitted, lookup, 1 + price[0] + price[1] * len(drafted))
                place += len(emitted)
                self.drafted += len(drafted)
                self.accepted += accepted

    def _emit(self, tokens: list[int], lookup: Any, cost: float) -> None:
        """Count a round."""
        for token in tokens:
            lookup.append(token)
        self.tokens += len(tokens)
        self.rounds += 1
        self.cost += cost


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the first tokens that agree."""
    pairs = zip(one, other, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other))
    )


@app.command()
def study(
    target: Annotated[str, typer.Option(help="dense, sliding or hybrid.")] = "dense",
    temperature: Annotated[list[float] | None, typer.Option(min=0.0)] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Of each group.")] = 12,
    tokens: Annotated[int, typer.Option(min=20)] = 200,
    limit: Annotated[int, typer.Option(min=1, help="Tokens drafted at most.")] = 8,
    row: Annotated[float, typer.Option(help="Price of a checked token.")] = 0.12,
    wait: Annotated[float, typer.Option(help="Price of a lost pipeline.")] = 0.1,
) -> None:
    """Compare lookups on texts of a bundled model."""
    use_blas("auto")
    warmths = temperature or [0.0, 1.0]
    texts = _texts(target, warmths, prompts, tokens)
    report: dict[str, Any] = {"target": target, "matches": {}, "rounds": {}}
    for warmth in warmths:
        rows = _matches([text for text in texts if text.temperature == warmth])
        report["matches"][str(warmth)] = rows
        print(f"\ntemperature {warmth:g}: matches, right, tokens that follow")
        for length, (count, right, follow) in rows.items():
            print(f"  {length:>3} tokens {count:6d} {right:5.0%} {follow:6.2f}")
    for warmth, group in product(warmths, ("code", "prose", "edit")):
        chosen = [t for t in texts if (t.temperature, t.group) == (warmth, group)]
        print(f"\ntemperature {warmth:g}, {group}: x plain, tokens a round, accepted")
        for name, played in _play(chosen, limit, (wait, row)):
            gain, each = played.tokens / played.cost, played.tokens / played.rounds
            share = played.accepted / max(1, played.drafted)
            print(f"  {name:40} {gain:6.3f} {each:6.2f} {share:5.0%}")
            report["rounds"][f"{warmth:g} {group} {name}"] = [gain, each, share]
    print(json.dumps(report))


def _texts(target: str, warmths: list[float], prompts: int, tokens: int) -> list[Text]:
    from mlx_speculation import Sampling, SpeculativeGenerator

    generator = SpeculativeGenerator.from_pretrained(demo_models()[target])
    texts: list[Text] = []
    for warmth, group in product(warmths, ("code", "prose", "edit")):
        found = [prompt for prompt in demo_prompts() if prompt.group == group]
        for prompt in found[:prompts]:
            ids = [int(token) for token in generator.tokenizer.encode(prompt.text)]
            result = generator.generate(
                ids,
                max_tokens=tokens,
                sampling=Sampling(temperature=warmth, seed=len(texts)),
                stop_tokens=(),
            )
            texts.append(Text(group, warmth, ids, result.tokens))
    return texts


def _matches(texts: list[Text]) -> dict[int, tuple[int, float, float]]:
    """Return for lengths of a match: how many, how often right, and for how long."""
    from mlx_speculation.engine.lookup.suffix_automaton import SuffixAutomaton

    runs: dict[int, list[int]] = defaultdict(list)
    for text in texts:
        lookup = Lookup(SuffixAutomaton)
        for token in text.prompt:
            lookup.append(token)
        for place, token in enumerate(text.tokens):
            length, found = lookup.propose(32)
            if length:
                bucket = max(b for b in BUCKETS if b <= length)
                runs[bucket].append(common(found, text.tokens[place:]))
            lookup.append(token)
    return {
        bucket: (len(r), sum(map(bool, r)) / len(r), sum(r) / len(r))
        for bucket, r in sorted(runs.items())
    }


def _play(
    texts: list[Text], limit: int, price: tuple[float, float]
) -> list[tuple[str, Played]]:
    from mlx_speculation.engine.lookup.ngram_index import NgramIndex
    from mlx_speculation.engine.lookup.suffix_automaton import SuffixAutomaton

    latest = partial(Lookup, SuffixAutomaton)
    arms: list[tuple[str, Callable[[], Any], int, int]] = [
        ("latest place of the longest suffix", latest, 4, 1),
        ("first token seen after it", partial(Counted, first_seen), 4, 1),
        ("most frequent token after it", partial(Counted, most_frequent), 4, 1),
        ("latest place of the last 4 tokens", _ngrams(NgramIndex, 4), 4, 1),
        *(
            (f"longest suffix, at least {least}", latest, least, 1)
            for least in (1, 2, 4)
        ),
        *((f"longest suffix, {per} for each token", latest, 4, per) for per in (2, 3)),
    ]
    played = []
    for name, make, least, per in arms:
        rounds = Played()
        for text in texts:
            rounds.play(text, make(), least, per, limit, price)
        played.append((name, rounds))
    return played


def _ngrams(index: Callable[[int], Any], n: int) -> Callable[[], Lookup]:
    return partial(Lookup, partial(index, n))


if __name__ == "__main__":
    run(app)
