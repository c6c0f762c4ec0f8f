"""Training an EAGLE-3 head on the dense target.

The target is frozen and stored as its users have it. The head learns the target's law
over the draft vocabulary at every depth to which it is unrolled, on text and on what
the target wrote itself.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from demo_training.data.batches import WINDOW, Data, cut, load_data
from demo_training.data.vocabulary import VOCABULARY
from demo_training.export.eagle_file import LAYERS, SHAPE, export_eagle, restored
from demo_training.export.export import load_network
from demo_training.nets.eagle_network import EagleHead
from demo_training.nets.networks import Network
from demo_training.nets.shapes import SHAPES
from demo_training.train.draft import HARD
from demo_training.train.generation import (
    CHECKED_PROMPT,
    CHECKED_TOKENS,
    continued,
    own_texts,
)
from demo_training.train.optimise import Plan, run

DRAFT_IDS = 1792
DEPTHS = 6
CHECKED_DEPTHS = 8
# What a draft is worth falls with its depth; EAGLE's factor.
FADING = 0.8


def train_eagle(
    work: Path,
    demo: Path,
    out: Path,
    plan: Plan,
    device: str,
    *,
    seconds: float | None = None,
    own_rows: int = 1536,
) -> None:
    """Trains, exports to `out`/eagle, and records how often drafts are right.

    Args:
        work: Holds what `prepare` wrote.
        demo: Holds the target, in `dense`.
        out: For the checkpoint and the record.
        plan: Steps, rows and rate.
        device: Torch's name of it.
        seconds: Take as many steps as fit into this time instead of the plan's.
        own_rows: Rows that the target writes after each length of prompt.
    """
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    data = load_data(work, device)
    target = load_network(SHAPES["dense"], demo / "dense", device)
    began = time.time()
    own = own_texts(target, data, own_rows, plan.seed)
    print(f"own texts {tuple(own.shape)} {time.time() - began:.0f}s", flush=True)
    ids = frequent_ids(data, own)
    head = new_head(target, ids)
    loss = compiled_loss(target, head, ids, device)
    if seconds is not None:
        steps = steps_within(seconds, loss, batches(data, own, plan))
        head.zero_grad(set_to_none=True)
        plan = replace(plan, steps=steps)
    print("plan", plan, flush=True)
    batch = batches(data, own, plan)

    def loss_of(step: int) -> Tensor:
        if step and step % max(1, plan.steps // 3) == 0:
            export_eagle(head, ids, out / "eagle")  # in case the time runs out
        return loss(batch())

    took = run("eagle", head, plan, loss_of)
    before = depth_agreement(target, head, ids, data)
    export_eagle(head, ids, out / "eagle")
    stored = restored(out / "eagle", device)
    record = {
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "seed": plan.seed,
        "steps": plan.steps,
        "rows": plan.rows,
        "tokens": plan.steps * plan.rows * WINDOW,
        "own_tokens": own.numel(),
        "depths": DEPTHS,
        "seconds": round(took),
        "share_of_draft_ids": covered(data, ids),
        "agreement": before,
        "agreement_quantized": depth_agreement(target, stored, ids, data),
    }
    (out / "eagle.json").write_text(json.dumps(record, indent=1) + "\n")
    print("eagle", json.dumps(record), flush=True)


def frequent_ids(data: Data, own: Tensor) -> Tensor:
    """The ids that training text uses most, in order, [DRAFT_IDS]."""
    counts = sum(
        torch.bincount(array.flatten().long(), minlength=VOCABULARY).double()
        / array.numel()
        for array in (data.text, data.pairs, own)
    )
    assert isinstance(counts, Tensor)
    return counts.topk(DRAFT_IDS).indices.sort().values


def covered(data: Data, ids: Tensor) -> dict[str, float]:
    """The share of held-out tokens that the draft vocabulary has, by group."""
    return {
        group: round(torch.isin(array, ids).double().mean().item(), 4)
        for group, array in data.held.items()
    }


def new_head(target: Network, ids: Tensor) -> EagleHead:
    """A head to begin with: the target's way out, the rest random."""
    head = EagleHead(SHAPE, len(LAYERS), len(ids))
    head.to(ids.device)
    head.apply(target.reset)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.embed_tokens.weight[ids])
        head.norm.weight.copy_(target.norm.weight)
    return head


