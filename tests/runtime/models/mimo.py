"""MiMo for `transformers`, which does not know it: its body is Qwen2's to the last number."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM


class MiMoConfig(Qwen2Config):
    model_type = "mimo"

    def __init__(self, num_nextn_predict_layers: int = 0, **others: Any) -> None:
        self.num_nextn_predict_layers = num_nextn_predict_layers
        super().__init__(**others)


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig


MiMoForCausalLM._keys_to_ignore_on_load_unexpected = [r"model\.mtp_layers\."]
AutoConfig.register("mimo", MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)
