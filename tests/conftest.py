"""What all tests share: thread limits, no time limit for an example of a property, random workloads, GPU tests."""

from __future__ import annotations

import os

# Before torch is imported anywhere, and inherited by every process a test starts: many small products on two cores are
# slower with more threads, and tests of the service run an engine beside the test's own process.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU's machine may lack it, and the tests that need it are not run there
    pass
else:
    # An example is wrong by what it does, never by how long it takes: the machine may be slow, or busy with other work.
    # The parent is the profile in force, which under CI is one without randomness.
    settings.register_profile("untimed", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seeds", type=int, default=30, metavar="N", help="random workloads that each parity test runs (30)"
    )


@pytest.fixture(scope="session")
def seeds(request: pytest.FixtureRequest) -> range:
    """Seeds of the random workloads."""
    return range(int(request.config.getoption("--seeds")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where there is none."""
    needing_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needing_gpu:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in needing_gpu:
        item.add_marker(pytest.mark.skip(reason="this machine has no CUDA GPU"))
