"""Models with recurrent states for cells of the matrix: the bundled hybrid, which has experts, and small random ones,
one with a head, with the bundled model's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file, save_file
from transformers import BambaConfig, Qwen3_5MoeTextConfig, Qwen3NextConfig

from runahead.runtime import models
from tests.parity.workload import VOCAB
from tests.runtime.models.checkpoints import BAMBA, IDS, QWEN3_NEXT, Case, save
from tests.runtime.models.qwen_heads import IN_TILES, save_foreseen_qwen

_BUNDLED: Final = Path(models.__path__[0]) / "bundled"
BUNDLED_HYBRID: Final = _BUNDLED / "hybrid"
_SIZES: Final[dict[str, Any]] = {**IDS, "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64}
# End tokens whose logits lie further from zero than others', so that a draw meets one soon.
_ENDS: Final = tuple(range(300, 310))
_FURTHER: Final = 3.0
TRAINED: Final = "bundled hybrid"
HEADED: Final = "gated-delta-net-with-head"
HEADED_IN_TILES: Final = f"{HEADED}-in-tiles"  # of sizes that divide into tiles
HEADED_QWEN3_5: Final = f"{HEADED_IN_TILES}-of-qwen3.5"
_IN_TILES: Final = {**IN_TILES.changes, "vocab_size": VOCAB, "max_position_embeddings": 1024}
FAMILIES: Final = {
    "mamba-2": Case("mamba-2", BambaConfig, {**_SIZES, **BAMBA}),
    "gated-delta-net": Case("gated-delta-net", Qwen3NextConfig, {**_SIZES, **QWEN3_NEXT}),
    HEADED: Case(HEADED, Qwen3NextConfig, {**_SIZES, **QWEN3_NEXT, "max_position_embeddings": 1024}),
    HEADED_IN_TILES: Case(HEADED_IN_TILES, Qwen3NextConfig, _IN_TILES),
    HEADED_QWEN3_5: Case(HEADED_QWEN3_5, Qwen3_5MoeTextConfig, _IN_TILES),
}
_NOISE: Final = 0.12  # its head is right at times


def checkpoint_of(family: str, folder: Path) -> Path:
    """A checkpoint of this family that a service can be started with: the bundled one, or one made in the folder."""
    if family == TRAINED:
        return BUNDLED_HYBRID
    if family.startswith(HEADED):
        save_foreseen_qwen(folder, case=FAMILIES[family], noise=_NOISE)
    else:
        save(FAMILIES[family], folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_BUNDLED / name, folder / name)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(_ENDS)}))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][list(_ENDS)] *= _FURTHER
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
