"""The parts of engines on the CPU, as starts assemble them in the process of a test."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.cpu_check import cpu_kernels
from runahead.runtime.models.cpu_check.cpu_kernels import KernelTrial, kernels_of, tried_kernels
from runahead.runtime.models.cpu_check.self_test import SelfTestReport
from runahead.runtime.process import cpu
from runahead.runtime.process.assemble import assemble
from runahead.runtime.process.parts import Assembled
from runahead.runtime.wire.engine_config import EngineConfig


def assembled(config: EngineConfig) -> Assembled:
    """Assemble an engine. Raises what `assemble` raises.

    Products are tried once for each shape of model in this process, without the self-test of whole forwards, which
    takes longer than all else in a start with a small model. Only products have a second way, and the tests that use
    this compare whole forwards themselves.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cpu, "tried_kernels", _tried_once)
        patched.setattr(cpu_kernels, "self_test", lambda *given: SelfTestReport(0, 0, 0, 0))
        return assemble(config, lambda done, total: None)


def _tried_once(
    config: ModelConfig, threads: int, more: Sequence[tuple[int, int]] = (), *, fixed: bool
) -> tuple[ReferenceKernels, KernelTrial]:
    trial = _trial(config, threads, tuple(more), fixed)
    torch.set_num_threads(trial.threads)
    return kernels_of(trial.products), trial


@cache
def _trial(config: ModelConfig, threads: int, more: tuple[tuple[int, int], ...], fixed: bool) -> KernelTrial:
    return tried_kernels(config, threads, more, fixed=fixed)[1]
