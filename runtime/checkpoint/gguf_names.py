"""What GGUF calls the tensors of decoders like Llama, and what the Hugging Face layout calls them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

ROPE_FACTORS: Final = "rope_freqs.weight"  # by which rotary frequencies are divided: a part of the configuration

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
    """The name in the Hugging Face layout of a tensor that GGUF calls so; a name that is not known stays as it is."""
    stem, _, kind = own.rpartition(".")
    if stem in _ENDS:
        return f"{_ENDS[stem]}.{kind}"
    found = _LAYER.fullmatch(own)
    if found is None or found[2] not in _OF_LAYER:
        return own
    return f"model.layers.{found[1]}.{_OF_LAYER[found[2]]}.{found[3]}"


def permuted_heads(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Heads of the projections whose rows lie in another order in the file, by the projection's name."""
    heads = metadata.get("llama.attention.head_count")
    kv_heads = metadata.get("llama.attention.head_count_kv", heads)
    found = {"q_proj": heads, "k_proj": kv_heads}
    return {name: count for name, count in found.items() if isinstance(count, int) and count > 0}
