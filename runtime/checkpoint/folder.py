"""A checkpoint folder in the Hugging Face layout: `config.json`, safetensors and `tokenizer.json`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from runahead.runtime.checkpoint.checkpoint import StoredTensor
from runahead.runtime.checkpoint.errors import CheckpointError
from runahead.runtime.checkpoint.quantized.find import dequantized, of_activations
from runahead.runtime.checkpoint.quantized.read_config import read_modelopt_file, read_quantization
from runahead.runtime.checkpoint.quantized.scheme import Quantization
from runahead.runtime.checkpoint.refusals import FETCH, of_missing_tokenizer, of_missing_weights, refuse_lfs_pointer
from runahead.runtime.checkpoint.safetensors_header import SafetensorsTensor, read_header, read_shards

CONFIG: Final = "config.json"
TEXT_CONFIG: Final = "text_config"  # of a multimodal model
MODELOPT_CONFIG: Final = "hf_quant_config.json"
GENERATION_CONFIG: Final = "generation_config.json"
WEIGHTS: Final = "model.safetensors"
WEIGHTS_INDEX: Final = "model.safetensors.index.json"  # maps tensors to files
TORCH_WEIGHTS: Final = "pytorch_model.bin"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
MORE_CHAT_TEMPLATES: Final = "additional_chat_templates"  # a folder of NAME.jinja
# Names that chat templates may use.
TEMPLATE_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

_MAX_TEXT_BYTES: Final = 16 << 20
_MAX_TOKENIZER_BYTES: Final = 256 << 20
_MOST_DEEP: Final = 64


@dataclass(frozen=True, slots=True)
class FolderCheckpoint:
    """A `Checkpoint` whose folder has `config.json`."""

    path: Path

    @property
    def has_tokenizer(self) -> bool:
        return (self.path / TOKENIZER).exists()

    @property
    def has_safetensors(self) -> bool:
        return (self.path / WEIGHTS).is_file()

    @property
    def torch_file(self) -> Path:
        """The weights that `torch.save` wrote, read for draft heads only."""
        return self.path / TORCH_WEIGHTS

    def config(self) -> Mapping[str, Any]:
        return _read_object(self.path / CONFIG)

    def generation_config(self) -> Mapping[str, Any]:
        path = self.path / GENERATION_CONFIG
        return _read_object(path) if path.is_file() else {}

    def quantization(self) -> Quantization | None:
        """Return the quantization of the model or its text part from `config.json`, or else from ModelOpt's file. None:
        not quantized. Raises CheckpointError for an unsupported method.
        """
        raw = self.config() if (self.path / CONFIG).is_file() else {}
        text = raw.get(TEXT_CONFIG)
        found = read_quantization(raw) or (read_quantization(text) if isinstance(text, dict) else None)
        if found is None and (self.path / MODELOPT_CONFIG).is_file():
            return read_modelopt_file(_read_object(self.path / MODELOPT_CONFIG))
        return found

    def tensors(self) -> Mapping[str, StoredTensor]:
        """Return tensors from the sharded index or `model.safetensors`. Quantized weights have their unquantized names
        and shapes.

        Raises CheckpointError for a missing file or shard, an unreadable header, a truncated tensor, an index that
        contradicts its shards, and inconsistent parts of quantized weights.
        """
        stored, quantization = self._tensors_in_files(), self.quantization()
        return stored if quantization is None else dequantized(stored, quantization)

    def kv_scales(self) -> Mapping[str, SafetensorsTensor]:
        """Return the scales of activations, keys and values, which `tensors` leaves out. Raises CheckpointError."""
        return {} if self.quantization() is None else of_activations(self._tensors_in_files())

    def _tensors_in_files(self) -> Mapping[str, SafetensorsTensor]:
        if (self.path / WEIGHTS_INDEX).is_file():
            return read_shards(self.path, WEIGHTS_INDEX)
        path = self.path / WEIGHTS
        if not path.is_file():
            raise of_missing_weights(self.path)
        return read_header(path)

    def tensor_in_file(self, name: str) -> str:
        return name

    def tokenizer(self) -> str:
        path = self.path / TOKENIZER
        if not path.is_file():
            raise of_missing_tokenizer(self.path)
        return _read_text(path, _MAX_TOKENIZER_BYTES)

    def chat_templates(self) -> Mapping[str, str]:
        """Return chat templates from their files, or from `tokenizer_config.json`."""
        files = {path.stem: path for path in sorted((self.path / MORE_CHAT_TEMPLATES).glob("*.jinja"))}
        if (own := self.path / CHAT_TEMPLATE).is_file():
            files["default"] = own
        if files:
            return {name: _read_text(path, _MAX_TEXT_BYTES) for name, path in files.items()}
        templates = self._tokenizer_config().get("chat_template")
        if not isinstance(templates, list):  # several, by name
            templates = [{"name": "default", "template": templates}]
        named = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
        return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}

    def template_tokens(self) -> Mapping[str, str]:
        """Return special tokens from `tokenizer_config.json`: texts, or objects with a content."""
        config = self._tokenizer_config()
        given = {name: config.get(name) for name in TEMPLATE_TOKENS}
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in given.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    def _tokenizer_config(self) -> Mapping[str, Any]:
        path = self.path / TOKENIZER_CONFIG
        return _read_object(path) if path.is_file() else {}


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError."""
    text = _read_text(path, _MAX_TEXT_BYTES)
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}; {FETCH}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object; {FETCH}")
    if _is_deep(raw):
        raise CheckpointError(f"{path} nests objects over {_MOST_DEEP} deep, which no such file of a model does")
    return raw


def _is_deep(raw: Any) -> bool:
    """Whether objects and lists are nested over `_MOST_DEEP` deep, which would exceed recursion limits."""
    level = [raw]
    for _ in range(_MOST_DEEP):
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = list(itertools.chain.from_iterable(inner))
    return any(isinstance(part, dict | list) for part in level)


def _read_text(path: Path, most: int) -> str:
    """Read a text of at most `most` bytes. Raises CheckpointError."""
    try:
        if path.stat().st_size > most:
            raise CheckpointError(f"{path} is over {most} bytes, which no such file of a model has")
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    refuse_lfs_pointer(path, content)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8; {FETCH}") from error
