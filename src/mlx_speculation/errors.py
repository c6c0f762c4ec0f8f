"""The exceptions of mlx-speculation: one tree.

```
SpeculationError(Exception)
├── InvalidRequestError(ValueError)
│   ├── TokenizerMismatchError
│   └── RankMismatchError
├── UnsupportedCacheError(TypeError)
├── UnsupportedModelError(TypeError)
├── SpeculationClosedError(RuntimeError)
├── ModelFolderError(ValueError)
│   └── ConventionError
├── CacheFileError(ValueError)
├── NonFiniteLogitsError(ArithmeticError)
├── ConstraintError(ValueError)
├── MissingLibraryError(ImportError)
├── DemoModelsMissingError(FileNotFoundError)
├── RankLostError(ConnectionError)
└── BlasError(RuntimeError)
```

Each class also derives from the built-in exception in brackets, so `except
ValueError` works for callers that do not know this package. Who raises one
composes its message: what is wrong, the two values, what to do.

`DrafterFaultWarning`, `ContextLengthNotice`, `DraftNotice`, `SamplerNotice`,
`BlasNotice` and `CostFileWarning` are no errors: the text goes on.
"""


class SpeculationError(Exception):
    """The base of all exceptions that this package raises on purpose."""


class InvalidRequestError(SpeculationError, ValueError):
    """Raised when an argument of the caller is out of range or contradicts another.

    It is raised before any cache is touched.
    """


class TokenizerMismatchError(InvalidRequestError):
    """Raised when target and draft model do not share their token ids.

    A draft with other ids proposes other words, so the pair is refused.
    """


class RankMismatchError(InvalidRequestError):
    """Raised when ranks of one group run other programs, options or versions.

    It is raised on every rank at once, between forwards; the ranks can go on together.
    """


class UnsupportedCacheError(SpeculationError, TypeError):
    """Raised when a cache is of a kind that cannot be committed and rolled back.

    It is raised before any cache is touched.
    """


class UnsupportedModelError(SpeculationError, TypeError):
    """Raised when a model does not show what a drafter needs of it.

    It is raised before anything is drafted; decoding without that drafter works.
    """


class SpeculationClosedError(SpeculationError, RuntimeError):
    """Raised when a round is used after it was committed, rolled back or left."""


class ModelFolderError(SpeculationError, ValueError):
    """Raised when a model folder lacks a file or holds one that cannot be used."""


class ConventionError(ModelFolderError):
    """Raised when no convention makes a draft head agree with its target.

    The message names what each of them scored.
    """


class CacheFileError(SpeculationError, ValueError):
    """Raised when a file of caches cannot be written, or not be loaded.

    The file is missing, cut, corrupted, foreign, of another version, or does not fit
    the caches that it was to replace; these, and an old file, stay as they were.
    """


class NonFiniteLogitsError(SpeculationError, ArithmeticError):
    """Raised when a model returns logits from which no token can be chosen.

    These are NaN anywhere, plus infinity, or minus infinity for every token.
    """


class ConstraintError(SpeculationError, ValueError):
    """Raised when a constraint allows nothing, or not the token that it was given."""


class MissingLibraryError(SpeculationError, ImportError):
    """Raised when an optional library is needed that is not installed."""


class DemoModelsMissingError(SpeculationError, FileNotFoundError):
    """Raised when the demonstration models or prompts are not in this installation."""


class RankLostError(SpeculationError, ConnectionError):
    """Raised when a rank has died, has failed or has left a stream by an error.

    The message names the rank, says why, and whether the program has to be started
    again.
    """


class BlasError(SpeculationError, RuntimeError):
    """Raised when the BLAS that was asked for cannot be put in front of mlx."""


class ContextLengthNotice(UserWarning):
    """Said once where a prompt is longer than the model was made for.

    Also where a text ends with the model's table of positions.
    """


class DraftNotice(UserWarning):
    """Said once when a draft is not the one that was asked for, or why it is not."""


class SamplerNotice(UserWarning):
    """Said once when a sampler draws by itself, and the text of a seed may change."""


class BlasNotice(UserWarning):
    """Said once in a process in which mlx was loaded too early for a faster BLAS."""


class CostFileWarning(UserWarning):
    """A file of measured costs could not be used; they are measured again."""


class DrafterFaultWarning(RuntimeWarning):
    """Said once in a stream in which a drafter has failed.

    The drafter is disabled, and the text is what it would have been.
    """
