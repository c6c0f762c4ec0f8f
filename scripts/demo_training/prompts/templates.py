"""Prompts from templates: slots that draws from lists, numbers and names fill.

{film}, {film2}     two different ones of the list "film"
{3-12}, {40-90:5}   a number, or one that is a multiple of steps above the first
{person}            a name; {he}, {his} and {him} are of the first one
{Items}             what {items} is, with a capital
"""

import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

TEMPLATES = Path(__file__).with_name("templates.toml")
TURNS = " || "  # between the turns of a conversation
_SLOT = re.compile(r"\{([A-Za-z]+)(\d*)\}|\{(\d+)-(\d+)(?::(\d+))?\}")
_PRONOUNS = {"he": ("he", "his", "him"), "she": ("she", "her", "her")}


def read_templates(file: Path = TEMPLATES) -> tuple[dict[str, list[str]], ...]:
    """Return the lists by name, and the shapes by group."""
    held = tomllib.loads(file.read_text("utf-8"))
    lists = held.pop("lists")
    return lists, {group: own["shapes"] for group, own in held.items()}


def fill(
    template: str, lists: Mapping[str, Sequence[str]], draw: random.Random
) -> list[str]:
    """Return the turns of a template with its slots filled."""
    chosen: dict[str, list[str]] = {}
    pronouns: dict[str, str] = {}

    def of(name: str, number: int) -> str:
        own = chosen.setdefault(name, [])
        while len(own) <= number:
            value = draw.choice(lists[name])
            if value not in own:
                own.append(value)
        text, _, kind = own[number].rpartition("/")
        if name != "person":
            return own[number]
        if not pronouns:
            pronouns.update(zip(("he", "his", "him"), _PRONOUNS[kind], strict=True))
        return text

    def slot(found: re.Match[str]) -> str:
        name, number, first, last, step = found.groups()
        if first is not None:
            return str(draw.randrange(int(first), int(last) + 1, int(step or 1)))
        known = name.lower()
        if known in ("he", "his", "him"):
            of("person", 0)
            text = pronouns[known]
        else:
            text = _SLOT.sub(slot, of(known, int(number or 1) - 1))
        return text[0].upper() + text[1:] if name[0].isupper() else text

    return [_SLOT.sub(slot, turn) for turn in template.split(TURNS)]
