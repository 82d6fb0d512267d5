"""What is known of a model from its `config.json`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    kind: default, linear or llama3. factor: linear and llama3. The other three: llama3 alone.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What `config.json` says of a dense decoder. What an architecture always has or never has, its file says.

    windows: by layer, how many tokens a token attends to; 0 is all before it.
    attention_bias, mlp_bias: where the architecture leaves it to the file.
    eos_token_ids: of config.json and generation_config.json together, ascending.
    dtype: the dtype the checkpoint says it is in.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    windows: tuple[int, ...]
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: torch.dtype
