"""Tokenizes and detokenizes, off the event loop, and refuses too long a text before it is tokenized."""

from __future__ import annotations

import asyncio
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from runahead.runtime.checkpoint import Checkpoint, CheckpointError
from runahead.runtime.grammar.spelling import CHARACTERS_OF_BYTES, is_byte_level
from runahead.runtime.rounding import ceil_div
from runahead.runtime.wire.engine_config import ConfigError
from runahead.runtime.wire.messages import EngineInfo
from runahead.service.contract.errors import Violation, invalid_argument
from runahead.service.text.bounded_tokenizer import BoundedTokenizer
from runahead.service.text.text import TokenBytes, token_bytes
from runahead.service.text.text_cuts import LONG, can_be_cut, cut_behind, is_quick
from runahead.service.workers.caller_turns import TurnPool

_COMPOSED: Final = 3  # bytes that canonical composition may reduce to one: a Hangul syllable, 9 to 3
_BYTE_NAMES: Final = tuple(f"<0x{byte:02X}>" for byte in range(256))
_KEEPING: Final = frozenset(
    {"ByteLevel", "Metaspace", "Digits", "Split"}
)  # kinds that only split, if they remove nothing

_LEVEL: Final = 1  # of compression

_THREADS: Final = 2
# Shorter texts are tokenized on the event loop in half a millisecond, as long as a handover takes. A tokenizer with an
# unknown regular expression may take seconds, so everything is handed over.
_INLINE_CHARACTERS: Final = 1024
_INLINE_IDS: Final = 4096
_LONG_IDS: Final = 1 << 16  # take about 10 ms to become text
_QUOTED: Final = 1000  # characters of the library's reasons that are passed on
_NO_IDS: Final = np.zeros(0, np.int32)

T = TypeVar("T")


def longest_token_bytes(description: Mapping[str, Any], table: TokenBytes) -> int | None:
    """Return the most UTF-8 bytes of text that one token stands for, None if unknown: for tokenizers that drop
    characters or merge any number of them.

    description: the text of `tokenizer.json`.
    """
    model, added = description["model"], description["added_tokens"]
    factor = _shrinks_by(description["normalizer"])
    if model["type"] != "BPE" or not factor or not _keeps_all(description["pre_tokenizer"]):
        return None
    # Without these some characters have no token.
    alphabet = _BYTE_NAMES if model.get("byte_fallback") else CHARACTERS_OF_BYTES
    if not model["vocab"].keys() >= set(alphabet) or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    longest = max((len(token["content"].encode()) for token in added), default=1)
    return factor * max(longest, table.longest[0])


def check_can_fit(text: str, longest_token: int | None, info: EngineInfo, field: str = "text") -> None:
    """Check that a text may fit the context. Raises ServiceError (INVALID_ARGUMENT).

    longest_token: see `longest_token_bytes`. field: the text's path.
    """
    if longest_token is None:
        return
    size, longest_prompt = len(text.encode()), info.context_length - 1
    least = ceil_div(size, longest_token)
    if least > longest_prompt:
        sentence = (
            f"{field} has {size} bytes, which are at least {least} tokens, and the context of {info.context_length} "
            f"leaves room for a prompt of {longest_prompt}"
        )
        raise invalid_argument([Violation(field, sentence)])


def _shrinks_by(normalizer: Mapping[str, Any] | None) -> int:
    """Return the most bytes that the normalizer reduces to one, 0 if unknown."""
    match normalizer:
        case None | {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
            return 1  # it replaces a space by more bytes, which the token table maps back to a space
        case {"type": "NFC"}:
            return _COMPOSED
        case {"type": "Sequence", "normalizers": list(parts)}:
            factor = 1
            for part in parts:
                factor *= _shrinks_by(part)
            return factor
    return 0


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(map(_keeps_all, pre_tokenizer["pretokenizers"]))
    return pre_tokenizer["type"] in _KEEPING and pre_tokenizer.get("behavior") != "Removed"


def archive_of(description: str, chat_template: str | None, template_tokens: Mapping[str, str]) -> bytes:
    """Make the archive's bytes, a function of the arguments only.

    description: the text of `tokenizer.json`. chat_template, template_tokens: of `TextTokenizer`, for
    `tokenizer_config.json`.
    """
    config = {**template_tokens} | ({} if chat_template is None else {"chat_template": chat_template})
    files = {
        "tokenizer.json": description,
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, sort_keys=True),
    }
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name)  # with a fixed date
            archive.writestr(entry, text, zipfile.ZIP_DEFLATED, _LEVEL)
    return made.getvalue()


