"""The models that are measured: shapes of known ones with random weights, written as a checkpoint of a config.json."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.models.config import ModelConfig
from runahead.runtime.models.read_config import load_config
from runahead.runtime.rounding import ceil_div


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths in tokens. A step is what `long` tokens of a batch take, less what `short` tokens take, over the rest.

    prompt: of every row. context: the longest request that the engine is told of. lengths: prompts of the table of
    lengths. ragged: the shortest and the longest prompt of its batch of many lengths. first: prompts of the table of
    first tokens, and beside: the rows that decode meanwhile. together: how many prompts come at once beside them, of
    how many tokens each.
    """

    prompt: int
    short: int
    long: int
    context: int
    lengths: tuple[int, ...]
    ragged: tuple[int, int]
    first: tuple[int, ...] = ()
    beside: int = 0
    together: tuple[int, int] = (0, 0)

    @property
    def steps(self) -> int:
        return self.long - self.short

    @property
    def chained(self) -> int:
        """Tokens of a row where bare graphs are measured: the first to begin are not to end before the last step."""
        return self.long + 32

    @property
    def generated(self) -> float:
        """Tokens that a row has generated at the middle of the steps that are measured."""
        return (self.short + self.long) / 2

    @property
    def longest(self) -> int:
        """Tokens that a request of the table of lengths may hold, in blocks of any size up to 256."""
        return 256 * ceil_div(max(*self.lengths, self.ragged[1]) + self.long + 1, 256)


