"""What a model's mixers declare that they keep is what its cache takes, and what the engine reckons with."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from runahead.runtime.kernels.layers import AttentionShape, Kept, Layer
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.kernels.reference.linear import Products, product_ways
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.memory import KeptBytes, memory_of, weight_bytes
from runahead.runtime.models.weights import described, dummy_weights
from runahead.runtime.process.assemble import assemble
from runahead.runtime.process.parts import blocks_in, bytes_kept
from runahead.runtime.wire.engine_config import EngineConfig, KvDtype
from tests.gpu import gpu_chain
from tests.runtime.models.checkpoints import CASES, save

CONFIG = gpu_chain.small_config(num_layers=3, windows=(0, 20, 0), num_kv_heads=1, head_dim=24)
STATES = ((3, 50), (10, 20, 5), (100,))
STATE_BYTES = 5000


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A made-up mixer that keeps a state of each row, and no key and no value of any token."""

    state: tuple[tuple[int, ...], ...]

    @property
    def keeps(self) -> Kept:
        return Kept(state=self.state)


@pytest.mark.parametrize("block_size", [8, 16])
def test_a_block_takes_the_bytes_that_the_engine_reckons_with(block_size: int) -> None:
    decoder = Decoder(CONFIG, gpu_chain.random_weights(CONFIG), ReferenceKernels())
    cache = decoder.make_cache(5, block_size)
    taken = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    reckoned = bytes_kept(EngineConfig(model="", block_size=block_size), CONFIG, torch.float32)
    assert taken == 5 * reckoned.block == 5 * 2 * 3 * block_size * 24 * 4
    assert reckoned.row == 0, "attention keeps nothing in a row's slot"


def with_shape(layer: Layer, kv_heads: int, head_dim: int) -> Layer:
    mixer: Any = layer.mixer
    return replace(layer, mixer=replace(mixer, shape=AttentionShape(4, kv_heads, head_dim, 1.0)))


def with_states(layer: Layer, *state: tuple[int, ...]) -> Layer:
    mixer: Any = Recurrent(state)
    return replace(layer, mixer=mixer)


def test_layers_of_different_shapes_are_each_counted_with_their_own() -> None:
    layer = described(CONFIG).layers[0]
    memory = memory_of((with_shape(layer, 2, 16), with_shape(layer, 1, 64)))
    assert memory.kept == (Kept(kv=(2, 16)), Kept(kv=(1, 64)))
    assert memory.bytes_kept(8, torch.bfloat16) == KeptBytes(block=2 * 8 * (2 * 16 + 64) * 2, row=0)
    cache = memory.make_cache(3, 8, torch.bfloat16, torch.device("cpu"))
    assert [tuple(keys.shape) for keys in cache.keys] == [(3, 8, 2, 16), (3, 8, 1, 64)]


def test_what_mixers_of_several_kinds_keep_is_added_up_for_blocks_and_for_state_slots() -> None:
    layer = described(CONFIG).layers[0]
    memory = memory_of((with_states(layer, *STATES), with_shape(layer, 2, 16), with_states(layer, (16,))))
    assert memory.bytes_kept(8, torch.float32) == KeptBytes(2 * 8 * 2 * 16 * 4, STATE_BYTES + 64, STATE_BYTES + 64)
    cache = memory.make_cache(3, 8, torch.bfloat16, torch.device("cpu"), state_slots=5, snapshots=2)
    assert [tuple(keys.shape) for keys in cache.keys] == [(3, 8, 2, 16)], "a state takes no place in blocks"
    assert [[tuple(tensor.shape[1:]) for tensor in each] for each in cache.states] == [[*STATES], [(16,)]]
    tensors = [tensor for each in cache.states for tensor in each]
    assert sum(tensor.nbytes for tensor in tensors) == 7 * (STATE_BYTES + 64), "float32, whatever the blocks are"


def test_the_states_of_all_rows_leave_less_memory_for_blocks() -> None:
    config = EngineConfig(model="", max_rows=10, block_size=16)
    kept = KeptBytes(block=1000, row=STATE_BYTES)
    assert blocks_in(100_000, config, replace(kept, row=0), 1600) == 100
    assert blocks_in(100_000, config, kept, 1600) == 50
    assert blocks_in(40_000, config, kept, 1600) == 0, "the states alone do not fit"
    assert blocks_in(10**9, config, kept, 1600) == 10 * 100 + 1, "what all rows need at full length"
    assert blocks_in(100_000, config, replace(kept, block=0), 1600) == 10 * 100 + 1, "blocks that take no memory"


@pytest.mark.parametrize(("name", "kv_dtype"), [("llama", "auto"), ("llama_tied_biased", "fp8")])
def test_a_start_logs_what_memory_is_taken_for(tmp_path: Path, name: str, kv_dtype: KvDtype) -> None:
    save(next(case for case in CASES if case.name == name), tmp_path)
    with capture_logs() as events:
        sizes = EngineConfig(model=str(tmp_path), max_rows=4, num_blocks=40, device="cpu", threads=1, kv_dtype=kv_dtype)
        parts = assemble(sizes, lambda *_: None)
    program = parts.device._program  # type: ignore[attr-defined]
    parts.device.close()
    (memory,) = [event for event in events if event["event"] == "memory"]
    cache = program._cache
    assert memory["kv_bytes"] == sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) > 0
    assert parts.info.kv_dtype == ("float32" if kv_dtype == "auto" else "fp8")
    assert memory["state_bytes"] == 0
    stored = sum(tensor.numel() * 4 for tensor in load_file(tmp_path / "model.safetensors").values())
    vocab, hidden = program._model.weights.embedding.shape
    packed_twice = vocab * hidden * 4 * json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    scales = sum(getattr(layer.mixer.kv_scales, "nbytes", 0) for layer in program._model.weights.layers)
    assert stored <= memory["weight_bytes"] <= stored + packed_twice + scales


def test_a_matrix_with_two_uses_takes_its_memory_once() -> None:
    tied = gpu_chain.random_weights(gpu_chain.small_config(tie_word_embeddings=True))
    assert tied.lm_head is tied.embedding
    assert weight_bytes(tied) == 4 * tied.parameters
    assert weight_bytes(gpu_chain.random_weights(gpu_chain.small_config())) == 4 * (tied.parameters + 160 * 64)


@pytest.mark.parametrize("products", product_ways(), ids=lambda products: type(products).__name__)
def test_the_bytes_of_weights_are_known_however_the_kernels_pack_them(products: Products) -> None:
    config = gpu_chain.small_config()
    kernels = ReferenceKernels(products)
    weights = dummy_weights(config, torch.float32, torch.device("cpu"), kernels.pack_weight)
    assert weight_bytes(weights) == 4 * weights.parameters
