"""Training an assistant of the sliding target.

Row i begins with the target's state at position i and token i + 1, and is to choose
what the target chooses after it; every further step is fed the next token and the
assistant's own state. The target is frozen. Half of every batch is what it wrote.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from demo_training.data.batches import WINDOW, Data, cut, load_data
from demo_training.export.export import load_network, restore, tensors_of
from demo_training.nets.assistant_network import Assistant, KeyValues, read_target
from demo_training.nets.assistant_shape import AssistantShape, config
from demo_training.nets.networks import Network
from demo_training.train.draft import distillation_loss, read_own_texts
from demo_training.train.generation import CHECKED_PROMPT, CHECKED_TOKENS, continued
from demo_training.train.optimise import Plan, run

STEPS = 4  # drafts of a row in training
FADE = 0.8  # a draft counts only where all before it were accepted
CHECKED_STEPS = 8
TRIED = 40  # steps that tell how many fit into the time

Losses = Callable[[Tensor], Tensor]


def train_assistant(
    work: Path, demo: Path, out: Path, plan: Plan, seconds: int, device: str
) -> None:
    """Trains, exports, and records what is accepted.

    Args:
        work: Holds the tokens, and the texts that the target wrote.
        demo: Holds the target.
        out: Gets the folder `assistant` and the record.
        plan: How to train; with 0 steps, as many as fit into the time.
        seconds: That time.
        device: Where.
    """
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator().manual_seed(plan.seed)
    data, shape = load_data(work, device), AssistantShape()
    name = shape.target.name
    target = load_network(shape.target, demo / name, device)
    own = read_own_texts(name, work, device)
    assistant = Assistant(shape).to(device)
    losses = losses_of(target, assistant, device)

    def loss_of(step: int) -> Tensor:
        rows = torch.randint(len(own), (plan.rows // 2,), generator=generator)
        text = data.windows(plan.rows - len(rows), WINDOW, generator)
        return losses(torch.cat([own[rows.to(device)].long(), text]))

    if not plan.steps:
        plan = replace(plan, steps=fitting(assistant, plan, seconds, loss_of))
        generator.manual_seed(plan.seed)
    spent = run("assistant", assistant, plan, loss_of)
    export(assistant, out / "assistant")
    stored = load_assistant(shape, out / "assistant", device)
    record = {
        "parameters": sum(parameter.numel() for parameter in assistant.parameters()),
        **asdict(plan),
        "tokens": plan.steps * plan.rows * WINDOW,
        "own_tokens": own.numel(),
        "seconds": round(spent),
        "accepted": accepted(target, assistant, data),
        "accepted_quantized": accepted(target, stored, data),
    }
    (out / "assistant.json").write_text(json.dumps(record, indent=1) + "\n")
    print("assistant", json.dumps(record), flush=True)


def losses_of(target: Network, assistant: Assistant, device: str) -> Losses:
    """What makes the loss of token windows [rows, n]."""

    def loss_from(
        embedded: Tensor, hidden: Tensor, wanted: Tensor, read: KeyValues
    ) -> Tensor:
        n = embedded.shape[1] - STEPS
        state, loss = hidden[:, :n], torch.zeros((), device=hidden.device)
        with torch.autocast(device, torch.bfloat16):
            for step in range(STEPS):
                newest = slice(1 + step, 1 + step + n)
                logits, state = assistant(embedded[:, newest], state, read)
                part = distillation_loss(logits, wanted[:, newest])
                loss = loss + FADE**step * part
        return loss

    compiled: Callable[..., Tensor] = loss_from
    if device == "cuda":
        compiled = torch.compile(loss_from)

    def losses(ids: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            hidden, read = read_target(target, ids, assistant.shape)
            wanted = target.logits(hidden)
            embedded = target.embed(ids)
        return compiled(embedded, hidden, wanted, read)

    return losses


def fitting(
    assistant: Assistant, plan: Plan, seconds: int, loss_of: Callable[[int], Tensor]
) -> int:
    """How many steps fit into the time; what is tried for that is forgotten."""
    before = copy.deepcopy(assistant.state_dict())
    tried = replace(plan, steps=TRIED)
    run("compile", assistant, tried, loss_of)
    spent = run("measure", assistant, tried, loss_of)
    assistant.load_state_dict(before)
    return max(1, int(seconds * TRIED / spent))


def export(assistant: Assistant, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(assistant, "", assistant.shape.stored)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    text = json.dumps(config(assistant.shape), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def load_assistant(shape: AssistantShape, folder: Path, device: str) -> Assistant:
    """An exported assistant, with the weights that its users will have."""
    assistant: Assistant = Assistant(shape).to(device)
    restore(assistant, folder / "model.safetensors", "", shape.stored)
    assistant.eval()
    return assistant


@torch.no_grad()
def accepted(
    target: Network, assistant: Assistant, data: Data
) -> dict[str, list[float]]:
    """The share of rounds on the target's greedy text that accept draft 1 to 8.

    Rounds begin at every position, so these are the rates by position of a chain.
    """
    found = {}
    generator = torch.Generator().manual_seed(7)
    for group, array in data.held.items():
        prompts = cut(array, 64, CHECKED_PROMPT, generator)
        cold = torch.zeros(64, 1, device=prompts.device)
        ids = continued(target, prompts, CHECKED_PROMPT + CHECKED_TOKENS, cold)
        n = ids.shape[1] - CHECKED_STEPS - 1
        begun = slice(CHECKED_PROMPT - 1, None)
        with torch.autocast(ids.device.type, torch.bfloat16):
            hidden, read = read_target(target, ids, assistant.shape)
            embedded, state = target.embed(ids), hidden[:, :n]
            right = torch.ones_like(ids[:, :n], dtype=torch.bool)
            rates = []
            for step in range(1, CHECKED_STEPS + 1):
                logits, state = assistant(embedded[:, step : step + n], state, read)
                right &= logits.argmax(-1) == ids[:, step + 1 : step + 1 + n]
                rates.append(round(right[:, begun].float().mean().item(), 4))
        found[group] = rates
    return found
