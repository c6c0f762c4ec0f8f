"""Token windows for training, and the losses on held-out text."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from demo_training.nets.networks import Network

WINDOW = 1024
PAIRS_SHARE = 0.25
GROUPS = ("code", "prose", "edit")


@dataclass(frozen=True, slots=True)
class Data:
    """All token arrays, on the device."""

    text: Tensor
    pairs: Tensor
    held: dict[str, Tensor]
    held_bytes: dict[str, int]

    def windows(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Rows from random places: `PAIRS_SHARE` of them edit pairs."""
        paired = round(rows * PAIRS_SHARE)
        parts = ((self.text, rows - paired), (self.pairs, paired))
        return torch.cat([cut(a, count, length, generator) for a, count in parts])


def load_data(work: Path, device: str) -> Data:
    """Reads what `prepare` wrote."""
    arrays = {
        name: torch.from_numpy(array.astype(np.int32)).to(device)
        for name, array in np.load(work / "tokens.npz").items()
    }
    sizes = json.loads((work / "held_out_bytes.json").read_text(encoding="utf-8"))
    held = {group: arrays[f"held_{group}"] for group in GROUPS}
    return Data(arrays["text"], arrays["pairs"], held, sizes)


def cut(array: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows at random offsets, [rows, length]."""
    starts = torch.randint(len(array) - length, (rows, 1), generator=generator)
    steps = torch.arange(length, device=array.device)
    return array[starts.to(array.device) + steps].long()


@torch.no_grad()
def held_out_losses(network: Network, data: Data) -> dict[str, float]:
    """Mean cross-entropy per token, by group, in windows of 1,024 tokens."""
    was_training = network.training
    network.eval()
    losses = {}
    for group, array in data.held.items():
        count = (len(array) - 1) // WINDOW
        total = 0.0
        for index in range(0, count, 16):
            here = range(index, min(index + 16, count))
            rows = [array[i * WINDOW : (i + 1) * WINDOW + 1] for i in here]
            ids = torch.stack(rows).long()
            with torch.autocast(ids.device.type, torch.bfloat16):
                logits = network(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            total += loss.item() * len(rows)
        losses[group] = round(total / count, 4)
    network.train(was_training)
    return losses
