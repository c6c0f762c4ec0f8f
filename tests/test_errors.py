import inspect
import re

import pytest

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
def test_every_error_derives_from_the_base(error: type[Exception]) -> None:
    assert issubclass(error, errors.SpeculationError)


@pytest.mark.parametrize("error", _tree())
def test_every_error_says_when_it_is_raised_or_that_it_is_the_base(
    error: type[Exception],
) -> None:
    assert re.match(r"Raised when |The base of ", inspect.getdoc(error) or "")


def test_the_drawing_in_the_docstring_is_the_tree() -> None:
    drawn = set(re.findall(r"\w+Error\b", (errors.__doc__ or "").split("```")[1]))
    builtin = {name for name in drawn if not hasattr(errors, name)}
    assert drawn - builtin == {error.__name__ for error in _tree()}
    assert builtin == {
        base.__name__
        for error in _tree()
        for base in error.__bases__
        if base.__module__ == "builtins" and base is not Exception
    }


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.InvalidRequestError, ValueError),
        (errors.TokenizerMismatchError, ValueError),
        (errors.UnsupportedCacheError, TypeError),
        (errors.UnsupportedModelError, TypeError),
        (errors.SpeculationClosedError, RuntimeError),
        (errors.ModelFolderError, ValueError),
        (errors.ConventionError, ValueError),
        (errors.CacheFileError, ValueError),
        (errors.NonFiniteLogitsError, ArithmeticError),
        (errors.ConstraintError, ValueError),
        (errors.MissingLibraryError, ImportError),
        (errors.DemoModelsMissingError, FileNotFoundError),
        (errors.BlasError, RuntimeError),
    ],
)
def test_an_error_is_caught_as_its_builtin_and_keeps_its_message(
    error: type[Exception], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin, match=r"^what is wrong$") as caught:
        raise error("what is wrong")
    assert type(caught.value) is error
