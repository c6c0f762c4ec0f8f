"""Continuations that a target writes itself, and how often a draft agrees with them."""

import torch
from torch import Tensor

from demo_training.data.batches import WINDOW, Data, cut
from demo_training.nets.networks import Cache, Network

PROMPT_LENGTHS = (128, 256, 384)
CHECKED_PROMPT = 192
CHECKED_TOKENS = 128
DRAFT_LENGTHS = (4, 6)


@torch.no_grad()
def continued(
    network: Network, prompts: Tensor, length: int, temperature: Tensor
) -> Tensor:
    """Prompts and their continuations, [rows, length].

    Args:
        network: The target.
        prompts: [rows, n], n a multiple of the recurrence's chunk.
        length: Tokens per row, prompt included.
        temperature: [rows, 1]; zero chooses the likeliest token.
    """
    caches: list[Cache] = [{} for _ in network.layers]
    ids = torch.cat([prompts, prompts.new_zeros(len(prompts), 1)], -1)[:, :0]
    block, written = prompts, [prompts]
    while True:
        with torch.autocast(ids.device.type, torch.bfloat16):
            hidden = network.hidden(block, caches, ids.shape[1])
            logits = network.logits(hidden[:, -1]).float()
        ids = torch.cat([ids, block], -1)
        noise = -torch.empty_like(logits).exponential_().log()
        block = (logits + temperature * noise).argmax(-1, keepdim=True)
        written.append(block)
        if ids.shape[1] + 1 == length:
            return torch.cat(written, -1)


def own_texts(network: Network, data: Data, rows: int, seed: int) -> Tensor:
    """What a target writes after training text, `rows` rows for each prompt length.

    Half is greedy; the rest is sampled, since a draft that only saw the likeliest text
    would know nothing off that path.
    """
    generator = torch.Generator().manual_seed(seed)
    made = []
    for size in PROMPT_LENGTHS:
        prompts = data.windows(rows, size, generator)
        temperature = torch.rand(rows, 1, generator=generator) * 2 - 1
        warm = temperature.clamp(min=0).to(prompts.device)
        made.append(continued(network, prompts, WINDOW, warm))
    return torch.cat(made)


@torch.no_grad()
def agreement(target: Network, draft: Network, data: Data) -> dict[str, object]:
    """How a draft fares on greedy continuations of held-out text, by group.

    `agreement` is the share of positions where both choose the same token;
    `accepted_k` the mean number of accepted tokens per round of k drafted ones.
    """
    found: dict[str, object] = {}
    generator = torch.Generator().manual_seed(7)
    for group, array in data.held.items():
        prompts = cut(array, 64, CHECKED_PROMPT, generator)
        cold = torch.zeros(64, 1, device=prompts.device)
        ids = continued(target, prompts, CHECKED_PROMPT + CHECKED_TOKENS, cold)
        with torch.autocast(ids.device.type, torch.bfloat16):
            chosen = draft(ids[:, :-1]).argmax(-1)
        same = (chosen == ids[:, 1:])[:, CHECKED_PROMPT - 1 :]
        entry = {"agreement": round(same.float().mean().item(), 4)}
        for k in DRAFT_LENGTHS:
            entry[f"accepted_{k}"] = round(mean_accepted(same.cpu(), k), 3)
        found[group] = entry
    return found


def mean_accepted(same: Tensor, k: int) -> float:
    """Replays rounds of k drafts over rows of agreement flags."""
    accepted = rounds = 0
    for row in same.tolist():
        at = 0
        while at + k < len(row):
            run = next((i for i in range(k) if not row[at + i]), k)
            accepted, rounds, at = accepted + run, rounds + 1, at + run + 1
    return accepted / rounds
