"""Checks of front ends' messages beyond the types of their fields.

A message that breaks these rules could corrupt a row or stop the engine. It ends only its connection. Columns, which
may be as long as the prompt, are checked by a few array operations. Lists are checked entry by entry;
`runahead.runtime.wire.messages` and `runahead.runtime.wire.parameters` bound their lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.rounding import ceil_div
from runahead.runtime.scheduler.new_row import eos_and_stop_ids
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.frames import MAX_FRAME_BYTES, ProtocolError
from runahead.runtime.wire.parameters import (
    MAX_ABORT_IDS,
    MAX_BIAS,
    MAX_STOP_IDS,
    MAX_STRUCTURE,
    MAX_TEXT,
    FinishReason,
    StoppingParams,
)
from runahead.runtime.wire.prompts import KEY_BYTES

_NONE: Final[Mapping[int, int]] = MappingProxyType({})
_CANCELLED = (FinishReason.STOP, FinishReason.CANCELLED)
_NUMBER_BYTES = 9  # most bytes of a number in MessagePack
_CHARACTER_BYTES = 4


def frame_bound(info: m.EngineInfo) -> int:
    """Return the most bytes of a front end's frame: the largest message and a margin, so that a prompt that is slightly
    too long is refused with its specific message."""
    lists = MAX_BIAS * 2 * _NUMBER_BYTES + MAX_ABORT_IDS * (MAX_TEXT * _CHARACTER_BYTES + _NUMBER_BYTES)
    columns = info.context_length * (4 + 4) + info.context_length // info.block_size * KEY_BYTES + info.vocab_size // 8
    grammar = MAX_STRUCTURE * _CHARACTER_BYTES if info.structures else 0
    return min(MAX_FRAME_BYTES, columns + lists + grammar + (1 << 16))


def check_message(
    message: m.ToEngine, info: m.EngineInfo, last_handle: int, announced: Mapping[int, int] = _NONE
) -> None:
    """Raise ProtocolError, with a message that names the mistake and repeats nothing of a prompt, if a message is
    invalid.

    last_handle: the newest on the connection. announced: n by handle, of requests announced on it.
    """
    if isinstance(message, m.Submit | m.Announce):
        _check_handle(message, last_handle, announced)
    if isinstance(message, m.Submit):
        _check_prompt(message, info)
        sampling, stopping = message.sampling, message.stopping
        if sampling.bias_ids or sampling.bias_values or stopping.stop_token_ids:
            _check_ids(message, info)
        if sampling.allowed_mask:
            _check_mask(sampling.allowed_mask, info.vocab_size, info.sampled_vocab or info.vocab_size)
        if message.structure:
            _check_structure(stopping, info)
        if stopping.min_tokens > stopping.max_tokens:
            raise ProtocolError(f"a Submit has min_tokens {stopping.min_tokens} over its {stopping.max_tokens}")
    elif isinstance(message, m.Cancel) and message.reason not in _CANCELLED:
        raise ProtocolError(f"a Cancel has the reason {message.reason.name}, which is the engine's to give")


def _check_handle(message: m.Submit | m.Announce, last_handle: int, announced: Mapping[int, int]) -> None:
    """Check that a handle is new, or is the announced one that the message submits."""
    kind = type(message).__name__
    if isinstance(message, m.Submit) and message.announced:
        if message.handle not in announced:
            raise ProtocolError(f"a Submit has handle {message.handle}, as if it had been announced")
        if message.n != announced[message.handle]:
            raise ProtocolError(f"a Submit has {message.n} completions, and {announced[message.handle]} were announced")
    elif message.handle <= last_handle:
        article = "an" if kind == "Announce" else "a"
        raise ProtocolError(f"{article} {kind} has handle {message.handle}, and {last_handle} was there before")
    if message.handle > m.MAX_HANDLE - message.n + 1:
        raise ProtocolError(f"there are no handles for {message.n} completions from {message.handle} on")
    if isinstance(message, m.Announce) and len(announced) >= m.MAX_ANNOUNCED:
        raise ProtocolError(f"a front end has announced more than {m.MAX_ANNOUNCED} requests at once")


def _check_prompt(submit: m.Submit, info: m.EngineInfo) -> None:
    """Check the prompt and its derived columns."""
    prompt = _words(submit.prompt, "prompt")
    if not prompt.size:
        raise ProtocolError("a Submit has an empty prompt")
    if np.maximum.reduce(prompt.view(np.uint32)) >= info.vocab_size:  # a negative id becomes a large number
        raise ProtocolError(f"a Submit's prompt has an id that is not in the vocabulary of {info.vocab_size}")
    if submit.prompt_ids or submit.sampling.repetition_penalty != 1:
        _check_distinct(submit, prompt.size, info.vocab_size)
    keys = prompt.size // info.block_size if info.prefix_cache else 0
    if len(submit.block_keys) != keys * KEY_BYTES:
        raise ProtocolError(f"a Submit has {len(submit.block_keys)} bytes of keys for {keys} blocks")


def _check_distinct(submit: m.Submit, prompt: int, vocab_size: int) -> None:
    """Check the prompt's distinct ids. prompt: its number of tokens."""
    ids, has_ids = _words(submit.prompt_ids, "prompt_ids"), submit.sampling.repetition_penalty != 1
    if bool(ids.size) != has_ids or ids.size > prompt:
        raise ProtocolError(f"a Submit has {ids.size} distinct ids for a prompt of {prompt}")
    if has_ids and (ids[0] < 0 or ids[-1] >= vocab_size or not (ids[1:] > ids[:-1]).all()):
        raise ProtocolError("a Submit's distinct ids are not ascending ids of the vocabulary")


