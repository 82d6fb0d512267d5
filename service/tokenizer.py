"""Text to token ids, and token ids to bytes, with the tokenizer of a checkpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from runahead.runtime.checkpoint import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.token_bytes import TokenBytes, token_bytes

_INLINE_BYTES: Final = 4096  # a shorter text is tokenized on the event loop: about 4 ms at most
_MAX_CONFIG_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class SpecialTokenText:
    """A special token: its id, and how it is written in a text."""

    token_id: int
    content: str


class TextTokenizer:
    """The tokenizer of a checkpoint folder. Safe to use from the event loop and from its own threads."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None = None) -> None:
        """Raises ConfigError for a kind of decoder that is not supported."""
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self.chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder()
        self.special_tokens = tuple(
            SpecialTokenText(token_id, token.content) for token_id, token in sorted(added.items()) if token.special
        )
        self.token_bytes: TokenBytes = token_bytes(tokenizer, {special.token_id for special in self.special_tokens})

    async def encode(self, text: str, add_special_tokens: bool = True) -> NDArray[np.int32]:
        """int32 [n]. A long text is tokenized beside the event loop, which goes on."""
        if len(text) <= _INLINE_BYTES:
            return self._encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode, text, add_special_tokens)

    async def decode(self, ids: Sequence[int], include_special_tokens: bool = False) -> str:
        """The text of a whole sequence, as the tokenizer itself defines it."""
        if len(ids) <= _INLINE_BYTES:
            return self._decode(ids, include_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._decode, ids, include_special_tokens)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, add_special_tokens: bool) -> NDArray[np.int32]:
        # The batch call, unlike the single one, lets other threads run.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return np.asarray(encoding.ids, np.int32)

    def _decode(self, ids: Sequence[int], include_special_tokens: bool) -> str:
        (text,) = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=not include_special_tokens)
        return str(text)


def load_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer of a checkpoint.

    Raises ConfigError naming the file that is missing, unreadable or of a kind that is not supported, and the setting
    by which the checkpoint is served nevertheless.
    """
    try:
        return _load(folder)
    except ConfigError as error:
        raise ConfigError(f"{error}; with --tokenizer none it is served to those who send token ids") from error


def _load(folder: Path) -> TextTokenizer:
    path = folder / TOKENIZER
    if not path.is_file():
        raise ConfigError(f"{path} is missing: a checkpoint needs its tokenizer beside it")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path} is not a readable tokenizer: {error}") from error
    # A tokenizer may be saved with truncation or padding switched on; either would change prompts silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextTokenizer(tokenizer, _chat_template(folder))


def _chat_template(folder: Path) -> str | None:
    """The default chat template as text: from its own file, or from tokenizer_config.json."""
    own = folder / CHAT_TEMPLATE
    if own.is_file():
        return _read_text(own)
    path = folder / TOKENIZER_CONFIG
    if not path.is_file():
        return None
    try:
        config: Any = json.loads(_read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    template = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_text(path: Path) -> str:
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} is over {_MAX_CONFIG_BYTES} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8") from error
