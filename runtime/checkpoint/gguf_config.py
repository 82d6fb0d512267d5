"""Converts a GGUF file's metadata and tensor names to the Hugging Face layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.checkpoint.errors import CheckpointError
from runahead.runtime.checkpoint.refusals import FETCH, of_split_gguf

ROPE_FACTORS: Final = "rope_freqs.weight"  # divisors of rotary frequencies: part of the configuration

_ENDS: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def name_of(own: str) -> str:
    """Return the Hugging Face name of a GGUF tensor; unknown names stay."""
    stem, _, kind = own.rpartition(".")
    if stem in _ENDS:
        return f"{_ENDS[stem]}.{kind}"
    found = _LAYER.fullmatch(own)
    if found is None or found[2] not in _OF_LAYER:
        return own
    return f"model.layers.{found[1]}.{_OF_LAYER[found[2]]}.{found[3]}"


def permuted_heads(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the heads of projections whose rows are permuted in the file, by projection name."""
    heads = metadata.get("llama.attention.head_count")
    kv_heads = metadata.get("llama.attention.head_count_kv", heads)
    found = {"q_proj": heads, "k_proj": kv_heads}
    return {name: count for name, count in found.items() if isinstance(count, int) and count > 0}


Metadata = Mapping[str, Any]  # values by key: numbers, booleans, texts, and lists of them
Stored = Mapping[str, tuple[str, tuple[int, ...]]]  # by the file's tensor name: how it is stored, and its shape

ARCHITECTURE: Final = "llama"  # `general.architecture`: Llama, and Mistral without a window
_PREFIX: Final = f"{ARCHITECTURE}."
_INSTEAD: Final = f"instead, serve the model's checkpoint in the Hugging Face layout: {FETCH}"
# Rotary scaling of Llama 3.1 and later. A file has the resulting factors instead of these.
_LOW: Final = 1.0
_HIGH: Final = 4.0
_ORIGINAL: Final = 8192

# Keys without effect: descriptions, or facts that tensors repeat.
_UNREAD: Final = frozenset(
    {"rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout", "expert_used_count"}
)
# Keys of unsupported features, with the values that turn each off and the feature's name.
_NEUTRAL: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "expert_count": ((0,), "is a mixture of experts"),
    "attention.sliding_window": ((0,), "lets a token attend to a window"),
    "attention.causal": ((True,), "lets a token attend to those after it"),
    "use_parallel_residual": ((False,), "computes attention and feed-forward side by side"),
}
_READ: Final = frozenset(
    "block_count context_length embedding_length feed_forward_length vocab_size attention.head_count "
    "attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon "
    "rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor rope.scale_linear".split()
)


def config_of(path: Path, metadata: Metadata, tensors: Stored, factors: NDArray[np.float32] | None) -> dict[str, Any]:
    """Return the equivalent of `config.json`. factors: divisors of rotary frequencies, float32 [head_dim // 2], if the
    file has them.

    Raises CheckpointError naming an unsupported key and value, or an unknown key.
    """
    _refuse_what_is_no_model(path, metadata)
    _refuse_other_keys(path, metadata)
    get = _Getter(path, metadata)
    hidden, heads = get.count("embedding_length"), get.count("attention.head_count")
    head_dim = get.count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get.count(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{path} has {_PREFIX}{key} {get.count(key)} with heads of {head_dim} numbers, which is not supported; "
                f"{_INSTEAD}"
            )
    theta = get.number("rope.freq_base", 10000.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _vocabulary(path, get, tensors),
        "hidden_size": hidden,
        "intermediate_size": get.count("feed_forward_length"),
        "num_hidden_layers": get.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get.count("context_length"),
        "rms_norm_eps": get.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _scaling(path, get, factors, theta, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in tensors),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(metadata),
        "dtype": _dtype(tensors),
    }


