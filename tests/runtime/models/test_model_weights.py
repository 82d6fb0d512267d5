"""Reading a checkpoint's tensors: packing, dtypes, progress, and everything that is refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runahead.runtime.checkpoint import CheckpointError, open_checkpoint
from runahead.runtime.kernels.layers import Attention, Dense, Experts, Layer
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.kernels.reference.linear import BlasProducts
from runahead.runtime.models import weights as weights_module
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.load import load_model
from runahead.runtime.models.read_config import load_config
from tests.runtime.models.checkpoints import CASES, save

BY_NAME = {case.name: case for case in CASES}
INDEX = "model.safetensors.index.json"
CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype | None = torch.float32, load_format: str = "auto") -> Decoder:
    return load_model(open_checkpoint(folder), CPU, dtype, load_format, ReferenceKernels(BlasProducts()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(BY_NAME["llama"], tmp_path)
    return tmp_path


def attention_of(layer: Layer) -> Attention:
    assert isinstance(layer.mixer, Attention)
    return layer.mixer


def dense_of(layer: Layer) -> Dense:
    assert isinstance(layer.feed_forward, Dense)
    return layer.feed_forward


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_projections_are_packed_and_nothing_is_lost(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    weights = load(folder).weights
    layer, prefix = weights.layers[1], "model.layers.1."
    parts = [stored[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(attention_of(layer).qkv.weight, torch.cat(parts))
    parts = [stored[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(dense_of(layer).gate_up.weight, torch.cat(parts))
    assert torch.equal(weights.lm_head, stored["lm_head.weight"])
    assert weights.parameters == sum(tensor.numel() for tensor in stored.values())


def test_experts_of_a_sharded_checkpoint_are_packed_as_they_are_stored(tmp_path: Path) -> None:
    save(BY_NAME["qwen3_moe_bfloat16_sharded"], tmp_path)
    stored: dict[str, torch.Tensor] = {}
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    for shard in shards:
        stored |= load_file(shard)
    weights = load(tmp_path).weights
    experts = weights.layers[1].feed_forward
    assert len(shards) > 1
    assert isinstance(experts, Experts)
    assert (experts.count, experts.width, experts.chosen, experts.choice.renormalised) == (11, 40, 3, True)
    prefix = "model.layers.1.mlp."
    assert torch.equal(experts.router.weight, stored[f"{prefix}gate.weight"].float())
    for number in (0, 4, 10):
        own = [stored[f"{prefix}experts.{number}.{name}_proj.weight"].float() for name in ("gate", "up", "down")]
        assert torch.equal(experts.gate_up[number].weight, torch.cat(own[:2]))
        assert torch.equal(experts.down[number].weight, own[2])
    assert weights.parameters == sum(tensor.numel() for tensor in stored.values())


def test_a_tied_head_is_the_embedding_and_counts_once(tmp_path: Path) -> None:
    save(BY_NAME["llama_tied_biased"], tmp_path)
    decoder = load(tmp_path)
    assert torch.equal(decoder.weights.lm_head, decoder.weights.embedding)
    assert decoder.num_parameters == sum(t.numel() for t in load_file(tmp_path / "model.safetensors").values())


@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16, None])
def test_weights_are_converted_to_the_dtype_asked_for(tmp_path: Path, asked: torch.dtype | None) -> None:
    save(BY_NAME["llama_bfloat16_sharded"], tmp_path)
    decoder = load(tmp_path, asked)
    assert decoder.dtype is (asked or torch.bfloat16)
    assert attention_of(decoder.weights.layers[0]).qkv.weight.dtype is decoder.dtype


def test_a_bfloat16_decoder_comes_close_to_the_float32_one(tmp_path: Path) -> None:
    from runahead.runtime.models.cpu_check.self_test import Trial

    save(BY_NAME["qwen3_biased_grouped"], tmp_path)
    exact, rounded = (
        Trial(load(tmp_path, dtype), [list(range(40))], 40, 16, seed=0).advance([(0, 40)])[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert rounded.dtype is torch.float32
    assert (exact - rounded).abs().max() < 0.1 * exact.std()


def test_progress_rises_to_the_size_of_all_tensors(tmp_path: Path) -> None:
    save(BY_NAME["llama_bfloat16_sharded"], tmp_path)
    seen: list[tuple[int, int]] = []
    load_model(
        open_checkpoint(tmp_path), CPU, None, "auto", ReferenceKernels(), lambda done, total: seen.append((done, total))
    )
    total = json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"]
    assert seen == sorted(seen)
    assert len(seen) > 20
    assert seen[-1] == (total, total)


def test_dummy_weights_need_a_config_only_and_are_the_same_every_time(tmp_path: Path) -> None:
    save(BY_NAME["qwen3_biased_grouped"], tmp_path)
    real = load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first, second = load(tmp_path, load_format="dummy"), load(tmp_path, load_format="dummy")
    assert first.num_parameters == real.num_parameters
    assert torch.equal(dense_of(first.weights.layers[2]).down.weight, dense_of(second.weights.layers[2]).down.weight)
    assert not torch.equal(dense_of(first.weights.layers[2]).down.weight, dense_of(first.weights.layers[1]).down.weight)


def test_random_weights_are_drawn_a_bounded_piece_at_a_time_whatever_a_tensor_s_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(BY_NAME["qwen3_biased_grouped"], tmp_path)
    whole = load(tmp_path, load_format="dummy")
    drawn: list[int] = []
    randn = torch.randn

    def counted(shape: Any, **rest: Any) -> torch.Tensor:
        drawn.append(torch.Size(shape).numel())
        return randn(shape, **rest)

    monkeypatch.setattr(weights_module, "_DRAWN_AT_ONCE", 1024)
    monkeypatch.setattr(torch, "randn", counted)
    pieces = load(tmp_path, load_format="dummy")
    assert max(drawn) == 1024 < whole.weights.embedding.numel()
    assert sum(drawn) == pieces.num_parameters == whole.num_parameters
    assert torch.equal(pieces.weights.embedding, whole.weights.embedding), "the same numbers, of the same seed"
    assert abs(float(pieces.weights.embedding.std()) * pieces.config.hidden_size**0.5 - 1) < 0.05
    assert abs(float(pieces.weights.final_norm.weight.mean()) - 1) < 0.02


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("name", ["llama_tied_biased", "gemma2", "qwen3_5", "granite_hybrid_bfloat16_all_recurrent"])
def test_a_tied_head_that_is_stored_too_is_passed_over_where_it_is_the_embedding(tmp_path: Path, name: str) -> None:
    save(BY_NAME[name], tmp_path)
    path = tmp_path / "model.safetensors"
    if not path.is_file():
        for shard in sorted(tmp_path.glob("model-*.safetensors")):
            merged = load_file(path) if path.is_file() else {}
            save_file(merged | load_file(shard), path)
        (tmp_path / INDEX).unlink()
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].float().clone()}))
    for dtype in (torch.float32, torch.bfloat16):
        weights = load(tmp_path, dtype).weights
        assert torch.equal(weights.lm_head, weights.embedding)
    change(tmp_path, lambda tensors: tensors["lm_head.weight"][-1].neg_())
    with pytest.raises(CheckpointError, match=r"lm_head\.weight that differs from model\.embed_tokens\.weight"):
        load(tmp_path)


def test_a_tied_head_of_another_shape_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    save(BY_NAME["llama_tied_biased"], tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING][:-1].clone()}))
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \[159, 64\].*asks for \[160, 64\]"):
        weights_module.check_weights(checkpoint, load_config(checkpoint))


def test_a_rotary_cache_of_an_old_checkpoint_is_passed_over(tmp_path: Path) -> None:
    save(BY_NAME["llama"], tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert load(tmp_path).config.num_layers == 3


Q_PROJ = "model.layers.2.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(Q_PROJ), f"no tensor {Q_PROJ}"),
        (lambda t: t.pop("lm_head.weight"), r"no tensor lm_head\.weight"),
        (lambda t: t.update({"model.layers.3.mlp.bias": torch.zeros(2)}), r"a tensor model\.layers\.3\.mlp\.bias"),
        (lambda t: t.update({Q_PROJ: torch.zeros(64, 63)}), rf"{Q_PROJ} has shape \[64, 63\].*asks for \[64, 64\]"),
        (lambda t: t.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}), f"{Q_PROJ} is stored as I8"),
        (lambda t: t.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.float64)}), f"{Q_PROJ} is stored as F64"),
    ],
    ids=["missing", "missing_head", "extra", "misshaped", "integers", "float64"],
)
def test_a_wrong_tensor_is_refused_by_name(folder: Path, edit: Callable[[Any], Any], message: str) -> None:
    change(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_truncated_file_is_refused_by_the_first_tensor_that_is_cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    with pytest.raises(CheckpointError, match=f"tensor {last} is cut off"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 8, 200])
def test_a_file_that_ends_in_its_header_is_refused_by_name(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load(folder)


@pytest.mark.parametrize(
    "header",
    [b"not json", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}', b'{"a": {}}'],
)
def test_a_corrupt_header_is_refused_by_the_file_s_name(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has a corrupt header"):
        load(folder)


def test_offsets_that_are_not_what_the_shape_takes_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header[Q_PROJ]["data_offsets"][1] -= 4
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(CheckpointError, match=f"{Q_PROJ} spans 16380 bytes"):
        load(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        load(folder)
    assert load_config(open_checkpoint(folder)).num_layers == 3


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save(BY_NAME["llama_bfloat16_sharded"], tmp_path)
    return tmp_path


def test_a_missing_shard_is_refused_by_its_name_and_a_tensor_s(sharded: Path) -> None:
    shards = sorted(sharded.glob("model-*.safetensors"))
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=rf"shard {shards[1].name} is missing.*tensor \S+ is in it"):
        load(sharded)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}, "outside the folder"),
        ({"weight_map": {"no.such": "none.safetensors"}}, "missing"),
        ({"weight_map": {"no.such": None}}, "can't be read"),
        ({"weights": {}}, "can't be read"),
        (None, "can't be read"),
    ],
)
def test_a_broken_index_is_refused(sharded: Path, index: object, message: str) -> None:
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        load(sharded)


def test_an_index_that_disagrees_with_its_shards_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    holder = index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.norm.weight"] = next(shard for shard in shards if shard != holder)
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"says that tensor model\.norm\.weight is in"):
        load(sharded)
