"""A target, and its drafts by name.

model           the draft model of the option --draft-model
compiled        the same with compiled steps
wrong           the same, but it proposes its least probable token
lookup, mtp     as in `draft=`
eagle, ...      the bundled heads, each for the target it was trained on
a folder        as in `draft=`
NAME+NAME       a cascade of two of these
NAME@4          with weights in 4 bits
NAME%16         with trees of 16 tokens; the draft length is the number of levels
NAME~1024       limited to the 1,024 most frequent token ids
"""

import copy
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from bench.options import folder_of
from mlx_speculation import (
    CascadeDraft,
    LookupDraft,
    Sampling,
    SpeculativeGenerator,
    load,
    reduced_vocabulary,
)
from mlx_speculation.engine.drafters.resolve import find_draft
from mlx_speculation.engine.equivalence.texts import Parting, find_parting
from mlx_speculation.models import TokenIds, logit_width
from mlx_speculation.samplers import Chooser

# Bundled drafts that fit one bundled target
OWN_DRAFTS = {"dense": ["eagle"], "sliding": ["assistant"], "hybrid": ["mtp"]}
COUNTED = 1_000_000  # characters of source text whose token ids are counted


@dataclass(eq=False)
class Bench:
    """A target with its draft model."""

    name: str  # of the target
    folder: Path  # of the target
    draft_folder: Path
    group: Any = None  # the ranks that the target is spread over; None: one process

    @classmethod
    def of(cls, target: str, draft_model: str = "draft", group: Any = None) -> "Bench":
        """Make a bench from the names of bundled models, or from folders."""
        folder = folder_of(target)
        return cls(folder.name, folder, folder_of(draft_model), group)

    @cached_property
    def _loaded(self) -> tuple[nn.Module, Any]:
        return load(self.folder, group=self.group)

    @property
    def model(self) -> nn.Module:
        """The target."""
        return self._loaded[0]

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return self._loaded[1]

    @cached_property
    def bare(self) -> nn.Module:
        """The target without our hooks, for mlx-lm's functions."""
        return bare(self.model)

    @cached_property
    def bare_draft(self) -> nn.Module:
        """The draft model without our hooks."""
        return load(self.draft_folder)[0]

    @cached_property
    def plain(self) -> SpeculativeGenerator:
        """The generator without a draft."""
        return self.generator(None)

    @property
    def default_drafts(self) -> list[str]:
        """The draft model, a lookup, and the drafts bundled for this target alone."""
        bundled = folder_of(self.name) == self.folder
        return ["model", "lookup", *(OWN_DRAFTS.get(self.name, []) if bundled else [])]

    def generator(self, draft: str | None, **options: Any) -> SpeculativeGenerator:
        """Make a generator with a named draft; only the first of several ranks drafts.

        Each generator loads the draft model anew, since it puts hooks on its model.
        """
        if self.group is not None and self.group.rank() > 0:
            draft = None
        options |= {} if self.group is None else {"group": self.group}
        options |= {"compile_draft": True} if draft == "compiled" else {}
        name, _, nodes = (draft or "").partition("%")
        options |= {"draft_tree": int(nodes)} if nodes else {}
        name, _, size = name.partition("~")
        if size:
            options["draft_vocabulary"] = self._common_ids(int(size))
        made = self._draft(name) if name else None
        return SpeculativeGenerator(self.model, self.tokenizer, draft=made, **options)

    def _common_ids(self, size: int) -> list[int]:
        """Return the most frequent token ids of the standard library's sources."""
        text = ""
        for each in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            if len(text) < COUNTED:
                text += each.read_text("utf-8", errors="replace")
        return reduced_vocabulary(text[:COUNTED], size, tokenizer=self.tokenizer)

    def _draft(self, name: str) -> Any:
        if "+" in name:
            return CascadeDraft(*map(self._draft, name.split("+")))
        if name in ("model", "compiled", "wrong"):
            model = load(self.draft_folder)[0]
            return always_wrong(model) if name == "wrong" else model
        if name == "lookup":  # without a history of the answers of other arms
            return LookupDraft(history=0)
        name, _, bits = name.partition("@")
        result = self.draft_folder if name == "model" else folder_of(name)
        return find_draft(
            name if name == "mtp" else result,
            target=self.folder,
            quantize_draft=int(bits) if bits else None,
        )

    def parting(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        expected: Sequence[int],
        got: Sequence[int],
        *,
        width: int,
        places: int | None = None,
    ) -> Parting | None:
        """Return the first difference from an expected text; see `find_parting`."""
        ids, limit = TokenIds.of(self.tokenizer), logit_width(self.model)
        chooser = Chooser(sampling, ids.width, limit=limit, missing=ids.missing)
        return find_parting(
            self.model,
            chooser,
            prompt,
            expected,
            got,
            width=width,
            places=places,
        )


def bare(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its parameters, without our hooks."""
    shared: dict[int, Any] = {}
    for module in model.modules():  # groups of ranks are shared too
        values = vars(module).values()
        shared |= {id(v): v for v in values if isinstance(v, mx.distributed.Group)}
    parameters: Any = tree_flatten(model.parameters())
    shared |= {id(array): array for _, array in parameters}
    return copy.deepcopy(model, shared)


def always_wrong(model: nn.Module) -> nn.Module:
    """Make a draft model propose its least probable token."""
    kind: Any = type(model)

    class Wrong(kind):  # type: ignore[misc]
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return -super().__call__(*arguments, **options)

    Wrong.__module__ = kind.__module__
    model.__class__ = Wrong
    return model