def features(target: Network, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What the head reads, [batch, n, layers * hidden], and the target's logits."""
    x, kept = target.embed(ids), []
    for index, layer in enumerate(target.layers):
        x = layer(x)
        if index in LAYERS:
            kept.append(x)
    return torch.cat(kept, -1), target.logits(target.norm(x))


def depth_loss(logits: Tensor, wanted: Tensor, likeliest: Tensor) -> Tensor:
    """Divergence from the target's law over the draft ids, plus its likeliest token.

    Args:
        logits: [batch, n, ids].
        wanted: The target's over the same ids.
        likeliest: The index of the target's choice, -1 where it is no draft id; such
            slots do not count.
    """
    found, law = logits.float().log_softmax(-1), wanted.float().log_softmax(-1)
    soft = (law.exp() * (law - found)).sum(-1)
    hard = -found.gather(-1, likeliest.clamp(min=0)[..., None])[..., 0]
    counts = (likeliest >= 0).float()
    return ((soft + HARD * hard) * counts).sum() / counts.sum().clamp(min=1)


def compiled_loss(
    target: Network, head: EagleHead, ids: Tensor, device: str
) -> Callable[[Tensor], Tensor]:
    """The loss of token rows [rows, WINDOW], all depths."""
    n = WINDOW - 8  # of slots: a multiple of 8, and DEPTHS tokens behind the last
    places = torch.full((VOCABULARY,), -1, device=device)
    places[ids] = torch.arange(len(ids), device=device)

    def loss_from(embedded: Tensor, read: Tensor, wanted: Tensor) -> Tensor:
        likeliest = places[wanted.argmax(-1)]
        law = wanted[..., ids]
        with torch.autocast(device, torch.bfloat16):
            made = head(embedded, read[:, :n], DEPTHS)
        total = law.new_zeros((), dtype=torch.float32)
        for depth, logits in enumerate(made):
            here = slice(depth + 1, depth + 1 + n)
            loss = depth_loss(logits, law[:, here], likeliest[:, here])
            total = total + FADING**depth * loss
        return total

    compiled = torch.compile(loss_from) if device == "cuda" else loss_from

    def loss(rows: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            read, wanted = features(target, rows)
        return compiled(target.embed(rows), read, wanted)

    return loss


def batches(data: Data, own: Tensor, plan: Plan) -> Callable[[], Tensor]:
    """Rows of tokens, half of them written by the target."""
    generator = torch.Generator().manual_seed(plan.seed)

    def batch() -> Tensor:
        rows = torch.randint(len(own), (plan.rows // 2,), generator=generator)
        text = data.windows(plan.rows - len(rows), WINDOW, generator)
        return torch.cat([own[rows.to(own.device)].long(), text])

    return batch


def steps_within(
    seconds: float, loss: Callable[[Tensor], Tensor], batch: Callable[[], Tensor]
) -> int:
    """How many steps fit into a time, from a few that change nothing."""
    began, timed = time.time(), 10
    for step in range(timed + 2):
        if step == 2:  # compiled by now
            print(f"compiled {time.time() - began:.0f}s", flush=True)
            began = time.time()
        found = loss(batch())
        found.backward()
        found.item()
    return max(20, int(seconds * timed / (time.time() - began)))


@torch.no_grad()
def depth_agreement(
    target: Network, head: EagleHead, ids: Tensor, data: Data
) -> dict[str, dict[str, object]]:
    """How drafts fare on the target's greedy text after held-out prompts, by group.

    `accepted_per_position` has, for rounds of `CHECKED_DEPTHS` at every position, the
    share in which a draft and all before it were right; `accepted_k` the mean number
    of accepted tokens per round of k.
    """
    found: dict[str, dict[str, object]] = {}
    generator = torch.Generator().manual_seed(7)
    for group, array in data.held.items():
        prompts = cut(array, 64, CHECKED_PROMPT, generator)
        cold = torch.zeros(64, 1, device=prompts.device)
        text = continued(target, prompts, CHECKED_PROMPT + CHECKED_TOKENS, cold)
        n = text.shape[1] - CHECKED_DEPTHS - 1
        with torch.autocast(text.device.type, torch.bfloat16):
            read, _ = features(target, text)
            made = head(target.embed(text), read[:, :n], CHECKED_DEPTHS)
        same = torch.stack(
            [
                ids[logits.argmax(-1)] == text[:, depth + 2 : depth + 2 + n]
                for depth, logits in enumerate(made)
            ],
            -1,
        )[:, CHECKED_PROMPT - 2 :]
        right = same.float().cumprod(-1)
        positions = right.mean((0, 1)).tolist()
        entry: dict[str, object] = {
            "accepted_per_position": [round(p, 4) for p in positions]
        }
        for k in (4, 8):
            entry[f"accepted_{k}"] = round(rounds_of(right[..., :k].sum(-1)), 3)
        found[group] = entry
    return found


def rounds_of(accepted: Tensor) -> float:
    """Mean accepted tokens of rounds that follow each other, [rows, slots]."""
    total = rounds = 0
    for row in accepted.int().tolist():
        at = 0
        while at < len(row):
            total, rounds = total + row[at], rounds + 1
            at += row[at] + 1
    return total / rounds
