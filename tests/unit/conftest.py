"""Settings for all unit tests."""

from hypothesis import HealthCheck, settings

# The machine may be slow or busy: no test here is about time. Derandomized, so that a run says the
# same as the last one.
settings.register_profile(
    "mgpu", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("mgpu")
