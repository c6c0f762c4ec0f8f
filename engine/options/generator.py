"""The options of a generator, and the combinations that are refused."""

from dataclasses import dataclass
from typing import Any, TypedDict

import mlx.nn as nn

from mlx_speculation.caches import FixedShape, PrefixCache
from mlx_speculation.engine.argument_checks import checked_choice, checked_count
from mlx_speculation.engine.drafters.draft import Draft
from mlx_speculation.engine.drafters.reduced_vocabulary import DraftVocabulary
from mlx_speculation.engine.drafters.resolve import DraftArgument
from mlx_speculation.engine.exact_verdict import check_verdict
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import Group, Sliding, check_fixed_shape
from mlx_speculation.samplers import Acceptance

MOST_NODES = 64  # largest number of nodes of a tree


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GeneratorOptions:
    """The options of a `SpeculativeGenerator`.

    Each value is checked on its own, and `draft_tree` with `exact` and `group`.

    Attributes:
        draft: an mlx-lm model with the same token ids; the path or repository of a
            model or head; "mtp" for the head in the target's folder, "lookup", "auto";
            a draft such as `MtpDraft`, `LookupDraft` or `CascadeDraft`; a `Drafter` of
            your own; or None for plain decoding. The target keeps the last draft that
            was loaded by name, for later generators with the same `draft`.
        draft_length: tokens drafted in a round; 0 is plain decoding. None: chosen from
            measured round costs and acceptance, see `calibrate`. The text of a seed
            then depends on timing under rules other than "keyed".
        draft_tree: an EAGLE-3 head drafts a tree of this many tokens, 2 to 64, with
            `draft_length` levels; 15 may pay on a large GPU. None: a chain.
        acceptance: under "keyed" the draft cannot change the text of a seed.
            "rejection" and "block" keep only the distribution of the text, and accept
            more tokens at a temperature above 0.
        sliding: the type of new caches of sliding windows: "slack", the faster
            `SlidingKVCache`, or "native", mlx-lm's `RotatingKVCache`. A passed
            `prompt_cache` stays as it is; see `with_slack` and `as_native` of caches.
        prefix_cache: a `PrefixCache` of this target and draft only, for requests that
            begin with the same tokens. A request with its own `prompt_cache` does not
            use it.
        replay: replace the ids of earlier answers in a prompt by the generated ones,
            see `engine.prompt.replayed`. A prompt of token ids stays as it is.
        draft_vocabulary: token ids that a draft model or an MTP head drafts from, see
            `reduced_vocabulary`; the text can hold other ids too. None: all ids.
            "intersection": `draft` is the folder of a model with another tokenizer, and
            drafts the tokens that both have; `notices` says how many.
        compile_draft: compile the steps of a draft model. This takes 16 seconds, once
            per machine; see `models/cpu/compiled_draft.py`.
        group: the ranks of `mx.distributed` over which the target is sharded. Every
            rank makes the generator and the streams, with the same options, and gets
            the same chunks. Only rank 0 drafts. None: the target is not sharded.
        exact: pad every forward of the target to this many tokens (True: 8), so that
            rounding does not depend on the draft. docs/exactness.md lists the costs and
            the refused options.

    Raises:
        InvalidRequestError: a value is out of range or of the wrong kind.
    """

    draft: DraftArgument | None = None
    draft_length: int | None = None
    draft_tree: int | None = None
    acceptance: Acceptance = "keyed"
    sliding: Sliding = "slack"
    prefix_cache: PrefixCache | None = None
    replay: bool = True
    draft_vocabulary: DraftVocabulary | None = None
    compile_draft: bool = False
    group: Group | None = None
    exact: bool | int = False

    def __post_init__(self) -> None:
        checked_choice("acceptance", self.acceptance, Acceptance)
        checked_choice("sliding", self.sliding, Sliding)
        _check_compile(self.compile_draft)
        _check_vocabulary(self.draft_vocabulary)
        _ = self.shape
        if self.draft_tree is not None:
            self._check_tree(self.draft_tree)

    @property
    def shape(self) -> FixedShape | None:
        """The shape of every forward of the target in exact mode; None: not exact."""
        if isinstance(self.exact, bool):
            return FixedShape() if self.exact else None
        return FixedShape(rows=self.exact)

    @property
    def intersection(self) -> bool:
        """True if the draft has another tokenizer, and drafts the common tokens."""
        return isinstance(self.draft_vocabulary, str)

    @property
    def tree(self) -> int:
        """Nodes of a draft that is a tree; 0: drafts are chains."""
        return self.draft_tree or 0

    def _check_tree(self, nodes: int) -> None:
        """Refuse a number of nodes out of range, and options that need chains."""
        checked = checked_count("draft_tree", nodes, 2, ", or None for chains")
        if checked > MOST_NODES:
            raise InvalidRequestError(
                f"draft_tree is {nodes}; at most {MOST_NODES} nodes are allowed. Pass "
                "15: the rows of further nodes cost more time than they save."
            )
        for name, value in (("exact", self.shape), ("group", self.group)):
            if value is not None:
                raise InvalidRequestError(
                    f"draft_tree is {nodes}, but with {name} drafts are chains only. "
                    "Leave one of them out."
                )

    def check_exact(self, model: nn.Module, *, ranked: bool) -> None:
        """Refuse options and models with which exact mode is not exact.

        Raises:
            InvalidRequestError: two options do not go together, or `mlx-speculation
                check` has found that a row's bits depend on its place in a forward.
            UnsupportedModelError: the model was not tried in a fixed shape.
        """
        shape = self.shape
        if shape is None:
            return
        refused = {
            f"acceptance={self.acceptance!r}, under which a draft changes the text of "
            "a seed": self.acceptance != "keyed",
            "sliding='native', whose rings are not read in order": self.sliding
            == "native",
            "a target on several ranks, whose sums depend on their number": ranked,
        }
        for reason, applies in refused.items():
            if applies:
                raise InvalidRequestError(
                    f"exact={shape.rows} cannot be combined with {reason}. Leave one "
                    "of them out."
                )
        check_fixed_shape(model)
        check_verdict(model, shape)

    def check_draft(self, draft: Draft | None, *, vocabulary: bool) -> None:
        """Refuse options that the draft on this rank cannot follow."""
        kind = "None" if draft is None else f"of kind {draft.kind!r}"
        if self.compile_draft and (draft is None or not draft.models):
            raise InvalidRequestError(
                "compile_draft is True, and there is no draft model. Leave it out."
            )
        if self.compile_draft and vocabulary:
            raise InvalidRequestError(
                "compile_draft cannot be combined with draft_vocabulary: a compiled "
                "draft has all token ids. Leave one of them out."
            )
        if self.tree and (draft is None or not draft.trees):
            raise InvalidRequestError(
                f"draft_tree is {self.tree}, but the draft is {kind}, which drafts no "
                "trees. Pass an EAGLE-3 head without a window, or leave draft_tree "
                "out."
            )


class GeneratorKeywords(TypedDict, total=False):
    """The fields of `GeneratorOptions` as keywords, for type checkers."""

    draft: DraftArgument | None
    draft_length: int | None
    draft_tree: int | None
    acceptance: Acceptance
    sliding: Sliding
    prefix_cache: PrefixCache | None
    replay: bool
    draft_vocabulary: DraftVocabulary | None
    compile_draft: bool
    group: Group | None
    exact: bool | int


def _check_compile(compile_draft: Any) -> None:
    if not isinstance(compile_draft, bool):
        raise InvalidRequestError(
            f"compile_draft is {compile_draft!r}, and True or False is needed."
        )


def _check_vocabulary(vocabulary: Any) -> None:
    """Refuse a string other than "intersection"; token ids are not checked here."""
    if isinstance(vocabulary, str) and vocabulary != "intersection":
        raise InvalidRequestError(
            f"draft_vocabulary is {vocabulary!r}, and 'intersection', token ids or "
            "None are needed."
        )
