"""A stage of programs and a share on it, for the tests of what they count."""

import pytest
from tests.kernel.conftest import missing_for_programs
from tests.kernel.puppet import Stage


@pytest.fixture(scope="package")
def stage(tmp_path_factory):
    reason = missing_for_programs()
    if reason:
        pytest.skip(reason)
    made = Stage(tmp_path_factory.mktemp("programs"))
    yield made
    made.close()
    assert not made.pin_root.exists()


@pytest.fixture
def cgroup(stage):
    with stage.cgroup("one") as path:
        yield path
        stage.end_puppets()


@pytest.fixture
def share(stage, cgroup):
    """A bound share of 1 GiB; the container is ``cgroup``."""
    (share_id,) = stage.shares()
    stage.bind(cgroup.stat().st_ino, (share_id,))
    yield share_id
    stage.end_puppets()
    stage.release(cgroup.stat().st_ino, (share_id,))


@pytest.fixture
def puppet(stage, cgroup, share):
    return stage.puppet(cgroup)
