"""`runahead tune` on a GPU, and the bits of a launch by each tiling that it tries."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from runahead.runtime import models

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

BUNDLED = Path(models.__path__[0]) / "bundled"


@pytest.fixture
def nothing_tuned() -> Iterator[None]:
    from runahead.runtime.kernels.triton.gemm import tuning

    yield
    tuning.tuned().clear()


def test_the_command_leaves_a_file_that_a_start_can_read(tmp_path: Path) -> None:
    flags = ["--model", str(BUNDLED), "--device", "cuda", "--kernel-cache", str(tmp_path), "--dtype", "bfloat16"]
    command = [sys.executable, "-m", "runahead", "tune", *flags, "--rows", "2,8", "--seconds", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 rows: " in done.stdout and "8 rows: " in done.stdout
    from runahead.runtime.kernels.triton.forward.tuned_tilings import FILE, checked

    (entries,) = json.loads((tmp_path / FILE).read_text()).values()
    checked(entries, "the file")


@pytest.mark.usefixtures("nothing_tuned")
@pytest.mark.parametrize("rows", [2, 8])
def test_no_tiling_that_is_tried_changes_a_bit(rows: int) -> None:
    from runahead.runtime.checkpoint import open_checkpoint
    from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet
    from runahead.runtime.kernels.triton.forward.tuned_tilings import neighbors
    from runahead.runtime.kernels.triton.gemm.tuning import tuned
    from runahead.runtime.models.decoder import Decoder
    from runahead.runtime.models.read_config import load_config
    from runahead.runtime.models.weights import dummy_weights
    from runahead.runtime.programs.cuda.tuner import DecodeStep, few_layers, tilings_in_use

    config, kernels = few_layers(load_config(open_checkpoint(BUNDLED))), TritonKernelSet()
    with torch.inference_mode():
        weights = dummy_weights(config, torch.bfloat16, torch.device("cuda"), kernels.pack_weight)
        model = Decoder(config, weights, kernels, 1024)
        step, compared = DecodeStep(model, rows), 0
        expected = step.bits()
        for key, tiling in tilings_in_use(model, rows):
            for other in neighbors(key, tiling):
                tuned()[key] = asdict(other)
                try:
                    found = step.bits()
                except Exception as error:  # what this GPU can't hold is never taken
                    print(key, other, str(error)[:80])
                    continue
                assert torch.equal(found, expected), (key, other)
                compared += 1
            tuned().pop(key)
    assert compared > 20
