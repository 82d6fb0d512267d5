"""The bundled model with experts in the place of its feed-forwards: a checkpoint that goes on and ends as it does.

Every expert is the feed-forward that was there, and a little noise of its own; routers are random ("sparse upcycling",
Komatsuzaki and others, 2022, arXiv:2212.05055, before any training).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

from tests.project.repository import ROOT

BUNDLED: Final = ROOT / "runtime" / "models" / "bundled"
EXPERTS: Final = 5
CHOSEN: Final = 2
_NOISE: Final = 0.1  # of an expert, in parts of what its weights are
_NAMES: Final = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # as Mixtral calls them


def upcycled(folder: Path) -> Path:
    """A Mixtral in the folder, which has to be there."""
    draw = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(BUNDLED / "model.safetensors").items():
        layer, dot, rest = name.partition(".mlp.")
        if not dot:
            tensors[name] = tensor
            continue
        projection = rest.removesuffix(".weight")
        for expert in range(EXPERTS):
            noise = torch.randn(tensor.shape, generator=draw) * (_NOISE * float(tensor.float().std()))
            key = f"{layer}.block_sparse_moe.experts.{expert}.{_NAMES[projection]}.weight"
            tensors[key] = (tensor.float() + noise).to(tensor.dtype)
        if projection == "gate_proj":
            router = torch.randn(EXPERTS, tensor.shape[1], generator=draw) * tensor.shape[1] ** -0.5
            tensors[f"{layer}.block_sparse_moe.gate.weight"] = router.to(tensor.dtype)
    keys = json.loads((BUNDLED / "config.json").read_text(encoding="utf-8"))
    del keys["attention_bias"], keys["mlp_bias"]
    keys |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "sliding_window": None,
    }
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)
    return folder
