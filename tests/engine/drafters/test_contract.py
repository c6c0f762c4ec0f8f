"""Contract of drafters: proposals depend on the committed tokens alone.

Each draft is compared with that of a twin that gets only the tokens. The test, not the
target, chooses the committed tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation import LookupDraft
from mlx_speculation.engine import AssistantDraft, Drafter, PEagleDraft
from mlx_speculation.engine.drafters.base import Choose
from mlx_speculation.engine.drafters.cascade import CascadeDrafter
from mlx_speculation.engine.drafters.draft_model import ModelDraft
from mlx_speculation.engine.drafters.user_drafter import adapted
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane, ModelHooks
from mlx_speculation.samplers import Chooser, Verifier
from support.covering import covering
from support.drafters import from_nothing
from support.drafters.batch_heads import eagle_on, mtp_on
from support.drafters.block_oracle import load_block
from support.drafters.from_nothing import FromNothing
from support.identity import GREEDY, SAMPLED, prompt_of
from support.models.assistant_checkpoints import HEADS, TARGETS
from support.models.assistant_checkpoints import make as make_assistant
from support.models.block_checkpoints import PACKAGINGS
from support.models.dflash_checkpoints import VARIANTS
from support.models.eagle_checkpoints import DIALECTS, PARALLEL, write_eagle
from support.models.mtp_checkpoints import LAYOUTS
from support.models.tiny_models import build

# Some heads have no list of layers.
pytestmark = pytest.mark.filterwarnings("ignore:.*lists no layers of its target")

PROMPT = 21  # more than a window of 16

CORPUS = [*prompt_of(PROMPT), 1, 2, 3, *prompt_of(PROMPT)[5:]]
LOOKUP = LookupDraft(corpus=[CORPUS])
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}
# The limit of a draft, and the number of accepted tokens, or how the round fails.
# "others": the drafter is not asked; `limit` tokens of another one are accepted.
Round = tuple[int, int | str]
ROUNDS: list[Round] = [
    (3, 2),
    (4, "fails"),
    (4, 0),
    (2, 9),
    (3, "fails when settled"),
    (1, 1),
    (3, "others"),
    (5, 3),
    (2, "others"),
    (2, "fails"),
    (3, 9),
    (3, 1),
]


@dataclass(frozen=True, slots=True)
class Kind:
    """A drafter on a target, and a twin that proposes from nothing but the tokens."""

    model: nn.Module
    open: Callable[[Lane, Sequence], Drafter]
    twin: FromNothing
    others: tuple[nn.Module, ...] = ()  # the models of the drafter
    least: int = 10  # the fewest tokens that it must propose in all rounds


def start_over(kind: Callable[[], Kind]) -> FromNothing:
    """Return a twin that opens the drafter anew on the current tokens."""

    def opened(sequence: Sequence, count: int, choose: Choose) -> list[int]:
        made, copied = kind(), Sequence(list(sequence.tokens))
        lane = Lane(made.model)
        drafter = made.open(lane, copied)
        lane.feed(copied.tokens[:-1])
        drafter.begin(copied)
        tokens: Any = drafter.propose(copied, count, choose).tokens.tolist()
        return list(tokens)

    return opened


@cache
def of_model(name: str) -> Kind:
    target, draft = build("llama"), build(name, seed=1)
    source = ModelDraft(draft)
    return Kind(target, source.open, from_nothing.of_model(draft), (draft,))


def of_lookup() -> Kind:
    def open_lookup(lane: Lane, sequence: Sequence) -> Drafter:
        drafter: Drafter = LOOKUP.open(lane, sequence)
        return drafter

    twin = start_over(of_lookup)
    return Kind(of_model("llama").model, open_lookup, twin, least=6)


def of_cascade() -> Kind:
    """Return a cascade whose model reads nothing while the lookup drafts."""
    lookup, model = of_lookup(), of_model("llama")

    def open_cascade(lane: Lane, sequence: Sequence) -> Drafter:
        each = (kind.open(lane, sequence) for kind in (lookup, model))
        return CascadeDrafter(*map(adapted, each))

    def sequential(sequence: Sequence, count: int, choose: Choose) -> list[int]:
        looked_up = lookup.twin(sequence, count, choose)
        return looked_up or model.twin(sequence, count, choose)

    return Kind(model.model, open_cascade, sequential, model.others)


@cache
def of_mtp(layout: str) -> Kind:
    target, draft = mtp_on(layout)
    return Kind(target, draft.open, from_nothing.of_mtp(draft))


@cache
def of_eagle(dialect: str, name: str) -> Kind:
    depths = {"llama": 4, "qwen3_5": 4}
    model = build(name, layers=depths.get(name))
    draft = eagle_on(model, dialect)
    return Kind(model, draft.open, from_nothing.of_eagle(draft))


@cache
def of_block(variant: str, name: str) -> Kind:
    model = build(name, layers=4)
    draft = load_block(variant, model, (0, 1, 3))
    return Kind(model, draft.open, from_nothing.of_block(draft))


@cache
def of_peagle(dialect: str, name: str) -> Kind:
    model = build(name, layers=4)
    with TemporaryDirectory() as folder:
        written = write_eagle(Path(folder), dialect)
        draft: Any = PEagleDraft.from_folder(written, model)
    return Kind(model, draft.open, from_nothing.of_peagle(draft))


def of_assistant(target: str, head: str) -> Kind:
    made = make_assistant(target, head)
    draft = AssistantDraft(made.target, made.assistant)
    twin = start_over(lambda: of_assistant(target, head))
    return Kind(made.target, draft.open, twin)


EAGLES = [
    *(("specforge", name) for name in ("llama", "qwen3_5", "gemma3_text")),
    ("authors", "qwen3_5"),
    *((d, "llama") for d in DIALECTS if d not in ("specforge", "authors")),
]
KINDS: dict[str, Callable[[], Kind]] = {
    "lookup": of_lookup,
    "cascade": of_cascade,
    **{
        f"model {name}": partial(of_model, name)
        for name in ("llama", "gemma3_text", "qwen3_5", "mamba", "lfm2")
    },
    **{f"mtp {layout}": partial(of_mtp, layout) for layout in LAYOUTS},
    **{f"eagle {d} {name}": partial(of_eagle, d, name) for d, name in EAGLES},
    "peagle peagle qwen3_5": partial(of_peagle, "peagle", "qwen3_5"),
    **{f"peagle {d} llama": partial(of_peagle, d, "llama") for d in PARALLEL},
    **{
        f"block {variant} qwen3_5": partial(of_block, variant, "qwen3_5")
        for variant in ("full", "dflash2", "deepspec, rnn", "speculators, given")
    },
    **{
        f"block {variant} llama": partial(of_block, variant, "llama")
        for variant in (*VARIANTS, *PACKAGINGS)
    },
    **{
        f"assistant {target} {head}": partial(of_assistant, target, head)
        for target in TARGETS
        for head in HEADS
    },
}

# One of each drafter, of each form of its caches, and of each way to choose a block's
# tokens. Other kinds differ in files and layers; other tests compare them with
# references.
QUICK = (
    *("lookup", "cascade", "model gemma3_text", "model qwen3_5"),
    *("mtp qwen3_5", "mtp step3p5", "mtp deepseek_v32", "mtp mimo"),
    *("eagle specforge gemma3_text", "eagle authors qwen3_5"),
    *("eagle several layers llama", "peagle peagle qwen3_5"),
    *("block full qwen3_5", "block sliding llama", "block nvidia llama"),
    *("block dflash2 qwen3_5", "block dflash2, causal llama"),
    *("block deepspec, rnn qwen3_5", "block deepspec, gated llama"),
    *("block speculators, given llama", "assistant gemma3 centroids"),
    "assistant shared dense",
)


def commit(lane: Lane, sequence: Sequence, fed: list[int], kept: list[int]) -> None:
    """Let the target read the tokens `fed`, and commit the tokens `kept`."""
    with lane.begin() as lane_round:
        mx.eval(lane_round.forward(mx.array([sequence.tokens[-1], *fed])))
        lane_round.commit(len(kept))
    sequence.tokens += kept


def play(kind: Kind, choose: Choose) -> int:
    sequence = Sequence(prompt_of(PROMPT))
    lane = Lane(kind.model)
    drafter = kind.open(lane, sequence)
    lane.feed(sequence.tokens[:-1])
    drafter.begin(sequence)
    proposed = 0
    for number, (limit, kept) in enumerate(ROUNDS):
        following_token = sequence.tokens[2 * number]  # so that the text repeats itself
        if kept == "others":
            text = sequence.tokens[3 : 3 + limit]
            commit(lane, sequence, text, [*text, following_token])
            continue
        draft = drafter.propose(sequence, limit, choose)
        tokens: list[int] = cast(Any, draft.tokens.tolist())
        assert len(tokens) <= limit
        expected = kind.twin(sequence, len(tokens) or limit, choose)
        assert tokens == expected, f"round {number}: {tokens} instead of {expected}"
        proposed += len(tokens)
        if isinstance(kept, str):
            if kept == "fails when settled":
                drafter.settle(min(1, len(tokens)))
            drafter.discard()
            continue
        accepted = min(kept, len(tokens))
        drafter.settle(accepted)
        commit(lane, sequence, tokens, [*tokens[:accepted], following_token])
    return proposed


@pytest.mark.parametrize(
    ("name", "chosen"), covering(KINDS, SAMPLINGS, quick=(0, QUICK))
)
def test_a_draft_follows_from_the_committed_tokens_alone(
    name: str, chosen: str
) -> None:
    kind = KINDS[name]()
    choose = Verifier(Chooser(SAMPLINGS[chosen], 256)).propose
    owners = [ModelHooks(model) for model in (kind.model, *kind.others)]
    try:
        proposed = play(kind, choose)
    finally:
        for owner in owners:
            owner.remove()
    assert proposed >= kind.least
