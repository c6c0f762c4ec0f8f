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

Each class also derives from the built-in exception in brackets. A message says what is
wrong, names the two values that do not match, and says what to do. After a warning the
generation continues.
"""


class SpeculationError(Exception):
    """The base of all exceptions of this package."""


class InvalidRequestError(SpeculationError, ValueError):
    """Raised when an argument of the caller is out of range or contradicts another.

    It is raised before any cache is changed.
    """


class TokenizerMismatchError(InvalidRequestError):
    """Raised when a token id stands for different texts in target and draft model."""


class RankMismatchError(InvalidRequestError):
    """Raised when the ranks of a group differ in their program, options or versions.

    It is raised on every rank, between two forwards. The group stays usable.
    """


class UnsupportedCacheError(SpeculationError, TypeError):
    """Raised when a cache is of a kind that cannot be committed and rolled back.

    It is raised before any cache is changed.
    """


class UnsupportedModelError(SpeculationError, TypeError):
    """Raised when a model lacks what a drafter or an option needs, like hidden states.

    It is raised before the first draft. Without that drafter or option, decoding works.
    """


class SpeculationClosedError(SpeculationError, RuntimeError):
    """Raised when a `Speculation` is used after its end.

    A `Speculation` ends with a commit, a roll-back, or the end of its `with` block.
    """


class ModelFolderError(SpeculationError, ValueError):
    """Raised when a file of a model folder is missing or cannot be used."""


class ConventionError(ModelFolderError):
    """Raised when no known convention makes a draft head agree with its target.

    The message gives the score of each convention.
    """


class CacheFileError(SpeculationError, ValueError):
    """Raised when a file of caches cannot be written or loaded.

    Loading fails if the file is missing, corrupted, of another format or version, or
    does not match the live caches. The live caches are then unchanged. A failed write
    leaves an earlier file as it was.
    """


class NonFiniteLogitsError(SpeculationError, ArithmeticError):
    """Raised when a model returns logits from which no token can be chosen.

    A row holds NaN or plus infinity, or minus infinity for every token.
    """


class ConstraintError(SpeculationError, ValueError):
    """Raised when a constraint allows no token, or gets a token that it forbids."""


class MissingLibraryError(SpeculationError, ImportError):
    """Raised when a library that is needed is not installed or cannot be imported."""


class DemoModelsMissingError(SpeculationError, FileNotFoundError):
    """Raised when this installation lacks the demonstration models or prompts."""


class RankLostError(SpeculationError, ConnectionError):
    """Raised when a rank died, failed, or left a stream because of an error.

    The message names the rank and the reason, and says whether a restart is needed.
    """


class BlasError(SpeculationError, RuntimeError):
    """Raised when mlx cannot use the requested BLAS in this process."""


class ContextLengthNotice(UserWarning):
    """Warns once that a prompt is longer than the context that the model supports.

    Also warns that a text ended because the model has no further positions.
    """


class DraftNotice(UserWarning):
    """Warns once about the draft, for example that another draft is used, and why."""


class SamplerNotice(UserWarning):
    """Warns once that a sampler has its own noise: drafts may change the text."""


class BlasNotice(UserWarning):
    """Warns once per process that mlx was loaded too early to use a faster BLAS."""


class CostFileWarning(UserWarning):
    """Warns that a file of costs cannot be used: the costs are measured again."""


class DrafterFaultWarning(RuntimeWarning):
    """Warns once per stream that its drafter has failed and is disabled.

    The text does not change.
    """
