"""Small Llama models as GGUF files, written with the `gguf` package from models that transformers makes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from runahead.runtime.grammar.spelling import CHARACTERS_OF_BYTES

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARK: Final = "<mark>"  # a token that is added, and not special
MERGES: Final = ("Ġ t", "h e", "Ġt he", "i n", "1 2", "Ġ i", "Ġi n")
TOKENS: Final = (
    *SPECIAL,
    *sorted(CHARACTERS_OF_BYTES),
    *("".join(merge.split()) for merge in MERGES),
    MARK,
)
TEMPLATE: Final = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": len(TOKENS) + 5,  # rows that have no token
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # logits far enough apart for greedy tokens to mean something
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
_NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A model of random weights. changes: of SHAPE."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.normal_(mean=1.0, std=0.2)
    return model.eval()


def metadata_of(config: Any) -> dict[str, Any]:
    """Keys and values that describe a model and its tokenizer."""
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL) - 1)
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": [int(kind) for kind in (*kinds, gguf.TokenType.USER_DEFINED)],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.chat_template.tool_use": TEMPLATE,
    }


def write(
    path: Path,
    model: LlamaForCausalLM,
    kinds: Mapping[str, Kind] | Kind = Kind.F32,
    changes: Mapping[str, Any] | None = None,
    more: Mapping[str, NDArray[Any]] | None = None,
    architecture: str = "llama",
) -> Path:
    """Writes the model. kinds: how matrices are stored, by what GGUF calls them without the layer, or all alike.
    changes: of the metadata; None leaves a key out. more: tensors beside the model's. Returns the path."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**metadata_of(config), **(changes or {})}.items():
        _put(writer, key, value)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own, short = _own_name(name)
        numbers = _as_stored(name, parameter.float().numpy(), config)
        kind = Kind.F32 if numbers.ndim == 1 else kinds if isinstance(kinds, Kind) else kinds.get(short, Kind.F32)
        _add(writer, own, numbers, kind)
    for name, tensor in (more or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, numbers: NDArray[np.float32], kind: Kind) -> None:
    stored = gguf.quants.quantize(numbers, kind)
    writer.add_tensor(name, stored, raw_dtype=None if kind in (Kind.F32, Kind.F16) else kind)


def _put(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)


def _own_name(name: str) -> tuple[str, str]:
    """What GGUF calls a tensor, and the same without its layer and without `weight` or `bias`."""
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}", _NAMES[stem]
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}", _NAMES[part]


def _as_stored(name: str, numbers: NDArray[np.float32], config: LlamaConfig) -> NDArray[np.float32]:
    """Rows of queries and keys in the file's order: the two that are rotated together lie beside each other."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return numbers
    halves = numbers.reshape(heads, 2, numbers.shape[0] // heads // 2, *numbers.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(numbers.shape))
