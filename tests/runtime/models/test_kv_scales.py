"""FP8 keys and values of a model: by the definition, with a checkpoint's scales, and in how many bytes."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from runahead.runtime.checkpoint import BUNDLED_FOLDER, CheckpointError, open_checkpoint
from runahead.runtime.kernels.layers import Attention, Dense
from runahead.runtime.kernels.ranks import WHOLE, Shard
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.cpu_check.self_test import Trial, self_test
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.load import load_model
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.rope import rope_table
from runahead.runtime.models.weights import dummy_weights, load_weights
from runahead.runtime.process.device_choice import check_gpu
from runahead.runtime.process.parts import blocks_in, bytes_kept, check_model
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig
from tests.gpu.gpu_chain import small_config
from tests.runtime.checkpoint.quantize import quantize
from tests.runtime.kernels.fp8_kv import FP8, kept, random_scales, read
from tests.runtime.models.checkpoints import CASES, save

CPU = torch.device("cpu")
CONFIG = small_config(num_layers=2, windows=(0, 20), num_heads=4, num_kv_heads=2, head_dim=32)
PREFIX = "model.layers.1.self_attn."


def small_decoder() -> Decoder:
    """With other scales for each head."""
    torch.manual_seed(3)
    weights = dummy_weights(CONFIG, torch.float32, CPU, lambda weight: weight, kv_dtype="fp8")
    layers = tuple(
        replace(layer, mixer=replace(mixer_of(layer.mixer), kv_scales=random_scales(2))) for layer in weights.layers
    )
    return Decoder(CONFIG, replace(weights, layers=layers), ReferenceKernels())


def mixer_of(mixer: object) -> Attention:
    assert isinstance(mixer, Attention)
    return mixer


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def logits_by_definition(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """Logits, float64 [tokens, vocab]. Keys and values are rounded to FP8 before they are read, the token's too."""
    weights, count = decoder.weights, len(ids)
    x = weights.embedding[torch.tensor(ids)].double()
    rope = rope_table(weights.ropes[0], count, CPU)
    for layer in weights.layers:
        mixer, dense = mixer_of(layer.mixer), layer.feed_forward
        assert isinstance(dense, Dense) and mixer.norm and dense.norm and mixer.kv_scales is not None
        shape = mixer.shape
        qkv = normed(x, mixer.norm.weight.double(), mixer.norm.eps) @ mixer.qkv.weight.double().T
        parts = qkv.view(count, -1, shape.head_dim).split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        cos, sin = rope.cos[:count, None].double(), rope.sin[:count, None].double()
        q, k = (
            torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
            for low, high in (part.chunk(2, -1) for part in parts[:2])
        )
        keys, values = (
            read(kept(part, scale), scale).double() for part, scale in zip((k, parts[2]), mixer.kv_scales, strict=True)
        )
        group = shape.heads // shape.kv_heads
        scores = torch.einsum("ihd,jhd->hij", q, keys.repeat_interleave(group, 1)) * shape.scale
        place = torch.arange(count)
        seen = place[None] <= place[:, None]
        if mixer.window:
            seen &= place[None] > place[:, None] - mixer.window
        shares = scores.masked_fill(~seen, -math.inf).softmax(-1)
        attended = torch.einsum("hij,jhd->ihd", shares, values.repeat_interleave(group, 1))
        x = x + attended.reshape(count, -1) @ mixer.o.weight.double().T
        gate, up = (normed(x, dense.norm.weight.double(), dense.norm.eps) @ dense.gate_up.weight.double().T).chunk(
            2, -1
        )
        x = x + (F.silu(gate) * up) @ dense.down.weight.double().T
    return normed(x, weights.final_norm.weight.double(), weights.final_norm.eps) @ weights.lm_head.double().T


