"""The source of a drafter object of the user's."""

from typing import Any

import mlx.nn as nn

from mlx_speculation.engine.drafters.base import Drafter
from mlx_speculation.engine.drafters.source import Draft
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane


class CustomDraft(Draft):
    """A drafter of the user's own, which serves one open stream at a time."""

    reusable = False

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    @property
    def trees(self) -> bool:
        """Whether it proposes trees where it may: it says so in an attribute."""
        return bool(getattr(self.inner, "trees", False))

    @property
    def own_weights(self) -> nn.Module | None:
        """The module that it names as its own, if any."""
        found = getattr(self.inner, "own_weights", None)
        return found if isinstance(found, nn.Module) else None

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> Drafter:
        """Return the drafter, as it is."""
        return self.inner