class _Getter:
    """Values of the architecture's keys."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self._path = path
        self._metadata = metadata

    def text(self, key: str, default: str) -> str:
        return str(self._get(key, lambda value: isinstance(value, str), "a text", default))

    def count(self, key: str, default: int | None = None) -> int:
        """Read a number of at least 1."""
        return int(self._get(key, lambda value: type(value) is int and value >= 1, "one number of 1 or more", default))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, lambda value: type(value) in (int, float) and value > 0, "above 0", default))

    def _get(self, key: str, fits: Callable[[Any], bool], what: str, default: Any) -> Any:
        value = self._metadata.get(f"{_PREFIX}{key}", default)
        if value is None:
            raise CheckpointError(f"{self._path} has no {_PREFIX}{key}; {FETCH}")
        if not fits(value):
            shown = f"{len(value)} values, one for each layer," if isinstance(value, list) else repr(value)
            raise CheckpointError(f"{self._path} has {_PREFIX}{key} {shown} where only {what} is supported; {_INSTEAD}")
        return value


def _refuse_what_is_no_model(path: Path, metadata: Metadata) -> None:
    parts = metadata.get("split.count", 1)
    if not isinstance(parts, int):
        raise CheckpointError(f"{path} has split.count {parts!r}, which must be a number; {FETCH}")
    if parts > 1:
        raise of_split_gguf(path)
    kind = metadata.get("general.type", "model")
    if kind == "adapter":
        raise CheckpointError(
            f"{path} is a LoRA adapter and no model: `llama-export-lora -m BASE.gguf --lora {path.name} -o NEW.gguf` "
            "of llama.cpp merges it into its base model"
        )
    if kind != "model":
        raise CheckpointError(f"{path} is of the type {kind!r} and no model that generates text; {_INSTEAD}")
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise CheckpointError(
            f"{path} has general.architecture {architecture!r}; of GGUF files only {ARCHITECTURE!r} is supported; "
            f"{_INSTEAD}"
        )


def _refuse_other_keys(path: Path, metadata: Metadata) -> None:
    own = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    for key in own.keys() & _NEUTRAL.keys():
        values, what = _NEUTRAL[key]
        if own[key] not in values:
            raise CheckpointError(
                f"{path} has {_PREFIX}{key} {own[key]!r}, which {what} and is not supported; {_INSTEAD}"
            )
    if unknown := sorted(own.keys() - _READ - _UNREAD - _NEUTRAL.keys()):
        names = ", ".join(f"{_PREFIX}{key}" for key in unknown)
        raise CheckpointError(
            f"{path} has keys that are not understood and may change what the model computes: {names}; {_INSTEAD}"
        )


def _vocabulary(path: Path, get: _Getter, tensors: Stored) -> int:
    """Return the rows of the embedding, some possibly without a token."""
    shape = tensors.get("token_embd.weight", ("", ()))[1]
    if len(shape) != 2:
        raise CheckpointError(f"{path} has no tensor token_embd.weight; {FETCH}")
    return get.count("vocab_size", shape[0])


def _scaling(
    path: Path, get: _Getter, factors: NDArray[np.float32] | None, theta: float, head_dim: int
) -> dict[str, Any] | None:
    kind = get.text("rope.scaling.type", "linear")  # a factor of 1 if nothing is set
    factor = 1.0 if kind == "none" else get.number("rope.scaling.factor", get.number("rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise CheckpointError(
            f"{path} has {_PREFIX}rope.scaling.type {kind!r}; supported are 'none', 'linear' and the factors of Llama "
            f"3.1; {_INSTEAD}"
        )
    if factors is not None:
        largest = float(factors.max(initial=1.0))
        if factor != 1.0 or not _are_llama3(factors, largest, theta, head_dim):
            raise CheckpointError(
                f"{path} scales rotary frequencies by rope_freqs.weight in another way than Llama 3.1 does; {_INSTEAD}"
            )
        return {
            "rope_type": "llama3",
            "factor": largest,
            "low_freq_factor": _LOW,
            "high_freq_factor": _HIGH,
            "original_max_position_embeddings": _ORIGINAL,
        }
    return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None


def _are_llama3(factors: NDArray[np.float32], largest: float, theta: float, head_dim: int) -> bool:
    """Whether Llama 3.1's scaling with the factor `largest` gives these factors."""
    if factors.shape != (head_dim // 2,):
        return False
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = _ORIGINAL * frequencies / (2 * np.pi)
    fraction = np.clip((turns - _LOW) / (_HIGH - _LOW), 0.0, 1.0)
    return bool(np.allclose(factors, 1 / ((1 - fraction) / largest + fraction), rtol=1e-4, atol=0))


def _end_tokens(metadata: Metadata) -> list[int]:
    named = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return sorted({metadata[key] for key in named if isinstance(metadata.get(key), int)})


def _dtype(tensors: Stored) -> str:
    """Return the matrices' dtype, or for quantized ones a dtype with their range."""
    kinds = {kind for kind, shape in tensors.values() if len(shape) == 2}
    if kinds == {"F16"}:
        return "float16"
    return "float32" if kinds == {"F32"} else "bfloat16"
