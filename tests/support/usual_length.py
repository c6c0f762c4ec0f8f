"""Default draft length of tests: fixed, so that no test depends on measured times."""

from typing import Any

from mlx_speculation.engine.draft_length.policy_factory import PolicyFactory

USUAL: int | None = 4  # None: adaptive, as outside of tests

_for_stream = PolicyFactory.for_stream


def _with_usual(factory: PolicyFactory, length: Any, *args: Any, **options: Any) -> Any:
    if length is None and factory.usual is None:
        length = USUAL
    return _for_stream(factory, length, *args, **options)


def install() -> None:
    """Make `USUAL` the default draft length of all generators in this process."""
    setattr(PolicyFactory, "for_stream", _with_usual)  # noqa: B010  for mypy
