import inspect
import re

import pytest

import mlx_speculation
from mlx_speculation import errors


def _tree() -> list[type[Exception]]:
    return [
        value
        for value in vars(errors).values()
        if inspect.isclass(value)
        and issubclass(value, Exception)
        and not issubclass(value, Warning)
        and value.__module__ == errors.__name__
    ]


@pytest.mark.parametrize("error", _tree())
def test_every_error_has_the_base_and_says_when_it_is_raised(
    error: type[Exception],
) -> None:
    assert issubclass(error, errors.SpeculationError)
    assert re.match(r"Raised when |The base of ", inspect.getdoc(error) or "")


def test_the_drawing_in_the_docstring_is_the_tree() -> None:
    drawing = (errors.__doc__ or "").split("```")[1]
    drawn = re.findall(r"(\w+Error)(?:\((\w+)\))?$", drawing, re.MULTILINE)
    bases = {
        error.__name__: next(
            (one.__name__ for one in error.__bases__ if one.__module__ == "builtins"),
            "",
        )
        for error in _tree()
    }
    assert dict(drawn) == bases
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert classes <= set(mlx_speculation.__all__)
