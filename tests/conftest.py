"""Settings that all tests share."""

from hypothesis import HealthCheck, settings

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
# The option --hypothesis-profile overrides this.
settings.load_profile("default")
