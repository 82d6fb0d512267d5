"""What a model declares that it keeps is what its cache takes, and what the engine reckons with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runahead.runtime.kernels.layers import AttentionShape, Layer
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.memory import memory_of
from runahead.runtime.models.weights import described
from runahead.runtime.process.parts import block_bytes
from runahead.runtime.wire.engine_config import EngineConfig
from tests.gpu import gpu_chain

CONFIG = gpu_chain.small_config(num_layers=3, windows=(0, 20, 0), num_kv_heads=1, head_dim=24)


@pytest.mark.parametrize("block_size", [8, 16])
def test_a_block_takes_the_bytes_that_the_engine_reckons_with(block_size: int) -> None:
    decoder = Decoder(CONFIG, gpu_chain.random_weights(CONFIG), ReferenceKernels())
    cache = decoder.make_cache(5, block_size)
    taken = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    reckoned = block_bytes(EngineConfig(model="", block_size=block_size), CONFIG, torch.float32)
    assert taken == 5 * reckoned == 5 * 2 * 3 * block_size * 24 * 4


def with_shape(layer: Layer, kv_heads: int, head_dim: int) -> Layer:
    return replace(layer, mixer=replace(layer.mixer, shape=AttentionShape(4, kv_heads, head_dim, 1.0)))


def test_layers_of_different_shapes_are_each_counted_with_their_own() -> None:
    layer = described(CONFIG).layers[0]
    memory = memory_of((with_shape(layer, 2, 16), with_shape(layer, 1, 64)))
    assert memory.kv == ((2, 16), (1, 64))
    assert memory.block_bytes(8, torch.bfloat16) == 2 * 8 * (2 * 16 + 64) * 2
    cache = memory.make_cache(3, 8, torch.bfloat16, torch.device("cpu"))
    assert [tuple(keys.shape) for keys in cache.keys] == [(3, 8, 2, 16), (3, 8, 1, 64)]