def _check_ids(submit: m.Submit, info: m.EngineInfo) -> None:
    """Check listed ids."""
    sampling, stopping = submit.sampling, submit.stopping
    if len(sampling.bias_ids) != len(sampling.bias_values):
        raise ProtocolError(f"a Submit has {len(sampling.bias_ids)} ids and {len(sampling.bias_values)} biases")
    if max((*sampling.bias_ids, *stopping.stop_token_ids), default=0) >= info.vocab_size:
        raise ProtocolError(f"a Submit lists an id that is not in the vocabulary of {info.vocab_size}")
    if len(set(sampling.bias_ids)) != len(sampling.bias_ids):
        raise ProtocolError("a Submit has two biases for one id")
    stop_ids = len(eos_and_stop_ids(stopping, info.eos_token_ids))
    if stop_ids > MAX_STOP_IDS:
        raise ProtocolError(f"a Submit ends with any of {stop_ids} ids, and a row holds {MAX_STOP_IDS}")


def _check_mask(mask: bytes, vocab_size: int, sampled_vocab: int) -> None:
    words = _words(mask, "allowed_mask").view(np.uint32)
    bit = sampled_vocab % 32
    last = ceil_div(sampled_vocab, 32)  # words that may have bits set; in the last one only those below `bit`
    if words.size != ceil_div(vocab_size, 32) or words[last:].any() or (bit and int(words[last - 1]) >> bit):
        raise ProtocolError(f"a Submit's allowed_mask of {words.size} words does not fit {sampled_vocab} ids")
    if not words.any():
        raise ProtocolError("a Submit's allowed_mask allows nothing")


def _check_structure(stopping: StoppingParams, info: m.EngineInfo) -> None:
    """Check a structured request. Only a grammar's length is checked here; the mask worker parses it."""
    if not info.structures:
        raise ProtocolError("a Submit has a grammar, and this engine follows none")
    if stopping.ignore_eos:
        raise ProtocolError("a Submit has a grammar and ignore_eos, and would not end where the grammar does")


def _words(column: bytes, name: str) -> NDArray[np.int32]:
    if len(column) % 4:
        raise ProtocolError(f"a Submit's {name} has {len(column)} bytes, no whole number of int32")
    return np.frombuffer(column, np.int32)
