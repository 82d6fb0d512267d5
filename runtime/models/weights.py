"""A checkpoint's tensors, checked against its configuration and packed for the decoder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import Attention, AttentionShape, Dense, Layer, Linear, Norm
from runahead.runtime.models.config import ModelConfig
from runahead.runtime.models.safetensors_folder import StoredTensor, open_folder

Pack = Callable[[torch.Tensor], torch.Tensor]  # KernelSet.pack_weight
Progress = Callable[[int, int], None]  # bytes done, bytes in all

# Older checkpoints carry what a decoder computes by itself.
_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All of a decoder. parameters: as the checkpoint has them, a tied matrix once."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    final_norm: Norm  # over hidden
    lm_head: torch.Tensor  # [vocab, hidden]
    parameters: int


@dataclass(frozen=True, slots=True)
class _Slot:
    """Tensors of a checkpoint that are stacked, by rows, into one of ours. rows: of each of them."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...] = ()  # (in,) for a matrix, () for a vector

    def shape(self, index: int) -> tuple[int, ...]:
        return (self.rows[index], *self.columns)


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    pack: Pack,
    progress: Progress | None = None,
) -> ModelWeights:
    """Read every tensor that `config` asks for, converted to `dtype` on `device`.

    Raises CheckpointError, naming the tensor, if one is missing, unknown, of another shape, of a dtype that is not
    float32, bfloat16 or float16, or cut off; naming the file, if a shard is missing or unreadable.
    """
    stored = open_folder(folder)
    slots = _slots(config)
    _check(stored, slots, config)
    total = sum(tensor.size_bytes for tensor in stored.values())
    done = 0

    def fill(slot: _Slot) -> torch.Tensor:
        nonlocal done
        whole = torch.empty((sum(slot.rows), *slot.columns), dtype=dtype, device=device)
        for name, part in zip(slot.names, whole.split(slot.rows), strict=True):
            part.copy_(stored[name].read())
            done += stored[name].size_bytes
            if progress is not None:
                progress(done, total)
        return whole

    weights = _assemble(slots, config, fill, pack)
    if progress is not None and done != total:  # what was skipped: a tied head, rotary caches
        progress(total, total)
    return weights


def dummy_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, pack: Pack, seed: int = 0
) -> ModelWeights:
    """Random weights of the configured shape, the same for the same seed: norms near 1, products that keep scale."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def fill(slot: _Slot) -> torch.Tensor:
        shape = (sum(slot.rows), *slot.columns)
        drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        if slot.columns:
            return drawn.mul_(slot.columns[0] ** -0.5).to(dtype)
        return drawn.mul_(0.02).add_(1.0 if slot.names[0].endswith("norm.weight") else 0.0).to(dtype)

    return _assemble(_slots(config), config, fill, pack)


def _slots(config: ModelConfig) -> dict[str, _Slot]:
    """What a checkpoint must hold, by our names: `embedding`, `0.qkv`, ..., in the order in which it is read."""
    slots = {"embedding": _Slot(("model.embed_tokens.weight",), (config.vocab_size,), (config.hidden_size,))}
    for layer in range(config.num_layers):
        slots |= {f"{layer}.{name}": slot for name, slot in _layer_slots(config, f"model.layers.{layer}.")}
    slots["final_norm"] = _Slot(("model.norm.weight",), (config.hidden_size,))
    if not config.tie_word_embeddings:
        slots["lm_head"] = _Slot(("lm_head.weight",), (config.vocab_size,), (config.hidden_size,))
    return slots


def _layer_slots(config: ModelConfig, prefix: str) -> Iterator[tuple[str, _Slot]]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    products = (
        ("qkv", "self_attn.", ("q_proj", "k_proj", "v_proj"), (q, kv, kv), hidden, config.qkv_bias),
        ("o", "self_attn.", ("o_proj",), (hidden,), q, config.output_bias),
        ("gate_up", "mlp.", ("gate_proj", "up_proj"), (ffn, ffn), hidden, config.mlp_bias),
        ("down", "mlp.", ("down_proj",), (hidden,), ffn, config.mlp_bias),
    )
    yield "input_norm", _Slot((f"{prefix}input_layernorm.weight",), (hidden,))
    yield "post_norm", _Slot((f"{prefix}post_attention_layernorm.weight",), (hidden,))
    for name, block, parts, rows, columns, has_bias in products:
        yield name, _Slot(tuple(f"{prefix}{block}{part}.weight" for part in parts), rows, (columns,))
        if has_bias:
            yield f"{name}_bias", _Slot(tuple(f"{prefix}{block}{part}.bias" for part in parts), rows)
    if config.qk_norm:
        yield "q_norm", _Slot((f"{prefix}self_attn.q_norm.weight",), (config.head_dim,))
        yield "k_norm", _Slot((f"{prefix}self_attn.k_norm.weight",), (config.head_dim,))


def _check(stored: dict[str, StoredTensor], slots: dict[str, _Slot], config: ModelConfig) -> None:
    expected = {name: slot.shape(i) for slot in slots.values() for i, name in enumerate(slot.names)}
    for name, shape in expected.items():
        if name not in stored:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        stored[name].check(shape)
    for name in stored:
        tied_copy = config.tie_word_embeddings and name == "lm_head.weight"
        if name not in expected and not tied_copy and not _HARMLESS.fullmatch(name):
            raise CheckpointError(f"the checkpoint has a tensor {name}, which {config.architecture} does not know")


def _assemble(
    slots: dict[str, _Slot], config: ModelConfig, fill: Callable[[_Slot], torch.Tensor], pack: Pack
) -> ModelWeights:
    parameters = 0

    def take(name: str) -> torch.Tensor | None:
        nonlocal parameters
        slot = slots.get(name)
        if slot is None:
            return None
        tensor = fill(slot)
        parameters += tensor.numel()
        return tensor

    def must(name: str) -> torch.Tensor:
        tensor = take(name)
        assert tensor is not None, name
        return tensor

    def norm(name: str) -> Norm:
        return Norm(must(name), config.rms_norm_eps)

    def norm_if_there(name: str) -> Norm | None:
        weight = take(name)
        return None if weight is None else Norm(weight, config.rms_norm_eps)

    def linear(name: str) -> Linear:
        return Linear(pack(must(name)), take(f"{name}_bias"))

    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5)
    embedding = must("embedding")
    layers = []
    for i, window in enumerate(config.windows):
        mixer = Attention(
            shape,
            window,
            norm=norm(f"{i}.input_norm"),
            qkv=linear(f"{i}.qkv"),
            q_norm=norm_if_there(f"{i}.q_norm"),
            k_norm=norm_if_there(f"{i}.k_norm"),
            o=linear(f"{i}.o"),
        )
        dense = Dense(norm(f"{i}.post_norm"), linear(f"{i}.gate_up"), linear(f"{i}.down"))
        layers.append(Layer(mixer, dense))
    final_norm = norm("final_norm")
    head = pack(embedding if config.tie_word_embeddings else must("lm_head"))
    return ModelWeights(embedding, tuple(layers), final_norm, head, parameters)
