"""Speculative decoding for mlx-lm models: the same text in less time.

```python
from mlx_speculation import SpeculativeGenerator

generator = SpeculativeGenerator.from_pretrained("path", draft="path of a small model")
for chunk in generator.stream("Once upon a time", max_tokens=100):
    print(chunk.text, end="")
```

Importing this package does not import mlx: each public name is loaded at its first use.
On a Linux CPU the package chooses the BLAS (see `blas`) before mlx is first imported.
"""

from mlx_speculation.before_mlx import watch
from mlx_speculation.errors import (
    BlasError,
    BlasNotice,
    CacheFileError,
    ConstraintError,
    ContextLengthNotice,
    ConventionError,
    CostFileWarning,
    DemoModelsMissingError,
    DrafterFaultWarning,
    DraftNotice,
    InvalidRequestError,
    MissingLibraryError,
    ModelFolderError,
    NonFiniteLogitsError,
    RankLostError,
    RankMismatchError,
    SamplerNotice,
    SpeculationClosedError,
    SpeculationError,
    TokenizerMismatchError,
    UnsupportedCacheError,
    UnsupportedModelError,
)

TYPE_CHECKING = False  # `typing` would take longer to import than the rest of this file
if TYPE_CHECKING:
    from mlx_speculation.caches import PrefixCache, Speculation
    from mlx_speculation.demo import demo_models
    from mlx_speculation.engine import (
        AssistantDraft,
        BatchGenerator,
        BatchResponse,
        CascadeDraft,
        DFlash2Draft,
        DFlashDraft,
        DSparkDraft,
        EagleDraft,
        LookupDraft,
        MtpDraft,
        PEagleDraft,
        SpeculativeGenerator,
        SpeculativeResponse,
        generate,
        reduced_vocabulary,
        stream_generate,
    )
    from mlx_speculation.engine.mlx_lm_compat.vision_generate import (
        vision_stream_generate,
    )
    from mlx_speculation.models import MtpConvention, load
    from mlx_speculation.samplers import (
        Constraint,
        ConstraintState,
        ForkableProcessor,
        Sampling,
        TokenAutomaton,
        allowed_tokens,
        derived_seed,
        make_sampler,
        pure,
    )
    from mlx_speculation.samplers.constraints.llguidance import json_schema, lark, regex

    __version__: str

__all__ = [
    "AssistantDraft",
    "BatchGenerator",
    "BatchResponse",
    "BlasError",
    "BlasNotice",
    "CacheFileError",
    "CascadeDraft",
    "Constraint",
    "ConstraintError",
    "ConstraintState",
    "ContextLengthNotice",
    "ConventionError",
    "CostFileWarning",
    "DFlash2Draft",
    "DFlashDraft",
    "DSparkDraft",
    "DemoModelsMissingError",
    "DraftNotice",
    "DrafterFaultWarning",
    "EagleDraft",
    "ForkableProcessor",
    "InvalidRequestError",
    "LookupDraft",
    "MissingLibraryError",
    "ModelFolderError",
    "MtpConvention",
    "MtpDraft",
    "NonFiniteLogitsError",
    "PEagleDraft",
    "PrefixCache",
    "RankLostError",
    "RankMismatchError",
    "SamplerNotice",
    "Sampling",
    "Speculation",
    "SpeculationClosedError",
    "SpeculationError",
    "SpeculativeGenerator",
    "SpeculativeResponse",
    "TokenAutomaton",
    "TokenizerMismatchError",
    "UnsupportedCacheError",
    "UnsupportedModelError",
    "__version__",
    "allowed_tokens",
    "demo_models",
    "derived_seed",
    "generate",
    "json_schema",
    "lark",
    "load",
    "make_sampler",
    "pure",
    "reduced_vocabulary",
    "regex",
    "stream_generate",
    "vision_stream_generate",
]

# Modules of the names that are not in `mlx_speculation.engine`. A new name also goes
# into __all__ and, for type checkers, under TYPE_CHECKING above.
_HOMES = {
    "Constraint": "samplers",
    "ConstraintState": "samplers",
    "ForkableProcessor": "samplers",
    "MtpConvention": "models",
    "PrefixCache": "caches",
    "Sampling": "samplers",
    "Speculation": "caches",
    "TokenAutomaton": "samplers",
    "allowed_tokens": "samplers",
    "demo_models": "demo",
    "derived_seed": "samplers",
    "json_schema": "samplers.constraints.llguidance",
    "lark": "samplers.constraints.llguidance",
    "load": "models",
    "make_sampler": "samplers",
    "pure": "samplers",
    "regex": "samplers.constraints.llguidance",
    "vision_stream_generate": "engine.mlx_lm_compat.vision_generate",
}

watch()


def __getattr__(name: str) -> object:
    # Imported late: the command line handles Ctrl-C only once this module is loaded.
    from importlib import import_module

    value: object
    if name == "__version__":
        value = import_module("importlib.metadata").version("mlx-speculation")
    elif name in __all__:
        home = f"mlx_speculation.{_HOMES.get(name, 'engine')}"
        try:
            value = getattr(import_module(home), name)
        except ImportError as error:
            said = import_module("mlx_speculation.environment").missing_backend(error)
            if said is None:
                raise
            raise MissingLibraryError(said) from error
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # later accesses do not call __getattr__
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