@pytest.mark.parametrize("chunks", [(40,), (1,) * 40, (7, 16, 1, 1, 15)])
def test_logits_are_those_of_the_definition_however_a_prompt_is_cut(chunks: tuple[int, ...]) -> None:
    decoder, ids = small_decoder(), [(7 * i) % CONFIG.vocab_size for i in range(40)]
    trial = Trial(decoder, [ids], len(ids), 16, seed=1)
    found = torch.cat([trial.advance([(0, count)])[0] for count in chunks])
    expected = logits_by_definition(decoder, ids)
    assert float((found.double() - expected).abs().max()) < 1e-3 * float(expected.abs().max())
    plain = replace(decoder.weights, layers=tuple(
        replace(layer, mixer=replace(mixer_of(layer.mixer), kv_scales=None)) for layer in decoder.weights.layers
    ))  # fmt: skip
    other = Trial(Decoder(CONFIG, plain, ReferenceKernels()), [ids], len(ids), 16, seed=1).advance([(0, 40)])[0]
    assert float((found - other).abs().max()) > 1e-2 * float(expected.abs().max()), "or nothing was rounded"


def test_no_row_changes_another_and_chunks_change_no_bit() -> None:
    report = self_test(small_decoder(), rows=(1, 5), threads=(1,), longest=40)
    assert report.mixed_forwards


def test_numbers_beyond_the_largest_are_bounded_and_others_that_are_not_finite_stay_visible() -> None:
    decoder = small_decoder()
    cache = decoder.make_cache(2, 16)
    assert cache.keys[0].dtype == cache.values[1].dtype == FP8
    weights = decoder.weights
    mixer = mixer_of(weights.layers[0].mixer)
    for number, is_finite in ((1e20, True), (math.inf, False), (math.nan, False)):
        bias = torch.zeros(mixer.qkv.weight.shape[0])
        bias[-1] = number  # of the last value of the last KV head
        layer = replace(weights.layers[0], mixer=replace(mixer, qkv=replace(mixer.qkv, bias=bias)))
        changed = Decoder(CONFIG, replace(weights, layers=(layer, weights.layers[1])), ReferenceKernels())
        hidden = Trial(changed, [[1, 2, 3]], 3, 16, seed=1).advance([(0, 3)])[0]
        assert bool(hidden.isfinite().all()) is is_finite


# ---------------------------------------------------------------- scales of checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of three layers and two KV heads in FP8, without scales of keys and values."""
    save(next(case for case in CASES if case.name == "llama"), tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "fp8", "fp8-per-channel", 128)
    return tmp_path / "fp8"


def with_scales(folder: Path, **scales: torch.Tensor) -> Path:
    """The same folder with scales, named with two underscores for a dot."""
    path = folder / "model.safetensors"
    named = {PREFIX + name.replace("__", "."): scale for name, scale in scales.items()}
    save_file({**load_file(path), **named}, path)
    return folder


def scales_of(folder: Path, shard: Shard = WHOLE, kv_dtype: str = "fp8") -> list[torch.Tensor | None]:
    checkpoint = open_checkpoint(folder)
    weights = load_weights(
        checkpoint, load_config(checkpoint), torch.float32, CPU, lambda weight: weight, shard=shard, kv_dtype=kv_dtype
    )
    return [mixer_of(layer.mixer).kv_scales for layer in weights.layers]


def test_a_checkpoint_without_scales_has_ones_and_without_fp8_there_are_none(folder: Path) -> None:
    assert scales_of(folder, kv_dtype="auto") == [None] * 3
    assert all(torch.equal(one, torch.ones(2, 2)) for one in scales_of(folder) if one is not None)


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({"k_scale": torch.tensor(0.5), "v_scale": torch.tensor([0.25])}, [[0.5, 0.5], [0.25, 0.25]]),
        (
            {"k_proj__k_scale": torch.tensor(0.5), "v_proj__v_scale": torch.tensor(2.0).bfloat16()},
            [[0.5] * 2, [2.0] * 2],
        ),
        (
            {"k_proj__output_scale": torch.tensor(0.5), "v_proj__output_scale": torch.tensor(2.0)},
            [[0.5] * 2, [2.0] * 2],
        ),
        ({"kv_scale": torch.tensor([3.0])}, [[3.0, 3.0], [3.0, 3.0]]),
        ({"k_scale": torch.tensor([0.5, 4.0]), "v_scale": torch.tensor([[[1.0]], [[8.0]]])}, [[0.5, 4.0], [1.0, 8.0]]),
    ],
    ids=["one number", "ModelOpt", "older", "one for both", "by head"],
)
def test_scales_are_read_under_every_name_and_cut_by_heads(
    scales: dict[str, torch.Tensor], expected: list[list[float]], folder: Path
) -> None:
    first, found, last = scales_of(with_scales(folder, **scales))
    assert first is not None and found is not None and last is not None
    assert torch.equal(found, torch.tensor(expected))
    assert torch.equal(first, torch.ones(2, 2)) and torch.equal(last, first)
    for rank in range(2):
        part = scales_of(folder, Shard(rank, 2))[1]
        assert part is not None
        assert torch.equal(part, torch.tensor(expected)[:, rank : rank + 1])


