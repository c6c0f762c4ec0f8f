"""The draft length of tests that name none: none depends on how long a round takes."""

from typing import Any

from mlx_speculation.engine.draft_length.policy_factory import PolicyFactory

USUAL: int | None = 4  # None: adaptive, as without tests

_for_stream = PolicyFactory.for_stream


def _with_usual(factory: PolicyFactory, length: Any, *args: Any, **options: Any) -> Any:
    if length is None and factory.usual is None:
        length = USUAL
    return _for_stream(factory, length, *args, **options)


def install() -> None:
    """Let streams of every generator of this process draft so."""
    setattr(PolicyFactory, "for_stream", _with_usual)  # noqa: B010  for mypy
