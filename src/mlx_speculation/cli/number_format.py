"""Numbers as tables show them."""


def number(value: float) -> str:
    """Return two decimals."""
    return f"{value:.2f}"


def percent(value: float) -> str:
    """Return a share as whole percents."""
    return f"{value:.0%}"
