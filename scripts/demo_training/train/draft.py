"""Distilling the draft from all three targets."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from demo_training.data.batches import WINDOW, held_out_losses, load_data
from demo_training.export.export import export, load_network
from demo_training.nets.networks import Network
from demo_training.nets.shapes import SHAPES
from demo_training.train.generation import agreement, own_texts
from demo_training.train.optimise import Plan, run

TARGETS = ("dense", "sliding", "hybrid")
# The dense and the sliding target depend on this draft; the hybrid has its own head.
TURNS = ("dense", "sliding", "hybrid", "dense", "sliding", "hybrid", "dense", "sliding")
# Beside the whole distribution, the likeliest token counts once more.
HARD = 0.5


def write_own_texts(
    name: str, work: Path, out: Path, rows: int, seed: int, device: str
) -> None:
    """One target's continuations of training prompts, saved for `train_draft`."""
    torch.manual_seed(seed)
    data = load_data(work, device)
    network = load_network(SHAPES[name], out / name, device)
    ids = own_texts(network, data, rows, seed)
    np.save(work / f"own_{name}.npy", ids.cpu().numpy().astype(np.uint16))


def read_own_texts(name: str, work: Path, device: str) -> Tensor:
    """What `write_own_texts` saved, [rows, WINDOW]."""
    return torch.from_numpy(np.load(work / f"own_{name}.npy").astype(np.int32)).to(
        device
    )


def distillation_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Kullback-Leibler divergence, plus cross-entropy with the likeliest token."""
    found = logits.float().log_softmax(-1)
    wanted = wanted.float().log_softmax(-1)
    soft = (wanted.exp() * (wanted - found)).sum(-1)
    hard = -found.gather(-1, wanted.argmax(-1, keepdim=True))[..., 0]
    return (soft + HARD * hard).mean()


def train_draft(work: Path, out: Path, plan: Plan, device: str) -> None:
    """Half of every batch is what that batch's target wrote itself."""
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator().manual_seed(plan.seed)
    data = load_data(work, device)
    targets = {name: load_network(SHAPES[name], out / name, device) for name in TARGETS}
    written = {name: read_own_texts(name, work, device) for name in TARGETS}
    draft = Network(SHAPES["draft"]).to(device)

    def loss_from(ids: Tensor, wanted: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits = draft(ids)
        return distillation_loss(logits, wanted)

    compiled = torch.compile(loss_from) if device == "cuda" else loss_from

    def loss_of(step: int) -> Tensor:
        if step and step % (plan.steps // 3) == 0:
            print(step, agreement(targets["dense"], draft, data), flush=True)
            export(draft, out / "draft")
        name = TURNS[step % len(TURNS)]
        own = written[name]
        rows = torch.randint(len(own), (plan.rows // 2,), generator=generator)
        text = data.windows(plan.rows - len(rows), WINDOW, generator)
        ids = torch.cat([own[rows.to(device)].long(), text])
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            wanted = targets[name](ids)
        return compiled(ids, wanted)

    seconds = run("draft", draft, plan, loss_of)
    export(draft, out / "draft")
    stored = load_network(SHAPES["draft"], out / "draft", device)
    record = {
        "parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "seed": plan.seed,
        "steps": plan.steps,
        "tokens": plan.steps * plan.rows * WINDOW,
        "own_tokens": {name: own.numel() for name, own in written.items()},
        "rate": plan.rate,
        "seconds": round(seconds),
        "held_out_loss": held_out_losses(draft, data),
        "held_out_loss_quantized": held_out_losses(stored, data),
        "agreement": {n: agreement(targets[n], draft, data) for n in TARGETS},
        "agreement_quantized": {
            n: agreement(targets[n], stored, data) for n in TARGETS
        },
    }
    (out / "draft.json").write_text(json.dumps(record, indent=1) + "\n")
    print("draft", json.dumps(record), flush=True)
