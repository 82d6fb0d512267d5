"""What all tests share: thread limits, signals that end what they start, where kernels of Triton run, no time limit for
an example of a property, the switches of the command line, the skip of GPU tests, what these give back, and what the
garbage collector passes over."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Generator

import pytest

# Before torch is imported anywhere, and inherited by every process a test starts: many small products on two cores are
# slower with more threads, and tests of the service run an engine beside the test's own process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test asks for more of them than a busy machine has cores, waiting threads sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell ignores SIGINT for what it starts in the background, and nohup SIGHUP. Whatever a test starts would inherit
# that, and could not be ended by them. A handler is not inherited: the tests themselves go on.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


def _has_cuda_driver() -> bool:
    """Asked without torch, which not every test needs."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


# Services that a test starts run on the CPU, also beside a GPU, unless the test names another device.
os.environ.setdefault("RUNAHEAD__DEVICE", "cpu")

# Before triton is imported anywhere, which looks at it then: without a GPU its kernels run in its interpreter, on
# tensors in ordinary memory. On a machine with one, TRITON_INTERPRET=1 asks for the same.
if not _has_cuda_driver():
    os.environ.setdefault("TRITON_INTERPRET", "1")

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
        "--seeds", type=int, default=8, metavar="N", help="random workloads that each parity test runs (8)"
    )
    parser.addoption(
        "--schemas",
        type=int,
        default=24,
        metavar="N",
        help="JSON Schemas that completions have to fit at each depth (24)",
    )
    parser.addoption("--large", action="store_true", help="run what is too large for every run, too")
    parser.addoption("--router", metavar="FOLDER", help="an environment with a router: tests/router runs it")
    parser.addoption(
        "--validators",
        metavar="FOLDER",
        help="an environment with validators of manifests: those tests run, and all of tests/deploy must",
    )


@pytest.fixture(scope="session")
def seeds(request: pytest.FixtureRequest) -> range:
    """Seeds of the random workloads."""
    return range(int(request.config.getoption("--seeds")))


@pytest.fixture(scope="session")
def large(request: pytest.FixtureRequest) -> bool:
    """What is too large for every run is asked for."""
    return bool(request.config.getoption("--large"))


@pytest.fixture
def without_gradients() -> Generator[None]:
    """torch keeps nothing for a backward pass."""
    import torch

    with torch.inference_mode():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """What a test has had of a GPU goes back to it: tests that run beside it in other processes have none of what the
    allocator of this one keeps for later."""
    yield
    ends_a_file = nextitem is None or nextitem.path != item.path
    if item.get_closest_marker("gpu"):
        import torch

        if torch.cuda.is_initialized():
            if ends_a_file:
                gc.unfreeze()  # what was frozen with the file before may be garbage now, and keep a GPU's memory
            gc.collect()
            torch.cuda.empty_cache()
    if ends_a_file:
        pass_over_what_lasts()


def pytest_collection_finish() -> None:
    pass_over_what_lasts()


def pass_over_what_lasts() -> None:
    """The garbage collector passes over modules and tests, which last as long as the process. Again after each file,
    since tests import more. It took 3 % of the time of kernels in Triton's interpreter, and a third of three files that
    make engines."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where there is none, and those marked `large` unless they are asked for or there is."""
    marked = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("large")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="this machine has no CUDA GPU"))
        elif not config.getoption("--large"):
            item.add_marker(pytest.mark.skip(reason="too large for every run: make kernels and make parity run it"))
