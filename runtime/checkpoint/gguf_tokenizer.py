"""A GGUF file's vocabulary as what `tokenizer.json` would hold.

Served are vocabularies of byte-level BPE whose way of cutting a text is known by name. Of a SentencePiece vocabulary a
file does not say where spaces are put around special tokens, so that no tokenizer made of it can be known to be right.
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
# What a template calls a token, and the key of its id.
_NAMED: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# How pieces are found in a text in which no token crosses their boundaries: as the tokenizers of these models have it.
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
_COMPOSED: Final = frozenset({"qwen2"})  # whose texts are in Unicode's composed form (NFC) first
# A piece that is a token as it stands is that token, whatever its merges say; and a text begins with the token for it.
_LLAMA3_NAMES: Final = frozenset({"llama-bpe", "llama3", "llama-v3"})


def tokenizer_of(path: Path, metadata: Metadata) -> dict[str, Any]:
    """Raises CheckpointError for a kind of vocabulary that is not supported, and one that makes no sense."""
    cut = _cut(path, metadata)
    tokens, kinds, merges = (_list(path, metadata, key, kind) for key, kind in _LISTS.items())
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise CheckpointError(
            f"{path} has {len(tokens)} tokens, {len(set(tokens))} of them different, and {len(kinds)} kinds of tokens, "
            f"which must be as many; {AGAIN}"
        )
    if lost := next((merge for merge in merges if merge.count(" ") != 1), None):
        raise CheckpointError(f"{path} has a merge {lost!r}, which is no pair of tokens; {AGAIN}")
    used = {token: place for place, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(place, token, special=kinds[place] == _CONTROL)
            for token, place in used.items()
            if kinds[place] in (_CONTROL, _USER_DEFINED)
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
    """Texts of special tokens by the names under which a chat template asks for them."""
    tokens = metadata.get(f"{_KEY}tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        return {}  # `tokenizer_of` refuses it
    ids = {name: metadata.get(f"{_KEY}{key}_token_id") for name, key in _NAMED.items()}
    return {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}


_LISTS: Final = {"tokens": str, "token_type": int, "merges": str}


def _cut(path: Path, metadata: Metadata) -> str:
    """The name of the way of cutting a text."""
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


def _added(place: int, token: str, *, special: bool) -> dict[str, Any]:
    """A token that is found in a text as it is written, before anything else."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": place, "content": token, **flags, "special": special}


def _around(path: Path, metadata: Metadata, tokens: list[str], *, begins: bool) -> dict[str, Any] | None:
    """What is put before and behind a text. begins: whether a token is put before it where the file does not say."""
    whole: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
    parts = [whole]
    named: dict[str, Any] = {}
    for key, name, default, place in (("add_bos_token", "bos", begins, 0), ("add_eos_token", "eos", False, 2)):
        if not metadata.get(f"{_KEY}{key}", default):
            continue
        token_id = metadata.get(f"{_KEY}{name}_token_id")
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise CheckpointError(f"{path} has {_KEY}{key} and {_KEY}{name}_token_id {token_id!r}, which is no token")
        token = tokens[token_id]
        named[token] = {"id": token, "ids": [token_id], "tokens": [token]}
        parts.insert(place, {"SpecialToken": {"id": token, "type_id": 0}})
    if not named:
        return None
    pair = [*parts, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": parts, "pair": pair, "special_tokens": named}
