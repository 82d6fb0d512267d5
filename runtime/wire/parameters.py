"""A request's parameters in the engine: token ids and numbers, with defaults filled in."""

from __future__ import annotations

import enum
from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from runahead.runtime.row_record import token_mask

MAX_STOP_IDS = 32  # end-of-sequence ids and stop ids of one row together
MAX_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_ABORT_IDS = 1024  # of one call: each is looked up, and may be remembered
MAX_TEXT = 256  # characters of an id or a salt
MAX_STRUCTURE = 1 << 18  # characters of a grammar
MAX_COMPLETIONS = 16  # of one prompt

# Model-independent bounds: a value outside could not be stored in a row. NaN is outside too. Rows store float32, so
# each bound is the nearest float32 number.
_SMALLEST: Final = 1e-45  # the smallest float32 above 0
_Float = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]
_Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Logprobs = Annotated[int, msgspec.Meta(ge=-1, le=MAX_TOP_LOGPROBS)]


class FinishReason(enum.IntEnum):
    """Why a row ended. The codes travel in `messages.Finished.reason`."""

    NOT_FINISHED = 0
    END_OF_SEQUENCE = 1
    STOP = 2  # a stop token id; front ends find stop strings
    LENGTH = 3
    CONTEXT_LENGTH = 4
    ABORTED = 5
    NON_FINITE = 6  # non-finite logits, raw or penalized: the request fails, others continue
    CANCELLED = 7  # the stream is lost; never sent, only counted
    NOTHING_LEFT = 8  # its grammar and its allowed tokens leave no token: the request fails, others continue
    STRUCTURE_LOST = 9  # the mask worker died: the request fails
    STRUCTURE_COST = 10  # its grammar costs too much: the request fails
    STRUCTURE_MISMATCH = 11  # its grammar rejects a token that its mask allowed, a bug: the request fails


class WaitReason(enum.IntEnum):
    """Why a plan left a request without a row. The codes travel in `messages.Admitted.waited_for`."""

    LAUNCH = 0  # no plan since it arrived, or its prefix lookup continues
    PROMPT_BUDGET = 1  # earlier prompts use up the launch's prompt tokens
    ROW_SLOT = 2
    KV_BLOCKS = 3
    PENALTY_SLOT = 4
    INTAKE = 5  # its front end hashed its prompt, or the engine's loop had not taken its message


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are sampled. Validated and defaulted before the engine.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off, 0 is invalid. min_p: 0 is off. A temperature or min_p
        that float32 rounds to 0 counts as 0.
    seed: 64 bits, always set: the front end draws one if the client sets none.
    bias_ids, bias_values: added to logits, at most 1,024.
    allowed_mask: int32 words, bit v % 32 of word v // 32 for token v; empty allows all.
    logprobs: -1 none; n >= 0 the chosen token's and the top n.
    repetition_penalty: 1 is off; divides the positive and multiplies the negative logits of tokens in the prompt or the
        completion. presence_penalty, frequency_penalty: 0 is off; subtracted from the logits of tokens in the
        completion, once, or for each occurrence.
    prompt_logprobs: like logprobs, for every prompt token after the first.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=1e30)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    top_p: Annotated[float, msgspec.Meta(ge=_SMALLEST, le=1.0)] = 1.0
    min_p: _Fraction = 0.0
    seed: int = 0
    bias_ids: Annotated[tuple[_TokenId, ...], msgspec.Meta(max_length=MAX_BIAS)] = ()
    bias_values: Annotated[tuple[_Float, ...], msgspec.Meta(max_length=MAX_BIAS)] = ()
    allowed_mask: bytes = b""
    logprobs: _Logprobs = -1
    repetition_penalty: Annotated[float, msgspec.Meta(ge=1e-30, le=1e30)] = 1.0
    presence_penalty: _Float = 0.0
    frequency_penalty: _Float = 0.0
    prompt_logprobs: _Logprobs = -1

    @property
    def has_penalty(self) -> bool:
        """Whether the row needs a penalty slot for token counts."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def has_filter(self) -> bool:
        """Whether top-k, top-p or min-p may exclude tokens; never for a greedy row."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


class StoppingParams(msgspec.Struct, frozen=True, array_like=True):
    """When a row ends, except by stop strings, which front ends find.

    max_tokens: at least 1. min_tokens: below it ids that end the row cannot be sampled.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    min_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 30)] = 0
    stop_token_ids: Annotated[tuple[_TokenId, ...], msgspec.Meta(max_length=MAX_STOP_IDS)] = ()
    ignore_eos: bool = False


def allowed_mask(token_ids: NDArray[np.int64], vocab_size: int) -> bytes:
    """Make `SamplingParams.allowed_mask` for these ids, [n], each below `vocab_size`."""
    return token_mask(token_ids, vocab_size).tobytes()
