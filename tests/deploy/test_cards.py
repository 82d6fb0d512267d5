"""The table of docs/operations.md that says how many GPUs a model needs, from the sizes that a start goes by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.gpu_table.shapes import SHAPES
from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.memory import KeptBytes
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.weights import why_not_divided
from runahead.runtime.process.parts import blocks_in, bytes_kept, bytes_to_load, check_blocks
from runahead.runtime.process.pool_fit import overhead
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig
from tests.deploy.documented import TEXT

GIB: Final = 1 << 30
CARDS: Final = (79 * GIB, 139 * GIB)  # bytes that an H100 and an H200 have
RANKS: Final = (1, 2, 4, 8)
CONTEXT: Final = 32_768
DENSE: Final = SHAPES["8B"].keys
EXPERTS: Final = SHAPES["30B-A3B"].keys
MODELS: Final[dict[str, dict[str, Any]]] = {
    "8B": {**DENSE},
    "32B": {
        **DENSE, "hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 25600, "num_attention_heads": 64,
        "vocab_size": 151936,
    },
    "70B": {
        **DENSE, "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672, "num_attention_heads": 64,
    },
    "30B-A3B": {**EXPERTS},
    "235B-A22B": {
        **EXPERTS, "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
        "moe_intermediate_size": 1536,
    },
}  # fmt: skip


def cells(folder: Path) -> list[str]:
    """GiB of the weights, then the fewest GPUs of each kind, in 16 bits and in FP8."""
    checkpoint = open_checkpoint(folder)
    model = load_config(checkpoint)
    ranks = [number for number in RANKS if number == 1 or not why_not_divided(model, number)]
    weights, fewest = list[int](), list[str]()
    for quantize in ("none", "fp8"):
        config = EngineConfig(model=str(folder), device="cuda", load_format="dummy", quantize=quantize, max_rows=1)
        weights.append(bytes_to_load(config, checkpoint, model, "cuda"))
    kept = {number: kept_by(folder, model, number) for number in ranks}
    for memory in CARDS:
        for size in weights:
            fit = [number for number in ranks if fits(*kept[number], size, memory)]
            fewest.append(str(fit[0]) if fit else "none")
    pairs = ["/".join(f"{size / GIB:.0f}" for size in weights), "/".join(fewest[:2]), "/".join(fewest[2:])]
    return [pair.replace("none/none", "none") for pair in pairs]


def kept_by(folder: Path, model: ModelConfig, ranks: int) -> tuple[EngineConfig, KeptBytes]:
    """The bytes that each of so many ranks keeps for a block and a row, and the configuration that asks for them."""
    config = EngineConfig(model=str(folder), device="cuda", tensor_parallel=ranks, max_rows=1)
    return config, bytes_kept(config, model, model.dtype)


def fits(config: EngineConfig, kept: KeptBytes, size: int, memory: int) -> bool:
    """As `runahead.runtime.process.cuda` refuses what does not: weights, one request and a stated overhead."""
    pool = memory - size // config.tensor_parallel - overhead(memory)
    try:
        check_blocks(blocks_in(pool, config, kept, CONTEXT), config, CONTEXT, kept)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", MODELS)
def test_the_document_says_on_how_many_gpus_a_model_fits(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]), encoding="utf-8")
    (row,) = (line for line in TEXT.splitlines() if line.startswith(f"| {name} |"))
    assert row == f"| {name} | " + " | ".join(cells(tmp_path)) + " |"
