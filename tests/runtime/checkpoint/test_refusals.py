"""Whatever lies where a checkpoint should: the refusal names it and says what to do next."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runahead.runtime.checkpoint import CheckpointError, check_files, open_checkpoint
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.weights import check_weights
from tests.runtime.models.checkpoints import CASES, save

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1\n"
CONFIG = b'{"architectures": ["LlamaForCausalLM"]}'
HUB = "hf download ORG/NAME --local-dir"


def folder_with(place: Path, **files: bytes) -> Path:
    """Two underlines in a name stand for a dot."""
    for name, content in files.items():
        (place / name.replace("__", ".")).write_bytes(content)
    return place


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, f"is no checkpoint: it has no config.json; fetch it with `{HUB} FOLDER`"),
        ({"adapter_config__json": b"{}"}, 'is a LoRA adapter and no model: `python -c "from peft'),
        ({"one__gguf": b""}, "serve the file that is in it with `--model {}/one.gguf`"),
        (
            {"a__gguf": b"", "b__gguf": b""},
            "2 GGUF files; name the one to serve: `--model {}/a.gguf`, or b.gguf",
        ),
        ({"m-00001-of-00002__gguf": b"", "m-00002-of-00002__gguf": b""}, "`llama-gguf-split --merge"),
        ({"params__json": b"{}", "consolidated__00__pth": b""}, "it is in its maker's own layout; fetch it"),
        ({"config__json": POINTER}, "config.json is a Git LFS pointer and not the file itself: `git lfs pull` in {}"),
        ({"config__json": b"{"}, "config.json can't be read as JSON: Expecting property name"),
        (
            {"config__json": CONFIG},
            f"nor model.safetensors.index.json; fetch it with `{HUB}",
        ),
        (
            {"config__json": CONFIG, "pytorch_model__bin": b""},
            "pytorch_model.bin can't be served: such a file may run",
        ),
        ({"config__json": CONFIG, "m__pth": b""}, "T.from_pretrained('{}').save_pretrained('TO')"),
        ({"config__json": CONFIG, "adapter_config__json": b"{}"}, "but a LoRA adapter: `python -c"),
        ({"config__json": CONFIG, "one__gguf": b""}, "serve the file that is in it with `--model {}/one.gguf`"),
        ({"config__json": CONFIG, "model-00001-of-00002__safetensors": b""}, f"`{HUB[:-11]}--local-dir {{}}`"),
        ({"config__json": CONFIG, "model__safetensors": POINTER}, "model.safetensors is a Git LFS pointer"),
        ({"config__json": CONFIG, "model__safetensors": b"123"}, "its header is incomplete; fetch the file again"),
    ],
    ids=lambda value: " ".join(value).replace("__", ".") or "empty" if isinstance(value, dict) else "",
)
def test_a_folder_that_is_no_checkpoint_is_refused_with_what_to_do(
    files: dict[str, bytes], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(sentence.format(tmp_path))):
        check_files(folder_with(tmp_path, **files), has_weights=True)


@pytest.mark.parametrize(
    ("inner", "sentence"),
    [
        (["one"], "`--model {0}/one`"),
        (["two", "one"], "`--model {0}/one`, or {0}/two"),
        (["snapshots/0123"], "`--model {0}/snapshots/0123`"),  # what a download cache has of a repository
    ],
    ids=str,
)
def test_of_a_folder_of_checkpoints_each_is_named(inner: list[str], sentence: str, tmp_path: Path) -> None:
    for name in inner:
        (tmp_path / name).mkdir(parents=True)
        folder_with(tmp_path / name, config__json=CONFIG)
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(tmp_path)
    begin = f"{tmp_path} is no checkpoint: it has no config.json, but folders below it have; name the one to serve: "
    assert str(raised.value) == begin + sentence.format(tmp_path)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("model.safetensors", "alone is no checkpoint: give the folder that it is in, `--model {}`"),
        ("pytorch_model.bin", "may run code when it is read; `python -c"),
        ("notes.txt", "is no checkpoint: give a folder with config.json, or a .gguf file"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused_with_what_to_do(name: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=re.escape(sentence.format(tmp_path))):
        open_checkpoint(tmp_path / name)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not there: give a folder"):
        open_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "tokenizer.json is missing: a checkpoint needs its tokenizer beside it; `python -c"),
        ({"tokenizer__model": b""}, 'has tokenizer.model, which is another format; `python -c "from transformers'),
        ({"vocab__json": b"", "merges__txt": b""}, "has vocab.json and merges.txt, which is another format"),
        ({"tokenizer__json": POINTER}, "tokenizer.json is a Git LFS pointer and not the file itself: `git lfs pull`"),
    ],
    ids=lambda value: " ".join(value).replace("__", ".") or "none" if isinstance(value, dict) else "",
)
def test_a_tokenizer_of_another_kind_is_refused_with_what_to_do(
    files: dict[str, bytes], sentence: str, tmp_path: Path
) -> None:
    folder_with(tmp_path, config__json=CONFIG, **files)
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        open_checkpoint(tmp_path).tokenizer()


def checked(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    check_weights(checkpoint, load_config(checkpoint))


@pytest.mark.parametrize("quantised", [{"quant_method": "hqq", "bits": 4}, {"quant_method": "quark"}, "fp8"])
def test_a_quantised_checkpoint_is_refused_by_its_method_with_what_to_do(quantised: Any, tmp_path: Path) -> None:
    save(CASES[0], tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": quantised}))
    method = quantised["quant_method"] if isinstance(quantised, dict) else quantised
    with pytest.raises(CheckpointError, match=f"is '{method}'; .*: serve the checkpoint that it was made of.*GGUF"):
        checked(tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype", "sentence"),
    [
        (
            "model.layers.0.self_attn.q_proj.qweight",
            torch.int32,
            "LlamaForCausalLM does not know: it is part of a quantized weight, and quantization_config does not",
        ),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", torch.float32, "it is a LoRA adapter's; merge"),
        (
            "model.norm.weight",
            torch.float8_e4m3fn,
            "stored as F8_E4M3; supported are F32, .*where the model is",
        ),
    ],
)
def test_a_quantised_tensor_is_refused_by_its_name_with_what_to_do(
    name: str, dtype: torch.dtype, sentence: str, tmp_path: Path
) -> None:
    model = save(CASES[0], tmp_path)
    weights = {key: value.contiguous() for key, value in model.state_dict().items()}
    save_file({**weights, name: torch.zeros(64).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=sentence):
        checked(tmp_path)