@pytest.mark.parametrize(
    ("name", "scale", "why"),
    [
        ("k_scale", torch.tensor(0.0), "is not finite or not above 0"),
        ("v_scale", torch.tensor([1.0, math.nan]), "is not finite or not above 0"),
        ("k_scale", torch.tensor(math.inf), "is not finite or not above 0"),
        ("v_scale", torch.tensor(-1.0), "is not finite or not above 0"),
        (
            "k_scale",
            torch.ones(3),
            "has shape [3]; a scale of keys or values is one number, or one for each of 2 KV heads",
        ),
        ("v_scale", torch.tensor(1), "is stored as I64"),
    ],
)
def test_a_bad_scale_is_refused_by_its_name(name: str, scale: torch.Tensor, why: str, folder: Path) -> None:
    with_scales(folder, **{"k_scale": torch.tensor(1.0), "v_scale": torch.tensor(1.0), name: scale})
    with pytest.raises(CheckpointError, match=re.escape(f"tensor {PREFIX}{name} ") + ".*" + re.escape(why)):
        scales_of(folder)
    assert scales_of(folder, kv_dtype="auto") == [None] * 3


def test_a_scale_alone_or_of_no_attention_is_refused_by_its_name(folder: Path) -> None:
    with_scales(folder, k_scale=torch.tensor(1.0))
    with pytest.raises(CheckpointError, match=f"tensor {PREFIX}k_scale scales keys or values alone"):
        scales_of(folder)
    with_scales(folder, v_scale=torch.tensor(1.0), other__k_scale=torch.tensor(1.0))
    with pytest.raises(
        CheckpointError, match=rf"tensor {PREFIX}other\.k_scale .* LlamaForCausalLM has no such attention"
    ):
        scales_of(folder)


# ---------------------------------------------------------------- memory, and what goes together


def test_blocks_take_a_quarter_of_float32_and_half_of_16_bits() -> None:
    fp8, auto = (EngineConfig(model="", kv_dtype=kind, max_rows=99, block_size=16) for kind in ("fp8", "auto"))
    taken = [
        bytes_kept(config, CONFIG, dtype).block for config in (fp8, auto) for dtype in (torch.bfloat16, torch.float32)
    ]
    assert taken == [taken[0], taken[0], 2 * taken[0], 4 * taken[0]]
    cache = load_model(
        open_checkpoint(BUNDLED_FOLDER), CPU, None, "auto", ReferenceKernels(), kv_dtype="fp8"
    ).make_cache(3, 16)
    described = load_config(open_checkpoint(BUNDLED_FOLDER))
    assert sum(x.nbytes for x in (*cache.keys, *cache.values)) == 3 * bytes_kept(fp8, described, torch.float32).block
    pools = [blocks_in(1 << 22, one, bytes_kept(one, CONFIG, torch.bfloat16), 1 << 16) for one in (fp8, auto)]
    assert pools[0] == 2 * pools[1]


def test_a_model_without_keys_and_values_and_an_older_gpu_are_refused(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path), device="cpu", kv_dtype="fp8", spelled={"kv_dtype": "--kv-dtype"})
    check_model(config, CONFIG)
    save(next(case for case in CASES if case.name == "granite_hybrid_bfloat16_all_recurrent"), tmp_path)
    with pytest.raises(ConfigError, match="--kv-dtype fp8 has no effect with GraniteMoeHybridForCausalLM"):
        check_model(config, load_config(open_checkpoint(tmp_path)))
    with pytest.raises(ConfigError, match=r"--kv-dtype fp8 needs a GPU of compute capability 8\.9 .* has 8\.0"):
        check_gpu("NVIDIA A100", (8, 0), config)
    check_gpu("NVIDIA A100", (8, 0))
    check_gpu("NVIDIA L4", (8, 9), config)
