"""Training one target on the corpus."""

import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from demo_training.data.batches import WINDOW, held_out_losses, load_data
from demo_training.export.export import export, load_network
from demo_training.nets.networks import Network
from demo_training.nets.shapes import SHAPES
from demo_training.train.optimise import Plan, run

DROPOUT = 0.15


def train_target(name: str, work: Path, out: Path, plan: Plan, device: str) -> None:
    """Trains, exports, and records the losses before and after quantization."""
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator().manual_seed(plan.seed)
    data = load_data(work, device)
    network = Network(SHAPES[name], DROPOUT).to(device)
    forward = torch.compile(network) if device == "cuda" else network

    def loss_of(step: int) -> Tensor:
        if step and step % (plan.steps // 4) == 0:
            print(name, step, held_out_losses(network, data), flush=True)
        ids = data.windows(plan.rows, WINDOW + 1, generator)
        with torch.autocast(device, torch.bfloat16):
            logits = forward(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    started = time.time()
    run(name, network, plan, loss_of)
    seconds = time.time() - started
    before = held_out_losses(network, data)
    export(network, out / name)
    after = held_out_losses(load_network(SHAPES[name], out / name, device), data)
    record = {
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "seed": plan.seed,
        "steps": plan.steps,
        "tokens": plan.steps * plan.rows * WINDOW,
        "passes": round(plan.steps * plan.rows * WINDOW / len(data.text), 1),
        "rate": plan.rate,
        "dropout": DROPOUT,
        "seconds": round(seconds),
        "held_out_loss": before,
        "held_out_loss_quantized": after,
        "held_out_bytes_per_token": {
            group: round(data.held_bytes[group] / len(data.held[group]), 3)
            for group in data.held
        },
    }
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(name, json.dumps(record), flush=True)
