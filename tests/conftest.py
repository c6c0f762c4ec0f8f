"""Settings and fixtures that tests share."""

import os
from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, Phase, settings

from support.cache_twins import Mixers
from support.hooked_mixers import hooked_mixers

# No deadline: the first example compiles kernels, and the machine may be busy.
settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile(
    "long",
    deadline=None,
    print_blob=True,
    max_examples=1000,
    stateful_step_count=100,
    suppress_health_check=[HealthCheck.too_slow],
)
# To find a fault is enough: the smallest example of it is nobody's concern.
settings.register_profile(
    "mutants",
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
# The option --hypothesis-profile overrides this.
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(name="note_rounds")
def _note_rounds(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    return lambda rounds: record_property("rounds", rounds)


@pytest.fixture(name="hooked", scope="module")
def _hooked() -> Iterator[dict[str, Mixers]]:
    with hooked_mixers() as mixers:
        yield mixers


@pytest.fixture(name="exact_buffers")
def _exact_buffers() -> Iterator[None]:
    """Let mlx give every array a buffer of its own size, not a spare larger one."""
    old = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(old)
