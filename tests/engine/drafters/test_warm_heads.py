"""Heads draft the same after a prefix from a prefix cache as after reading the prefix.

A warm request (with a cached prefix) and a cold one have equal rounds.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from mlx_speculation import (
    BatchGenerator,
    CascadeDraft,
    LookupDraft,
    PrefixCache,
    Sampling,
    SpeculativeGenerator,
)
from mlx_speculation.engine import AssistantDraft, PEagleDraft
from mlx_speculation.engine.drafters.mtp import MtpDrafter
from support.covering import covering, others_slow
from support.drafters.batch_heads import eagle_on, mtp_on
from support.drafters.block_oracle import load_block
from support.identity import GREEDY, SAMPLED, prompt_of
from support.models.assistant_checkpoints import make as make_assistant
from support.models.eagle_checkpoints import write_eagle
from support.models.mtp_checkpoints import EACH_KIND, LAYOUTS
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

EVERY = 8  # tokens between restore points
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}
Made = tuple[Any, Any]  # a target and its draft


@cache
def eagle(name: str, layers: int | None, dialect: str = "specforge") -> Made:
    model = build(name, layers=layers)
    return model, eagle_on(model, dialect)


@cache
def block(variant: str, name: str) -> Made:
    model = build(name, layers=4)
    return model, load_block(variant, model, (0, 1, 3))


@cache
def peagle(name: str) -> Made:
    model = build(name, layers=4)
    with TemporaryDirectory() as folder:
        return model, PEagleDraft.from_folder(
            write_eagle(Path(folder), "peagle"), model
        )


@cache
def assistant(target: str) -> Made:
    made = make_assistant(target, "dense")
    return made.target, AssistantDraft(made.target, made.assistant)


@cache
def chain(*window: str) -> Made:
    """Return a target, and a chain of three layers of full attention.

    A row of the chain's last layer depends on the three tokens after its position.
    """
    full = ["full_attention"]
    config = {**LAYOUTS["step3p5"].config, "layer_types": [*window, *full * 6][:7]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LAYOUTS, "chain", replace(LAYOUTS["step3p5"], config=config))
        return mtp_on.__wrapped__("chain")


def cascade(made: Made) -> Made:
    return made[0], CascadeDraft(LookupDraft(history=0), made[1])


CHAIN = "mtp, a chain of full attention"
# Targets with full attention, with windows, and with recurrent layers.
KINDS: dict[str, Callable[[], Made]] = {
    "mtp, one layer": lambda: mtp_on("deepseek_v3"),
    "mtp, recurrent target": lambda: mtp_on("qwen3_5"),
    "mtp, two caches a layer": lambda: mtp_on("deepseek_v32"),
    "mtp, windows": lambda: mtp_on("exaone_moe"),
    "mtp, windows in several layers": lambda: mtp_on("mimo_v2_flash"),
    CHAIN: lambda: chain(*["full_attention"] * 4),
    "mtp, a chain on windows": lambda: chain(*["sliding_attention"] * 2),
    "eagle": lambda: eagle("llama", 4),
    "eagle, recurrent target": lambda: eagle("qwen3_5", 4),
    "eagle, sliding target": lambda: eagle("gemma3_text", None),
    "peagle": lambda: peagle("llama"),
    "peagle, recurrent target": lambda: peagle("qwen3_5"),
    "dflash": lambda: block("full", "llama"),
    "dflash, recurrent target": lambda: block("full", "qwen3_5"),
    "dflash2": lambda: block("dflash2", "llama"),
    "dspark": lambda: block("deepspec, rnn", "qwen3_5"),
    "assistant": lambda: assistant("shared"),
    "assistant, sliding target": lambda: assistant("gemma3"),
    "cascade": lambda: cascade(eagle("llama", 4)),
}
# Each family of drafters, and each kind of target, at least once.
QUICK = {
    *("mtp, one layer", "mtp, windows", CHAIN, "eagle, recurrent target", "peagle"),
    *("dflash", "assistant, sliding target", "cascade"),
}

# Heads with both kinds of layers: full attention and sliding windows.
MIXED: dict[str, Callable[[], Made]] = {
    "mtp, a chain of layers": lambda: mtp_on("step3p5"),
    "eagle of several layers": lambda: eagle("llama", 4, "several layers"),
}


LAYOUTS_LEFT = sorted(
    LAYOUTS.keys()
    - {"deepseek_v3", "qwen3_5", "deepseek_v32", "exaone_moe", "mimo_v2_flash"}
    - {"step3p5"}
)


@pytest.fixture(name="proposed")
def _proposed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    drafts: list[list[int]] = []
    propose = MtpDrafter.propose

    def noted(self: Any, *args: Any) -> Any:
        draft = propose(self, *args)
        tokens: Any = draft.tokens.tolist()
        drafts.append(tokens)
        return draft

    monkeypatch.setattr(MtpDrafter, "propose", noted)
    return drafts


def rounds_of(
    generator: SpeculativeGenerator,
    prompt: list[int],
    proposed: list[list[int]],
    **options: Any,
) -> dict[str, Any]:
    proposed.clear()
    options = {"max_tokens": 8, "stop_tokens": (), **options}
    result = generator.generate(prompt, **options)
    assert not result.stats.drafter_faults
    return {
        "text": result.tokens,
        "rounds": result.stats.rounds,
        "accepted": result.stats.reached,
        "proposed": [list(each) for each in proposed],
    }


@pytest.mark.parametrize(
    ("kind", "chosen"), covering(KINDS, SAMPLINGS, quick=(0, QUICK))
)
def test_warm_rounds_are_those_of_a_cold_request(
    kind: str, chosen: str, proposed: list[list[int]]
) -> None:
    target, draft = KINDS[kind]()
    sampling = SAMPLINGS[chosen]
    prefixes = PrefixCache(1 << 30, every=EVERY)

    def made(cache: PrefixCache | None) -> SpeculativeGenerator:
        return SpeculativeGenerator(
            target, byte_tokenizer(), draft=draft, draft_length=3, prefix_cache=cache
        )

    warm, cold = made(prefixes), made(None)
    prompt = prompt_of(37)
    first = rounds_of(warm, prompt, proposed, sampling=sampling)
    turn = [*prompt, *first["text"], *prompt_of(9)]
    requests = {
        "the same prompt": prompt,
        "a further turn": turn,
        "parted in the middle": [*prompt[:21], *prompt_of(12)],
        "a beginning": turn[:50],
    }
    for name, tokens in requests.items():
        wanted = rounds_of(cold, tokens, proposed, sampling=sampling)
        assert wanted["proposed"][0], name  # a cold request drafts at once
        assert rounds_of(warm, tokens, proposed, sampling=sampling) == wanted, name
    last = warm.generate(prompt, max_tokens=1, stop_tokens=())
    assert last.stats.reused > 0


@pytest.mark.parametrize(
    "layout", others_slow(LAYOUTS_LEFT, [x for x in LAYOUTS_LEFT if x in EACH_KIND])
)
def test_warm_rounds_of_every_layout_of_heads(
    layout: str, proposed: list[list[int]]
) -> None:
    target, draft = mtp_on(layout)
    options: dict[str, Any] = {"draft": draft, "draft_length": 2}
    cold = SpeculativeGenerator(target, byte_tokenizer(), **options)
    options["prefix_cache"] = PrefixCache(1 << 30, every=EVERY)
    warm = SpeculativeGenerator(target, byte_tokenizer(), **options)
    prompt = prompt_of(29)
    for tokens in (prompt, [*prompt, *prompt_of(5)], [*prompt[:19], *prompt_of(7)]):
        wanted = rounds_of(cold, tokens, proposed)
        assert wanted["proposed"][0]
        assert rounds_of(warm, tokens, proposed) == wanted
    assert warm.generate(prompt, max_tokens=1).stats.reused > 0


@pytest.mark.parametrize("kind", MIXED)
def test_heads_of_both_kinds_of_layers_begin_where_the_text_resumes(
    kind: str, proposed: list[list[int]]
) -> None:
    target, draft = MIXED[kind]()
    options: dict[str, Any] = {"draft": draft, "draft_length": 3}
    cold = SpeculativeGenerator(target, byte_tokenizer(), **options)
    options["prefix_cache"] = PrefixCache(1 << 30, every=EVERY)
    warm = SpeculativeGenerator(target, byte_tokenizer(), **options)
    prompt = prompt_of(37)
    wanted = rounds_of(cold, prompt, proposed)
    for _ in range(2):
        rounds = rounds_of(warm, prompt, proposed)
        assert rounds["text"] == wanted["text"]
        assert rounds["proposed"][0]


def test_what_a_closed_request_leaves_is_of_use(proposed: list[list[int]]) -> None:
    target, draft = KINDS["eagle"]()
    prefixes = PrefixCache(1 << 30)
    warm = SpeculativeGenerator(
        target, byte_tokenizer(), draft=draft, draft_length=3, prefix_cache=prefixes
    )
    cold = SpeculativeGenerator(target, byte_tokenizer(), draft=draft, draft_length=3)
    prompt = prompt_of(37)
    wanted = rounds_of(cold, prompt, proposed)
    for rounds in (0, 1, 3):
        prefixes.clear()
        with warm.stream(prompt, max_tokens=20, stop_tokens=()) as stream:
            for _ in range(rounds):
                stream.next_round()
        assert rounds_of(warm, prompt, proposed) == wanted


@pytest.mark.parametrize(
    "kind",
    others_slow(
        [
            "eagle",
            "eagle, recurrent target",
            "peagle",
            "mtp, a chain of full attention",
        ],
        ["eagle", "mtp, a chain of full attention"],
    ),
)
def test_rows_of_a_head_go_with_those_of_its_target(
    kind: str, proposed: list[list[int]]
) -> None:
    """The rows of both are in the same nodes, and a node is evicted as a whole."""
    target, draft = KINDS[kind]()
    unlimited = PrefixCache(1 << 30)

    def made(prefixes: PrefixCache | None) -> SpeculativeGenerator:
        return SpeculativeGenerator(
            target, byte_tokenizer(), draft=draft, draft_length=3, prefix_cache=prefixes
        )

    prompts = [[seed, *prompt_of(40)[:30]] for seed in range(4)]
    generator = made(unlimited)
    cold = [rounds_of(generator, prompt, proposed) for prompt in prompts]
    budget = unlimited.nbytes // 2
    prefixes = PrefixCache(budget)
    generator = made(prefixes)
    for number in (0, 1, 2, 3, 3, 2, 1, 0):
        assert rounds_of(generator, prompts[number], proposed) == cold[number]
        assert prefixes.nbytes <= budget
        assert all(node.rows.keys() == {0, 1} for node in prefixes._tree.nodes())


@cache
def small_model(name: str) -> Made:
    return build(name), build(name)


BATCHED: dict[str, Callable[[], Made]] = {
    **{kind: KINDS[kind] for kind in ("mtp, one layer", "mtp, recurrent target")},
    **{kind: made for kind, made in KINDS.items() if kind[:5] in ("eagle", "peagl")},
    **{kind: KINDS[kind] for kind in ("mtp, windows", CHAIN, "dflash", "assistant")},
    "cascade": KINDS["cascade"],
    "draft model": lambda: small_model("llama"),
    "recurrent draft model": lambda: small_model("qwen3_5"),
}


@pytest.mark.parametrize(
    ("kind", "chosen"), covering(BATCHED, SAMPLINGS, quick=(0, BATCHED.keys() & QUICK))
)
def test_a_turn_after_a_batch_is_that_after_a_stream(
    kind: str, chosen: str, proposed: list[list[int]]
) -> None:
    target, draft = BATCHED[kind]()
    prompts = [prompt_of(count) for count in (37, 22)]
    options: dict[str, Any] = {"sampling": SAMPLINGS[chosen], "max_tokens": 17}

    def made() -> tuple[SpeculativeGenerator, PrefixCache]:
        prefixes = PrefixCache(1 << 30, every=EVERY)
        return (
            SpeculativeGenerator(
                target,
                byte_tokenizer(),
                draft=draft,
                draft_length=3,
                prefix_cache=prefixes,
            ),
            prefixes,
        )

    def second(
        made: tuple[SpeculativeGenerator, PrefixCache], known: list[int]
    ) -> dict[str, Any]:
        generator, prefixes = made
        rows = [prefixes.lookup(role, known) for role in range(len(prefixes._roles))]
        stops = [each.stop for each in rows if each is not None]
        turn_report = {"missing": [stops[0] - stop for stop in stops]}
        turn = [*known, *prompt_of(9)]
        sampling = options["sampling"]
        return turn_report | rounds_of(generator, turn, proposed, sampling=sampling)

    streams, batched = made(), made()
    with BatchGenerator(batched[0]) as batch:
        uids = [batch.insert(prompt, stop_tokens=(), **options) for prompt in prompts]
        assert [batch.why_alone(uid) for uid in uids] == [None] * len(uids)
        while batch.running or batch.waiting:
            batch.next()
        texts = [batch.result(uid).tokens for uid in uids]
    for prompt, text in zip(prompts, texts, strict=True):
        assert rounds_of(streams[0], prompt, proposed, **options)["text"] == text
    for prompt, text in zip(prompts, texts, strict=True):
        known = [*prompt, *text]
        assert second(batched, known) == second(streams, known)


@pytest.mark.parametrize("kind", ["peagle", "dflash", "mtp, one layer"])
def test_a_batch_leaves_what_a_stream_leaves(kind: str) -> None:
    """A batch with drafts does not always feed the last token of a text."""
    target, draft = KINDS[kind]()
    options: dict[str, Any] = {"max_tokens": 17, "stop_tokens": ()}
    prompts = [prompt_of(count) for count in (37, 22)]

    def stops(texts: list[list[int]], prefixes: PrefixCache) -> list[list[int]]:
        roles = range(len(prefixes._roles))
        both = [[prefixes.lookup(role, known) for role in roles] for known in texts]
        return [[0 if rows is None else rows.stop for rows in each] for each in both]

    def left(prompts: list[list[int]], *, batched: bool) -> list[list[int]]:
        prefixes = PrefixCache(1 << 30)
        generator = SpeculativeGenerator(
            target,
            byte_tokenizer(),
            draft=draft,
            draft_length=3,
            prefix_cache=prefixes,
        )
        if batched:
            results = generator.generate_batch(prompts, **options)
        else:
            results = [generator.generate(prompt, **options) for prompt in prompts]
        pairs = zip(prompts, results, strict=True)
        return stops([prompt + result.tokens for prompt, result in pairs], prefixes)

    alone = left(prompts, batched=False)
    for prompt, expected in zip(prompts, alone, strict=True):
        assert left([prompt], batched=True) == [expected]
    for ours, theirs in zip(left(prompts, batched=True), alone, strict=True):
        missing = {stop - other for stop, other in zip(theirs, ours, strict=True)}
        assert missing in ({0}, {1})


DRAFTED: dict[str, Callable[[], Made]] = {
    "dense": lambda: (build("llama"), build("llama", seed=1)),
    "sliding": lambda: (build("gemma3_text"), build("gemma3_text", seed=1)),
    "hybrid": lambda: (build("qwen3_5"), build("qwen3_5", seed=1)),
    "hybrid, mtp": KINDS["mtp, recurrent target"],
    "dense, eagle": KINDS["eagle"],
}
# At this temperature some drafts of a random model are accepted.
HOT: dict[str, Any] = {
    "sampling": Sampling(temperature=3.0, seed=3),
    "max_tokens": 17,
    "stop_tokens": (),
}
Counts = list[tuple[list[int], int, int, list[int]]]


def in_streams(ours: SpeculativeGenerator, prompts: list[list[int]]) -> list[Any]:
    return [ours.generate(each, **HOT) for each in prompts]


def in_a_batch(ours: SpeculativeGenerator, prompts: list[list[int]]) -> list[Any]:
    with BatchGenerator(ours) as batch:
        uids = [batch.insert(each, **HOT) for each in prompts]
        assert [batch.why_alone(uid) for uid in uids] == [None] * len(uids)
        while batch.running or batch.waiting:
            batch.next()
        return [batch.result(uid) for uid in uids]


@pytest.mark.parametrize(
    ("kind", "runs"),
    covering(DRAFTED, (in_streams, in_a_batch), quick=(0, ("hybrid", "dense, eagle"))),
)
def test_acceptance_of_warm_requests_is_that_of_cold_ones(
    kind: str, runs: Callable[..., list[Any]], tmp_path: Path
) -> None:
    target, draft = DRAFTED[kind]()
    prompts = [prompt_of(count) for count in (41, 26)]
    further = [[*prompt, *prompt_of(11)] for prompt in prompts]
    # The cache knows these prompts but for their last tokens.
    nearly = [[*prompt, 7] for prompt in prompts]

    def counted(
        prefixes: PrefixCache | None, *requests: list[list[int]]
    ) -> tuple[list[Counts], list[Any]]:
        ours = SpeculativeGenerator(
            target,
            byte_tokenizer(),
            draft=draft,
            draft_length=3,
            prefix_cache=prefixes,
        )
        results = [runs(ours, each) for each in requests]
        counts = [
            [(r.tokens, r.stats.rounds, r.stats.drafted, r.stats.reached) for r in each]
            for each in results
        ]
        return counts, [r.stats for each in results for r in each]

    def kept() -> PrefixCache:
        return PrefixCache(1 << 30, every=EVERY, folder=tmp_path / "own")

    cold, _ = counted(None, prompts, further, nearly)
    assert sum(accepted for *_, each in cold[0] for accepted in each) > 0
    prefixes = kept()
    counted(prefixes, prompts)
    prefixes.flush()
    for prefix_cache, restarted in ((prefixes, False), (kept(), True)):
        warm, stats = counted(prefix_cache, prompts, further, nearly)
        prefix_cache.flush()
        assert warm == cold
        assert min(each.reused for each in stats) >= 16
        from_disk = sum(each.reused_from_disk for each in stats)
        assert (from_disk > 0) == restarted
