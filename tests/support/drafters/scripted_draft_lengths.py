"""Draft lengths from a list, and the lengths that a calibration measures."""

from mlx_speculation.engine.draft_length.base import Feedback, Plan

CALIBRATED = [0, 1, 2, 3, 4, 6, 8, 12, 16]


class Planned:
    """A policy that repeats a list of plans."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self.planned: list[Plan] = []
        self.noted: list[tuple[Plan, Feedback]] = []
        self.planned_contexts: list[int] = []  # contexts of all plans
        self.contexts: list[int] = []  # contexts of the noted rounds

    @property
    def longest(self) -> int:
        return max(self._lengths)

    def plan(self, context: int, limit: int) -> Plan:
        length = self._lengths[len(self.planned) % len(self._lengths)]
        self.planned_contexts.append(context)
        self.planned.append(Plan(max(0, min(length, limit)), "fixed"))
        return self.planned[-1]

    def note(self, context: int, plan: Plan, outcome: Feedback) -> None:
        self.contexts.append(context)
        self.noted.append((plan, outcome))