class TextTokenizer:
    """A checkpoint's tokenizer, for use on one event loop.

    special_tokens: texts by id. chat_templates: by name. template_tokens: special tokens' texts by the names in chat
    templates. longest_token_bytes: most text bytes of one token, None if unknown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_templates: Mapping[str, str] | None = None,
        template_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare the tokenizer. Raises ConfigError for an unsupported kind of decoder."""
        self._tokenizer = tokenizer
        self._pool = TurnPool(_THREADS, "tokenize")
        self.chat_templates = dict(chat_templates or {})
        self.template_tokens = dict(template_tokens or {})
        added = tokenizer.get_added_tokens_decoder()
        self.special_tokens = {at: token.content for at, token in sorted(added.items()) if token.special}
        description = json.loads(tokenizer.to_str())
        self.token_bytes: TokenBytes = token_bytes(tokenizer, self.special_tokens.keys(), description)
        self.longest_token_bytes = longest_token_bytes(description, self.token_bytes)
        # A byte-level decoder would take an added token's accented letter for a byte. The table does not.
        has_accents = any(not token.content.isascii() for token in added.values())
        self._decodes_by_table = has_accents and is_byte_level(description["decoder"])
        self._is_quick = is_quick(description)
        self._bounded = None if self._is_quick else BoundedTokenizer(tokenizer.to_str())
        self._around = self._special_tokens_around() if can_be_cut(description) else None

    def encodes_at_once(self, text: str) -> bool:
        """Whether `encode` returns without waiting."""
        return self._is_quick and len(text) <= _INLINE_CHARACTERS

    async def encode(self, text: str, add_special_tokens: bool = True, caller: int = 0) -> NDArray[np.int32]:
        """Tokenize to int32 [n]. Long texts run on other threads, in pieces if that changes no token.

        caller: callers take turns. Cancellation takes effect after the current piece.
        """
        if self.encodes_at_once(text):
            return self._encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        if self._around is None:
            whole = _OneTurn(lambda: self._encode_beside(loop, text, add_special_tokens), is_long=len(text) > LONG)
            await self._pool.do(caller, whole)
            return whole.made
        cut = _CutText(text, lambda piece: self._encode_beside(loop, piece, False))
        await self._pool.do(caller, cut)
        before, behind = self._around if add_special_tokens else (_NO_IDS, _NO_IDS)
        return np.concatenate([before, *cut.parts, behind])

    async def decode(self, ids: Sequence[int], include_special_tokens: bool = False, caller: int = 0) -> str:
        """Return the text of a whole sequence, as the tokenizer defines it. caller: see `encode`."""
        if self._is_quick and len(ids) <= _INLINE_IDS:
            return self._decode(ids, include_special_tokens)
        loop = asyncio.get_running_loop()
        decoding = _OneTurn(
            lambda: self._decode_beside(loop, ids, include_special_tokens), is_long=len(ids) > _LONG_IDS
        )
        await self._pool.do(caller, decoding)
        return decoding.made

    def archive(self) -> bytes:
        """Return `tokenizer.json` and `tokenizer_config.json` as a zip archive.

        Holds the GIL for about a second with 150,000 tokens: call it before serving.
        """
        return archive_of(self._tokenizer.to_str(), self.chat_templates.get("default"), self.template_tokens)

    @property
    def waiting(self) -> int:
        """Waiting texts and sequences."""
        return self._pool.waiting

    async def close(self) -> None:
        """End the threads and processes."""
        self._pool.close()
        if self._bounded is not None:
            await self._bounded.close()

    def _encode_beside(self, loop: asyncio.AbstractEventLoop, text: str, add_special_tokens: bool) -> NDArray[np.int32]:
        """Tokenize on another thread than the event loop's: here, or in a process."""
        if self._bounded is None:
            return self._encode(text, add_special_tokens)
        asked = asyncio.run_coroutine_threadsafe(self._bounded.encode(text, add_special_tokens), loop)
        return np.asarray(asked.result(), np.int32)

    def _encode(self, text: str, add_special_tokens: bool) -> NDArray[np.int32]:
        # The batch call releases the GIL, unlike the single one.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return np.asarray(encoding.ids, np.int32)

    def _special_tokens_around(self) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
        """Return the tokens before and after any text, measured around a letter: int32 [n] each. None if the tokenizer
        does anything else.
        """
        bare, dressed = self._encode("a", False), self._encode("a", True)
        for index in range(len(dressed) - len(bare) + 1):
            if np.array_equal(dressed[index : index + len(bare)], bare):
                return dressed[:index], dressed[index + len(bare) :]
        return None

    def _decode_beside(self, loop: asyncio.AbstractEventLoop, ids: Sequence[int], include_special_tokens: bool) -> str:
        """Detokenize like `_encode_beside`."""
        if self._bounded is None or self._decodes_by_table:
            return self._decode(ids, include_special_tokens)
        return asyncio.run_coroutine_threadsafe(self._bounded.decode(tuple(ids), include_special_tokens), loop).result()

    def _decode(self, ids: Sequence[int], include_special_tokens: bool) -> str:
        if self._decodes_by_table:
            return self.token_bytes.text(ids, include_special=include_special_tokens)
        (text,) = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=not include_special_tokens)
        return str(text)