FULL: Final = Workload(512, 32, 288, 4096, (4096, 16384), (128, 8192), (128, 512, 2048, 8192, 32768), 32, (4, 8192))
SMALL: Final = Workload(
    24, 4, 20, 128, (40, 90), (8, 70), (16, 300), 3, (2, 300)
)  # for trying the benchmark itself, on the CPU too


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder. batches: rows that decode together, ascending. keys: of config.json."""

    name: str
    batches: tuple[int, ...]
    keys: Mapping[str, Any]
    workload: Workload = FULL

    def write(self, folder: Path) -> ModelConfig:
        """A checkpoint without tensors, for `load_format` dummy. Returns what the product reads in it."""
        (folder / "config.json").write_text(json.dumps(dict(self.keys)), encoding="utf-8")
        return load_config(open_checkpoint(folder))

    def described(self) -> ModelConfig:
        """What the product reads in the checkpoint."""
        with tempfile.TemporaryDirectory(prefix="runahead-") as folder:
            return self.write(Path(folder))


def _keys(
    architecture: str,
    model_type: str,
    *,
    hidden: int,
    layers: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    tied: bool,
    positions: int = 32768,
) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
        "bos_token_id": 1,
    }
    return keys if model_type == "nemotron_h" else keys | {"hidden_act": "silu"}  # which calls it otherwise


_QWEN3: Final = ("Qwen3ForCausalLM", "qwen3")
_LLAMA: Final = ("LlamaForCausalLM", "llama")
_QWEN3_MOE: Final = ("Qwen3MoeForCausalLM", "qwen3_moe")


_GRANITE_HYBRID: Final = ("GraniteMoeHybridForCausalLM", "granitemoehybrid")
_BAMBA: Final = ("BambaForCausalLM", "bamba")
_QWEN3_NEXT: Final = ("Qwen3NextForCausalLM", "qwen3_next")
_NEMOTRON_H: Final = ("NemotronHForCausalLM", "nemotron_h")


def _mamba2(heads: int, head_dim: int, state: int) -> dict[str, Any]:
    """Keys of Mamba-2 layers with one group, whose heads are twice as wide together as the residual."""
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_d_state": state,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }


def _halves(pattern: str, heads: int, head_dim: int, state: int, groups: int) -> dict[str, Any]:
    """Keys of a Nemotron-H, whose layers are one thing each: M is Mamba-2, * attention, - a feed-forward without a
    gate."""
    return {
        "hybrid_override_pattern": pattern,
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "ssm_state_size": state,
        "n_groups": groups,
        "conv_kernel": 4,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
    }


def _hybrid_experts(count: int, chosen: int, shared: int, attention: tuple[int, ...], layers: int) -> dict[str, Any]:
    """Keys of a Granite 4.0 hybrid: experts beside one that every token gets, attention in these layers."""
    return {
        "num_local_experts": count,
        "num_experts_per_tok": chosen,
        "shared_intermediate_size": shared,
        "layer_types": ["attention" if layer in attention else "mamba" for layer in range(layers)],
        "position_embedding_type": "nope",
    }


def _experts(count: int, chosen: int, width: int) -> dict[str, Any]:
    """Keys of a Qwen3 whose layers have so many experts of that width, of which a token chooses some."""
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
    }


SHAPES: Final = {
    shape.name: shape
    for shape in (
        Shape(
            "0.6B",
            (1, 8, 64),
            _keys(
                *_QWEN3, hidden=1024, layers=28, ffn=3072, heads=16, kv_heads=8, head_dim=128, vocab=151936, tied=True
            ),
        ),
        Shape(
            "1B",
            (1, 8, 64),
            _keys(
                *_LLAMA, hidden=2048, layers=16, ffn=8192, heads=32, kv_heads=8, head_dim=64, vocab=128256, tied=True
            ),
        ),
        Shape(
            "8B",
            (1, 8, 64, 256),
            _keys(
                *_LLAMA, hidden=4096, layers=32, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256, tied=False
            ),
        ),
        Shape(
            "30B-A3B",
            (1, 8, 64),
            _keys(
                *_QWEN3_MOE,
                hidden=2048,
                layers=48,
                ffn=6144,
                heads=32,
                kv_heads=4,
                head_dim=128,
                vocab=151936,
                tied=False,
            )
            | _experts(128, 8, 768),
        ),
        Shape(
            "7B-A1B",  # Granite 4.0 H Tiny
            (1, 8, 64),
            _keys(
                *_GRANITE_HYBRID,
                hidden=1536,
                layers=40,
                ffn=512,
                heads=12,
                kv_heads=4,
                head_dim=128,
                vocab=100352,
                tied=True,
            )
            | _mamba2(48, 64, 128)
            | _hybrid_experts(64, 6, 1024, (5, 15, 25, 35), 40),
        ),
        Shape(
            "8B-hybrid",  # Nemotron-H 8B
            (1, 8, 64),
            _keys(
                *_NEMOTRON_H,
                hidden=4096,
                layers=52,
                ffn=21504,
                heads=32,
                kv_heads=8,
                head_dim=128,
                vocab=131072,
                tied=False,
            )
            | _halves("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 128, 64, 128, 8),
        ),
        Shape(
            "9B-hybrid",  # Bamba 9B
            (1, 8, 64),
            _keys(
                *_BAMBA,
                hidden=4096,
                layers=32,
                ffn=14336,
                heads=32,
                kv_heads=8,
                head_dim=128,
                vocab=128256,
                tied=False,
            )
            | _mamba2(128, 64, 128)
            | {"attn_layer_indices": [9, 18, 27]},
        ),
        Shape(
            "40B-A3B-delta",  # half the layers of Qwen3-Next 80B-A3B, so that one GPU holds it
            (1, 8, 64),
            _keys(
                *_QWEN3_NEXT,
                hidden=2048,
                layers=24,
                ffn=5120,
                heads=16,
                kv_heads=2,
                head_dim=256,
                vocab=151936,
                tied=False,
            )
            | _experts(512, 10, 512)
            | {
                "shared_expert_intermediate_size": 512,
                "full_attention_interval": 4,
                "linear_num_key_heads": 16,
                "linear_key_head_dim": 128,
                "linear_num_value_heads": 32,
                "linear_value_head_dim": 128,
            },
        ),
        Shape(
            "tiny-hybrid",
            (1, 4),
            _keys(
                *_GRANITE_HYBRID,
                hidden=64,
                layers=3,
                ffn=64,
                heads=4,
                kv_heads=2,
                head_dim=16,
                vocab=160,
                tied=True,
                positions=512,
            )
            | _mamba2(4, 32, 16)
            | _hybrid_experts(8, 2, 64, (1,), 3),
            SMALL,
        ),
        Shape(
            "tiny-halves",
            (1, 4),
            _keys(
                *_NEMOTRON_H,
                hidden=64,
                layers=4,
                ffn=96,
                heads=4,
                kv_heads=2,
                head_dim=16,
                vocab=160,
                tied=False,
                positions=512,
            )
            | _halves("M-*-", 4, 32, 16, 2),
            SMALL,
        ),
        Shape(
            "tiny-experts",
            (1, 4),
            _keys(
                *_QWEN3_MOE,
                hidden=64,
                layers=2,
                ffn=96,
                heads=4,
                kv_heads=2,
                head_dim=16,
                vocab=160,
                tied=True,
                positions=512,
            )
            | _experts(8, 2, 64),
            SMALL,
        ),
        Shape(
            "tiny",
            (1, 4),
            _keys(
                *_QWEN3,
                hidden=64,
                layers=2,
                ffn=96,
                heads=4,
                kv_heads=2,
                head_dim=16,
                vocab=160,
                tied=True,
                positions=512,
            ),
            SMALL,
        ),
    )
}
