"""The exceptions and warnings of mlx-speculation.

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
ValueError` works for callers that do not know this package. A message says what
is wrong, names the two values that do not fit, and what to do.

`DrafterFaultWarning`, `ContextLengthNotice`, `DraftNotice`, `SamplerNotice`,
`BlasNotice` and `CostFileWarning` are warnings: the generation goes on.
"""


class SpeculationError(Exception):
    """The base of all exceptions that this package raises on purpose."""


class InvalidRequestError(SpeculationError, ValueError):
    """Raised when an argument of the caller is out of range or contradicts another.

    It is raised before any cache is touched.
    """


class TokenizerMismatchError(InvalidRequestError):
    """Raised when target and draft model do not share their token ids.

    The same id would stand for different texts, so the pair is refused.
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
    """Raised when a model lacks a part, such as hidden states, that a drafter needs.

    It is raised before anything is drafted; decoding without that drafter works.
    """


class SpeculationClosedError(SpeculationError, RuntimeError):
    """Raised when a round is used after it was committed, rolled back or left."""


class ModelFolderError(SpeculationError, ValueError):
    """Raised when a model folder lacks a file or holds one that cannot be used."""


class ConventionError(ModelFolderError):
    """Raised when a draft head agrees with its target under no known convention.

    The message names the score of each convention.
    """


class CacheFileError(SpeculationError, ValueError):
    """Raised when a file of caches cannot be written or loaded.

    A file that is loaded is missing, cut, corrupted, foreign, of another version, or
    does not fit the live caches. The live caches stay as they were. A file that was to
    be replaced stays as it was.
    """


class NonFiniteLogitsError(SpeculationError, ArithmeticError):
    """Raised when a model returns logits from which no token can be chosen.

    A row holds NaN or plus infinity, or minus infinity for every token.
    """


class ConstraintError(SpeculationError, ValueError):
    """Raised when a constraint allows no token, or not the one that it is given."""


class MissingLibraryError(SpeculationError, ImportError):
    """Raised when an optional library is needed that is not installed."""


class DemoModelsMissingError(SpeculationError, FileNotFoundError):
    """Raised when the demonstration models or prompts are not in this installation."""


class RankLostError(SpeculationError, ConnectionError):
    """Raised when a rank has died, has failed or has left a stream by an error.

    The message names the rank and the reason, and says whether the program has to be
    started again.
    """


class BlasError(SpeculationError, RuntimeError):
    """Raised when the BLAS that was asked for cannot be put in front of mlx."""


class ContextLengthNotice(UserWarning):
    """Warns once that a prompt is longer than the model was made for.

    Or that a text ended because the model has no more positions.
    """


class DraftNotice(UserWarning):
    """Warns once that another draft than the requested one is used, and why."""


class SamplerNotice(UserWarning):
    """Warns once that a sampler draws by itself, so a seed may not fix the text."""


class BlasNotice(UserWarning):
    """Warns once in a process that mlx was loaded too early to get a faster BLAS."""


class CostFileWarning(UserWarning):
    """Warns that a file of measured costs cannot be used; they are measured again."""


class DrafterFaultWarning(RuntimeWarning):
    """Warns once in a stream that its drafter has failed.

    The drafter is disabled. The text does not change.
    """
