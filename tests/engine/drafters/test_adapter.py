"""Only the adapter inspects the types and members of a user's drafters and drafts."""

import ast
import re
from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlx_speculation.engine import Choose, Proposal, Sequence
from mlx_speculation.engine.drafters.base import OpenDrafter, WrappedDrafter
from mlx_speculation.engine.drafters.user_drafter import adapted
from support.pages import ROOT

ADAPTER = "engine/drafters/user_drafter.py"
KINDS = re.compile(r"\b\w*(Draft|Drafter|Drafters)\b")
OBJECTS = re.compile(r"draft|\b(inner|member|each|source|head)s?\b")
# An allowed call: a head's module is not a drafter.
OTHERS = {"getattr(head, 'ids', None)"}


def asks(text: str) -> Iterator[str]:
    """Yield the calls that inspect the type or the members of a drafter or draft."""
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        args = [ast.unparse(argument) for argument in node.args]
        by_kind = node.func.id == "isinstance" and KINDS.search(args[1])
        by_name = node.func.id == "hasattr" or (
            node.func.id == "getattr" and len(args) == 3
        )
        if by_kind or (by_name and OBJECTS.search(args[0])):
            yield ast.unparse(node)


def test_nothing_but_the_adapter_asks_drafters_and_drafts_what_they_are() -> None:
    calls = {
        f"{path.relative_to(ROOT)}: {call}"
        for path in (ROOT / "engine").rglob("*.py")
        if path.relative_to(ROOT).as_posix() != ADAPTER
        for call in asks(path.read_text("utf-8"))
        if call not in OTHERS
    }
    assert not calls


@pytest.mark.parametrize(
    "call",
    [
        "isinstance(one, (CascadeDraft, MtpDraft))",
        "isinstance(found, base.OpenDrafter)",
        "getattr(self.request.drafter, 'lanes', ())",
        "getattr(self.inner, 'held', None)",
        "hasattr(member, 'trees')",
    ],
)
def test_what_asks_is_found(call: str) -> None:
    assert list(asks(f"x = [{call}]")) == [call]


def test_the_wrapper_passes_on_every_member() -> None:
    names = [name for name in dir(OpenDrafter) if not name.startswith("_")]
    marks = {name: f"its {name}" for name in names}
    outer = WrappedDrafter(type("Marked", (OpenDrafter,), marks)())
    assert len(names) >= 14
    assert outer.shared is outer  # not the drafter inside
    del marks["shared"]
    assert {name: getattr(outer, name) for name in marks} == marks


class Bare:
    """A user's drafter with only the four required methods."""

    def begin(self, sequence: Sequence) -> None: ...

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        return Proposal(mx.array([7] * limit, mx.uint32))

    def settle(self, accepted: int) -> None: ...

    def discard(self) -> None: ...


class Rich(Bare):
    def __init__(self) -> None:
        self.known: list[int] = []

    @property
    def held(self) -> list[mx.array]:
        return [mx.zeros(3)]

    def read_ahead(self, sequence: Sequence, fits: object) -> bool:
        return False

    def remember(self, tokens: list[int], answer: int) -> None:
        self.known += tokens[answer:]


def test_a_users_object_has_the_defaults_of_what_it_lacks() -> None:
    bare, rich = Bare(), Rich()
    for one, kept_count, read in ((bare, 0, True), (rich, 1, False)):
        drafter = adapted(one)
        assert drafter.name == type(one).__name__
        assert len(drafter.held) == kept_count
        assert drafter.read_ahead(Sequence([1]), lambda count: True) is read
        drafter.remember([0, 1, 2], 1)
        assert list(drafter.lanes) == []
        assert drafter.prefix_head is drafter.batch_lane is drafter.batch_head is None
        assert not drafter.disabled
    assert rich.known == [1, 2]


def test_a_drafter_of_the_engines_own_is_adapted_to_itself() -> None:
    drafter = OpenDrafter()
    assert adapted(drafter) is drafter
