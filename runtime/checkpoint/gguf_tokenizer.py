"""Converts a GGUF file's vocabulary to `tokenizer.json`.

Byte-level BPE vocabularies with a known pre-tokenizer are supported. For a SentencePiece vocabulary a file does not say
where spaces go around special tokens, so no converted tokenizer can be known to be right.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from runahead.runtime.checkpoint.errors import CheckpointError
from runahead.runtime.checkpoint.gguf_config import Metadata
from runahead.runtime.checkpoint.refusals import AGAIN

_KEY: Final = "tokenizer.ggml."
# Values of `token_type`.
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_UNUSED: Final = 5
# Tokens' names in templates, and the keys of their ids.
_NAMED: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Pre-tokenizers of these models.
_BYTES: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2: Final = {**_BYTES, "use_regex": True}
_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _sequence(*parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_LLAMA3: Final = _sequence(_split(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"), _BYTES)
_CUTS: Final = {  # by `tokenizer.ggml.pre`
    "gpt-2": _GPT2,
    "smollm": _sequence({"type": "Digits", "individual_digits": True}, _GPT2),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _sequence(_split(rf"{_WORDS}|\p{{N}}|{_REST}"), _BYTES),
}
_COMPOSED: Final = frozenset({"qwen2"})  # normalize texts to NFC first
# A piece that is a token in the vocabulary is that token, regardless of merges; a text begins with the bos token.
_LLAMA3_NAMES: Final = frozenset({"llama-bpe", "llama3", "llama-v3"})


def tokenizer_of(path: Path, metadata: Metadata) -> dict[str, Any]:
    """Convert the vocabulary. Raises CheckpointError for an unsupported or invalid one."""
    cut = _cut(path, metadata)
    tokens, kinds, merges = (_list(path, metadata, key, kind) for key, kind in _LISTS.items())
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise CheckpointError(
            f"{path} has {len(tokens)} tokens, {len(set(tokens))} of them different, and {len(kinds)} kinds of tokens, "
            f"which must be as many; {AGAIN}"
        )
    if lost := next((merge for merge in merges if merge.count(" ") != 1), None):
        raise CheckpointError(f"{path} has a merge {lost!r}, which is not a pair of tokens; {AGAIN}")
    used = {token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(index, token, special=kinds[index] == _CONTROL)
            for token, index in used.items()
            if kinds[index] in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if cut in _COMPOSED else None,
        "pre_tokenizer": _CUTS[cut],
        "post_processor": _around(path, metadata, tokens, begins=cut in _LLAMA3_NAMES),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": cut in _LLAMA3_NAMES,
            "vocab": used,
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def template_tokens_of(metadata: Metadata) -> dict[str, str]:
    """Return special tokens' texts by the names in chat templates."""
    tokens = metadata.get(f"{_KEY}tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        return {}  # `tokenizer_of` refuses it
    ids = {name: metadata.get(f"{_KEY}{key}_token_id") for name, key in _NAMED.items()}
    return {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}


_LISTS: Final = {"tokens": str, "token_type": int, "merges": str}


def _cut(path: Path, metadata: Metadata) -> str:
    """Return the name of the pre-tokenizer."""
    model = metadata.get(f"{_KEY}model")
    if model != "gpt2":
        raise CheckpointError(
            f"{path} has tokenizer.ggml.model {model!r}; of GGUF files only 'gpt2', byte-level BPE, is supported: "
            "serve the model's checkpoint in the Hugging Face layout, which has tokenizer.json, for its text"
        )
    cut = metadata.get(f"{_KEY}pre")
    if cut not in tuple(_CUTS):
        raise CheckpointError(
            f"{path} has tokenizer.ggml.pre {cut!r}; supported are {', '.join(_CUTS)}: serve the model's checkpoint in "
            "the Hugging Face layout, which has tokenizer.json, for its text"
        )
    return str(cut)


def _list(path: Path, metadata: Metadata, key: str, kind: type) -> list[Any]:
    found = metadata.get(f"{_KEY}{key}")
    if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
        raise CheckpointError(f"{path} has no {_KEY}{key}, of which a tokenizer is made; {AGAIN}")
    return found


def _added(index: int, token: str, *, special: bool) -> dict[str, Any]:
    """Describe an added token, which is matched before anything else."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": token, **flags, "special": special}


def _around(path: Path, metadata: Metadata, tokens: list[str], *, begins: bool) -> dict[str, Any] | None:
    """Return the template around a text. begins: whether a token precedes it by default."""
    whole: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
    parts = [whole]
    named: dict[str, Any] = {}
    for key, name, default, index in (("add_bos_token", "bos", begins, 0), ("add_eos_token", "eos", False, 2)):
        if not metadata.get(f"{_KEY}{key}", default):
            continue
        token_id = metadata.get(f"{_KEY}{name}_token_id")
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise CheckpointError(
                f"{path} has {_KEY}{key} and {_KEY}{name}_token_id {token_id!r}, which is not a token"
            )
        token = tokens[token_id]
        named[token] = {"id": token, "ids": [token_id], "tokens": [token]}
        parts.insert(index, {"SpecialToken": {"id": token, "type_id": 0}})
    if not named:
        return None
    pair = [*parts, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": parts, "pair": pair, "special_tokens": named}
