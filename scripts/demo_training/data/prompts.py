"""The prompts that ship with the models, cut from held-out texts only."""

import random
from typing import TypedDict

from tokenizers import Tokenizer

from demo_training.data.corpus import Text
from demo_training.data.pairs import pair

PER_GROUP = 12


class Prompt(TypedDict):
    """One entry of `prompts.json`."""

    group: str
    source: str
    text: str


def make_prompts(texts: list[Text], tokenizer: Tokenizer, seed: int) -> list[Prompt]:
    """Twelve prompts for each of the groups `code`, `prose` and `edit`."""
    rng = random.Random(seed)
    held = [text for text in texts if text.split == "held-out"]
    code = [text for text in held if text.kind == "library" and len(text.body) > 2000]
    prose = [text for text in held if text.kind in {"topic", "docstring"}]
    prose = [text for text in prose if len(text.body) > 1200]
    made: list[Prompt] = []
    for group, sources in (("code", code), ("prose", prose), ("edit", code)):
        rng.shuffle(sources)
        prompts: list[Prompt] = []
        while len(prompts) < PER_GROUP:
            text = sources[len(prompts) % len(sources)]
            cut = edit_prompt if group == "edit" else opening
            body = cut(text, tokenizer, rng)
            if body is not None:
                prompts.append({"group": group, "source": text.name, "text": body})
            else:
                sources.remove(text)
        made += prompts
    return made


def opening(text: Text, tokenizer: Tokenizer, rng: random.Random) -> str | None:
    """Whole lines from the start of a text or of a definition, 150 to 250 tokens."""
    lines = text.body.splitlines(keepends=True)
    starts = [0] + [
        index
        for index, line in enumerate(lines)
        if line.lstrip().startswith(("def ", "class ")) and index < len(lines) - 25
    ]
    if text.kind in {"topic", "docstring"}:
        starts = [0]
    start, body = rng.choice(starts), ""
    for line in lines[start:]:
        if len(tokenizer.encode(body + line).ids) > 250:
            break
        body += line
    body = body.rstrip("\n")
    return body if len(tokenizer.encode(body).ids) >= 130 else None


def edit_prompt(text: Text, tokenizer: Tokenizer, rng: random.Random) -> str | None:
    """An edit pair up to the end of the third line of the changed text."""
    for _ in range(200):
        made = pair(text, rng, 450, 800)
        if made is None:
            continue
        prompt, answer = made
        begun = "".join(answer.splitlines(keepends=True)[:3])
        size = len(tokenizer.encode(prompt).ids)
        if 160 <= size <= 260 and "no change" not in prompt:
            return prompt + begun
    return None