class _OneTurn(Generic[T]):
    """Work that can't be split. made: its result."""

    made: T

    def __init__(self, make: Callable[[], T], *, is_long: bool) -> None:
        self.is_long = is_long
        self._make = make

    def turn(self) -> bool:
        self.made = self._make()
        return True


class _CutText:
    """Work split into pieces, of which `encode` makes int32 [n] without special tokens.

    parts: results in order.
    """

    def __init__(self, text: str, encode: Callable[[str], NDArray[np.int32]]) -> None:
        self.parts: list[NDArray[np.int32]] = []
        self._text = text
        self._encode = encode
        self._begin_piece(0)

    @property
    def is_long(self) -> bool:
        return self._end is None

    def turn(self) -> bool:
        end = cut_behind(self._text, self._start, len(self._text)) if self._end is None else self._end
        self.parts.append(self._encode(self._text[self._start : end]))
        if end is None or end == len(self._text):
            return True
        self._begin_piece(end)
        return False

    def _begin_piece(self, start: int) -> None:
        """Begin a piece. Its end is found later, in its turn, if no cut is near."""
        self._start = start
        self._end = cut_behind(self._text, start, LONG)


def load_tokenizer(checkpoint: Checkpoint, chat_template: str | None = None) -> TextTokenizer:
    """Load a checkpoint's tokenizer. chat_template: replaces its templates.

    Raises ConfigError for a missing, unreadable or unsupported file, with the setting that serves the checkpoint
    without a tokenizer.
    """
    try:
        return _load(checkpoint, chat_template)
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"{error}; --tokenizer none serves it for token ids only") from error


def _load(checkpoint: Checkpoint, chat_template: str | None) -> TextTokenizer:
    try:
        tokenizer = Tokenizer.from_str(checkpoint.tokenizer())
    except CheckpointError:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises BaseException and panics
        raise ConfigError(f"the tokenizer of {checkpoint.path} is not readable: {str(error)[:_QUOTED]}") from error
    # A tokenizer may be saved with truncation or padding, either of which would silently change prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    templates = checkpoint.chat_templates() if chat_template is None else {"default": chat_template}
    return TextTokenizer(tokenizer, templates, checkpoint.template_tokens())
