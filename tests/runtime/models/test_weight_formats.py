"""What is said of how weights are stored and held."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
import torch

from runahead.runtime.checkpoint import BUNDLED_FOLDER, open_checkpoint
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.weight_formats import weight_formats
from runahead.runtime.models.weights import described
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.runtime.wire.messages import WeightFormat
from tests.runtime.assembled import assembled
from tests.runtime.checkpoint.quantize import quantize

LINEAR = 6 * 7  # quantized matrices of the bundled model


@pytest.mark.parametrize(
    ("name", "stored_as", "held_as", "bits"),
    [
        ("fp8-blocks", "fp8 128x128 blocks", "fp8", 8.0),
        ("int4-packed-ordered", "int4 groups of 64 in the order of activations", "float16", 4.3),
        ("awq-int4", "int4 groups of 64 with zero points", "int4", 4.3),
    ],
)
def test_quantized_tensors_are_counted_with_the_bytes_of_their_parts(
    name: str, stored_as: str, held_as: str, bits: float, tmp_path: Path
) -> None:
    quantize(BUNDLED_FOLDER, tmp_path, name, 64)
    checkpoint = open_checkpoint(tmp_path)
    config = load_config(checkpoint)
    quantized, others = weight_formats(checkpoint, config, torch.float16)
    assert (quantized.stored_as, quantized.held_as, quantized.tensors) == (stored_as, held_as, LINEAR)
    assert (others.stored_as, others.held_as) == ("BF16", "float16")
    assert quantized.parameters + others.parameters == described(config).parameters
    assert others.stored_bytes == 2 * others.parameters
    assert bits <= 8 * quantized.stored_bytes / quantized.parameters <= bits + 0.1


def test_the_engine_and_the_log_at_start_say_how_weights_are_stored_and_held(tmp_path: Path) -> None:
    quantize(BUNDLED_FOLDER, tmp_path, "fp8-per-channel")
    config = EngineConfig(model=str(tmp_path), max_rows=2, num_blocks=20, threads=1)
    with structlog.testing.capture_logs() as lines:
        parts = assembled(config)
    parts.device.close()
    first, second = parts.info.weights
    assert first == WeightFormat("fp8 per-channel", "fp8", LINEAR, first.parameters, first.stored_bytes)
    said = [(line["stored_as"], line["held_as"]) for line in lines if line["event"] == "weights"]
    assert said == [("fp8 per-channel", "fp8"), ("BF16", "float32")]
    assert second.stored_as == "BF16"


def test_random_weights_are_stored_in_no_way() -> None:
    config = EngineConfig(model=str(BUNDLED_FOLDER), load_format="dummy", max_rows=2, num_blocks=20, threads=1)
    parts = assembled(config)
    parts.device.close()
    assert parts.info.weights == ()
