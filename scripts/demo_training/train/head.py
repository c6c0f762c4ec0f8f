"""Training the hybrid target's head for multi-token prediction.

Slot i pairs the target's state after its final norm at position i with token i + 1 and
is to predict what the target would choose after token i + 1. The target is frozen. A
second pass feeds the head's own state back, as drafting further does.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from demo_training.data.batches import WINDOW, Data, cut, load_data
from demo_training.export.export import add_head, load_network, restore
from demo_training.nets.networks import Network, PredictionHead
from demo_training.nets.shapes import SHAPES
from demo_training.train.draft import distillation_loss, read_own_texts
from demo_training.train.generation import CHECKED_PROMPT, CHECKED_TOKENS, continued
from demo_training.train.optimise import Plan, run

SECOND = 0.5


def train_head(work: Path, out: Path, plan: Plan, device: str) -> None:
    """Trains on text and on what the target wrote, then adds the head to its file."""
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator().manual_seed(plan.seed)
    data = load_data(work, device)
    shape = SHAPES["hybrid"]
    target = load_network(shape, out / "hybrid", device)
    own = read_own_texts("hybrid", work, device)
    head = PredictionHead(shape).to(device)
    head.apply(target.reset)

    def loss_from(embedded: Tensor, hidden: Tensor, wanted: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            first = head(embedded[:, 1:], hidden[:, :-1])
            second = head(embedded[:, 2:], first[:, :-1])
            loss = distillation_loss(target.logits(first), wanted[:, 1:])
            again = distillation_loss(target.logits(second), wanted[:, 2:])
        return loss + SECOND * again

    compiled = torch.compile(loss_from) if device == "cuda" else loss_from

    def loss_of(step: int) -> Tensor:
        rows = torch.randint(len(own), (plan.rows // 2,), generator=generator)
        text = data.windows(plan.rows - len(rows), WINDOW, generator)
        ids = torch.cat([own[rows.to(device)].long(), text])
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            hidden = target.hidden(ids)
            wanted = target.logits(hidden)
        return compiled(target.embed(ids), hidden, wanted)

    seconds = run("head", head, plan, loss_of)
    before = head_agreement(target, head, data)
    add_head(head, shape, out / "hybrid")
    stored = PredictionHead(shape)
    restore(stored, out / "hybrid" / "model.safetensors", "mtp.", shape)
    record = {
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "seed": plan.seed,
        "steps": plan.steps,
        "tokens": plan.steps * plan.rows * WINDOW,
        "seconds": round(seconds),
        "agreement": before,
        "agreement_quantized": head_agreement(target, stored.to(device), data),
    }
    (out / "head.json").write_text(json.dumps(record, indent=1) + "\n")
    print("head", json.dumps(record), flush=True)


@torch.no_grad()
def head_agreement(
    target: Network, head: PredictionHead, data: Data
) -> dict[str, dict[str, float]]:
    """Agreement with the target's greedy text, for the first and second draft."""
    found = {}
    generator = torch.Generator().manual_seed(7)
    for group, array in data.held.items():
        prompts = cut(array, 64, CHECKED_PROMPT, generator)
        cold = torch.zeros(64, 1, device=prompts.device)
        ids = continued(target, prompts, CHECKED_PROMPT + CHECKED_TOKENS, cold)
        with torch.autocast(ids.device.type, torch.bfloat16):
            hidden, embedded = target.hidden(ids), target.embed(ids)
            first = head(embedded[:, 1:], hidden[:, :-1])
            second = head(embedded[:, 2:], first[:, :-1])
            one = target.logits(first[:, :-1]).argmax(-1) == ids[:, 2:]
            two = target.logits(second[:, :-1]).argmax(-1) == ids[:, 3:]
        new = slice(CHECKED_PROMPT - 2, None)
        found[group] = {
            "first": round(one[:, new].float().mean().item(), 4),
            "second": round(two[:, new].float().mean().item(), 4),
        }
    return found
