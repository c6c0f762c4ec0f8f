"""The optimiser and the loop that all trainings share."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast to train.

    The number of steps is fixed beforehand, from a measured rate, so that a run can
    be repeated whatever the machine's speed.
    """

    steps: int
    rows: int
    rate: float
    warmup: int = 150
    decay: float = 0.1
    seed: int = 1

    def rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine to two per cent."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def optimiser(module: nn.Module, plan: Plan) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim == 2]
    others = [p for p in module.parameters() if p.requires_grad and p.ndim != 2]
    fused = matrices[0].is_cuda
    groups = [
        {"params": matrices, "weight_decay": plan.decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.95), fused=fused)


def run(
    name: str, module: nn.Module, plan: Plan, loss_of: Callable[[int], Tensor]
) -> float:
    """Minimises `loss_of(step)`; returns the seconds it took."""
    steps = optimiser(module, plan)
    started, shown = time.time(), max(1, plan.steps // 20)
    recent: list[Tensor] = []
    for step in range(plan.steps):
        for group in steps.param_groups:
            group["lr"] = plan.rate_at(step)
        loss = loss_of(step)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        steps.step()
        steps.zero_grad(set_to_none=True)
        recent.append(loss.detach())
        if (step + 1) % shown == 0 or step == 20:
            mean = torch.stack(recent).mean().item()
            seconds = time.time() - started
            print(f"{name} {step + 1} loss {mean:.4f} {seconds:.0f}s", flush=True)
            recent.clear()
    return time.time() - started
