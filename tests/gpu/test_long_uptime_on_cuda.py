"""The CUDA device across 2**31 and 2**32: its counters, marks, stamps and rings go on as those that began at 0."""

from __future__ import annotations

import numpy as np
import pytest

from runahead.cuda_graphs import marks
from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.cuda_graphs.rings import FAULT_NONE, FAULT_PLAN_NUMBER, STATUS_FAULT
from runahead.runtime.plan import LaunchPlan, stage
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.gpu.gpu_chain import EngineUnderTest, cpu_engine, cuda_engine, random_requests, random_weights, small_config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

BORDERS = [1 << 31, 1 << 32]
BEFORE = 20  # launches, and 10 handles, before a border
CONFIG = small_config()
PROMPT_TOLERANCE = 1e-4


def requests() -> list[tuple[list[int], SamplingParams, StoppingParams]]:
    """Random ones, and some with penalties or with log-probabilities of their prompt."""
    asked = random_requests(CONFIG, 24, seed=3)
    stopping = StoppingParams(max_tokens=25, ignore_eos=True)
    for i in range(4):
        penalised = SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.1 * i)
        asked += [([5 + i] * 9, penalised, stopping)]
        asked += [([(7 * i + j) % 90 + 3 for j in range(50)], SamplingParams(seed=i, prompt_logprobs=2), stopping)]
    return asked


def served(under_test: EngineUnderTest, counters_from: int) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Tokens and finish reasons, by handle counted from 0, of requests that arrive in two waves."""
    first = counters_from and counters_from + BEFORE - 10
    asked = requests()
    for i, request in enumerate(asked):
        if i == len(asked) // 2:
            for _ in range(6):
                under_test.engine.turn()
        under_test.submit(first + i, *request)
    under_test.run()
    under_test.engine.drain("test")  # compares the device's rows with the host's
    assert under_test.engine.ledger.launched > counters_from + 2 * BEFORE
    tokens = {handle - first: found for handle, found in under_test.tokens().items()}
    return tokens, {handle - first: reason for handle, reason in under_test.reasons().items()}


def prompt_entries(under_test: EngineUnderTest) -> np.ndarray:
    """All log-probabilities of prompts, in the order of handles and places."""
    parts = [message for _, message in under_test.links.sent if isinstance(message, m.PromptLogprobs)]
    parts.sort(key=lambda part: (part.handle, part.offset))
    return np.concatenate([np.frombuffer(part.chosen, np.float32) for part in parts])


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("run_ahead", [0, 1, 2, 4])
def test_counters_that_cross_a_border_on_the_cuda_device_change_nothing(run_ahead: int, border: int) -> None:
    weights = random_weights(CONFIG)
    reference = cpu_engine(CONFIG, weights, 2)
    expected = served(reference, 0)
    reference.device.close()
    under_test = cuda_engine(CONFIG, weights, run_ahead, counters_from=border - BEFORE)
    assert served(under_test, border - BEFORE) == expected
    found, wanted = prompt_entries(under_test), prompt_entries(reference)
    assert found.size == wanted.size > 0
    assert float(np.abs(found - wanted).max()) <= PROMPT_TOLERANCE
    stats = under_test.engine.stats()
    assert stats.launches - (border - BEFORE) == stats.launches_retired == sum(stats.launches_by_kind.values())
    assert 64 * stats.launches_retired <= stats.bytes_to_device < (1 << 20) * stats.launches_retired
    assert 0 < stats.device_busy_s < 600, "every stamp is the one of its own launch"
    under_test.device.close()


@pytest.mark.parametrize("number", [1, (1 << 31) + 1, (1 << 32) + 1])
def test_a_plan_whose_number_differs_in_its_upper_half_alone_is_a_fault(number: int) -> None:
    device = cuda_engine(CONFIG, random_weights(CONFIG), 2, counters_from=number - 1).device
    assert (device.sampled(), device.ended()) == (number - 1, number - 1)
    rings = device.rings
    for launch, planned, fault in (
        (number, number + (1 << 32), FAULT_PLAN_NUMBER),
        (number + 1, number + 1, FAULT_NONE),
    ):
        plan = LaunchPlan(planned, np.zeros(0, np.int32), np.zeros(0, np.bool_), True, np.zeros((0, 3), np.int32))
        stage(plan, rings.plan[rings.slot(launch)], rings.bulk[rings.slot(launch)])
        device.launch(LaunchShape(launch, 0, Form.PLAIN, rows=2, tokens=2, is_decode=True))
        device.wait(1 << 62, launch - 1, (), 5.0)
        assert device.ended() == launch
        assert device.rings.status[rings.slot(launch), STATUS_FAULT] == fault
    device.close()


def test_marks_have_64_bits() -> None:
    device = cuda_engine(CONFIG, random_weights(CONFIG), 2, counters_from=(1 << 40) + 3).device
    found = device._marks  # type: ignore[attr-defined]
    assert (found.dtype, found.size) == (np.int64, marks.MARKS)
    assert found.tolist() == [(1 << 40) + 3] * marks.MARKS
    device.close()
