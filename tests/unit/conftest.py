"""Settings for all unit tests."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.simlab import SimLab

# The machine may be slow or busy: no test here is about time. Derandomized, so that a run says the
# same as the last one.
settings.register_profile(
    "mgpu", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("mgpu")


@pytest.fixture
def lab(tmp_path: Path) -> SimLab:
    """Simulated cards: an H200 and an A10, idle and well."""
    return SimLab(tmp_path)
