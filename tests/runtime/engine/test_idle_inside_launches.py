"""A device that starves inside its launches shows it, though every launch is enqueued in time and none looks idle."""

from __future__ import annotations

import pytest
import torch

from runahead.cuda_graphs.host_device import HostDevice
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.gpu.gpu_chain import EngineUnderTest, cpu_engine, random_weights, small_config

STALL_NS = 1000


def served(depth: int, stall_ns: int) -> EngineUnderTest:
    """Four requests of several chunks. The device's clock moves only while it stalls, before each part of a launch."""
    now = 0

    def stall() -> None:
        nonlocal now
        now += stall_ns

    config = small_config()
    under_test = cpu_engine(config, random_weights(config), depth)
    device = under_test.device
    assert isinstance(device, HostDevice)
    device._delay, device._clock = stall, lambda: now
    for handle in range(4):
        stopping = StoppingParams(max_tokens=12, ignore_eos=True)
        under_test.submit(handle, [5 + handle] * 70, SamplingParams(temperature=0.0), stopping)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    under_test.run()
    torch.set_num_threads(threads)
    device.close()
    return under_test


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_chain_that_overlaps_says_when_its_device_did_nothing_inside_its_launches(depth: int) -> None:
    stats = served(depth, STALL_NS).engine.stats()
    assert stats.launches_by_kind["mixed"] > 0
    assert stats.overlapped > 0, "no launch was enqueued in time"
    assert stats.device_busy_s == pytest.approx(2 * STALL_NS * stats.launches_retired / 1e9), "as its ends have it"
    assert stats.device_idle_inside_s == pytest.approx(stats.device_busy_s), "it did nothing at all"


def test_a_device_that_does_not_stall_is_never_idle_inside() -> None:
    assert served(2, 0).engine.stats().device_idle_inside_s == 0
