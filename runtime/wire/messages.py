"""Messages between an engine and a front end over their Unix socket.

A frame (`runahead.runtime.wire.frames`) holds MessagePack: one struct of the unions below. No pickle, no tensors.
Columns are the raw little-endian bytes of NumPy arrays; `handle` names a request on one connection and is chosen by the
front end, counting up from 1; it has 64 bits, here and in columns.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from runahead.runtime.wire.figures import MAX_TRACED, EngineStats, Trace
from runahead.runtime.wire.frames import ProtocolError, framed
from runahead.runtime.wire.kv_events import KvQuery, KvReply
from runahead.runtime.wire.parameters import (
    MAX_ABORT_IDS,
    MAX_COMPLETIONS,
    MAX_STRUCTURE,
    MAX_TEXT,
    FinishReason,
    SamplingParams,
    StoppingParams,
    WaitReason,
)

PROTOCOL_VERSION: Final = 17
MAX_HANDLE: Final = (1 << 63) - 1
MAX_ANNOUNCED: Final = 100_000  # requests that a front end may have announced at once
HEARTBEAT_S: Final = 0.5  # between heartbeats of the engine, about
_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_Completions = Annotated[int, msgspec.Meta(ge=1, le=MAX_COMPLETIONS)]


class PromptLaunches(msgspec.Struct, frozen=True):
    """Bounds of prompt tokens. chunk: multiples at which prompts are cut. launch: of a launch. queued: of a launch and
    the uncommitted ones before it. why: the reason for these and for the number of rows. mixed: of a launch with
    decoding rows, unless they are one chunk.
    """

    chunk: int
    launch: int
    queued: int
    why: str
    mixed: int = 0


# ---------------------------------------------------------------- front end to engine


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    protocol: int


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A request with precomputed parts (`runahead.runtime.wire.prompts`).

    prompt: int32 token ids, never empty. prompt_ids: its distinct ids, int32, ascending, for a repetition penalty; else
    empty. block_keys: keys of its full blocks, 32 bytes each, for an engine with a prefix cache; else empty.
    submitted_at: when the front end sent it, seconds of the machine's monotonic clock, so that socket time counts; an
    announced request's times count from the announcement. The engine clamps it between the connection's time and its
    own reading of the message; None means the latter. announced: replaces the announcement with its handle; if that
    has ended, so has the request. structure: a
    grammar in llguidance's JSON, `{"grammars": [...]}`; empty: none. caller: empty without authentication. outranks:
    the priority counts against other callers. n: completions of the prompt. Completion i has the handle `handle` + i
    and the seed `sampling.seed` + i; all share the id.
    """

    handle: Annotated[int, msgspec.Meta(ge=1, le=MAX_HANDLE)]
    request_id: _Text
    prompt: bytes
    sampling: SamplingParams
    stopping: StoppingParams
    priority: int = 0
    cache_salt: _Text = ""
    prompt_ids: bytes = b""
    block_keys: bytes = b""
    submitted_at: float | None = None
    announced: bool = False
    structure: Annotated[str, msgspec.Meta(max_length=MAX_STRUCTURE)] = ""
    caller: _Text = ""
    outranks: bool = True
    n: _Completions = 1


class Announce(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A request whose prompt is being prepared: its id is taken, and an Abort reaches it.

    Answered only if it ends: Refused, or Accepted and a `Finished` with ABORTED. A Submit or Cancel with its handle
    always follows. submitted_at, n: see `Submit`, which has the same n.
    """

    handle: Annotated[int, msgspec.Meta(ge=1, le=MAX_HANDLE)]
    request_id: _Text
    submitted_at: float | None = None
    n: _Completions = 1


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """End the request without an answer; outputs may still arrive.

    reason: for counters: STOP for a stop string, CANCELLED for a lost stream.
    """

    handle: int
    reason: FinishReason = FinishReason.CANCELLED


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """End requests by id, from any front end. Empty `request_ids` with `all_requests` means every id that begins with
    `reach`.

    Each aborted request's stream gets a `Finished` with ABORTED.
    """

    call: int
    request_ids: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MAX_ABORT_IDS)]
    all_requests: bool = False
    reach: _Text = ""


class StatsQuery(msgspec.Struct, frozen=True, array_like=True, tag=5):
    call: int


class TraceQuery(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Ask for the trace of at most this many newest launches."""

    call: int
    launches: Annotated[int, msgspec.Meta(ge=1, le=MAX_TRACED)]


ToEngine = Hello | Submit | Announce | Cancel | Abort | StatsQuery | TraceQuery | KvQuery


# ---------------------------------------------------------------- engine to front end


class Exactness(msgspec.Struct, frozen=True):
    """Whether a row's tokens and log-probabilities depend only on that row. why: in words."""

    exact: bool
    why: str


class ExpertCounts(msgspec.Struct, frozen=True):
    """Experts of a layer: how many, how many for each token, and how many more for every token."""

    count: int
    per_token: int
    shared: int = 0


class LayerKind(msgspec.Struct, frozen=True):
    """A kind of layer and its count. mixer: attention, mamba2 or gated_delta. window: of attention, 0: all tokens.
    feed_forward: dense, ungated or experts. Empty: none.
    """

    count: int
    mixer: str
    window: int
    feed_forward: str
    experts: ExpertCounts | None = None


class WeightFormat(msgspec.Struct, frozen=True):
    """A number of tensors that are stored alike. stored_as, held_as: see the contract's `WeightFormat`. stored_bytes:
    in the files.
    """

    stored_as: str
    held_as: str
    tensors: int
    parameters: int
    stored_bytes: int


class EngineInfo(msgspec.Struct, frozen=True):
    """The served model and the engine's limits."""

    model: str
    architecture: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int  # -1: none
    max_rows: int
    max_queue: int
    num_blocks: int
    block_size: int
    run_ahead: int  # 0: serial
    device: str
    dtype: str
    parameters: int
    kv_dtype: str = ""  # of keys and values
    penalty_slots: int = 0  # rows that may have penalties at a time
    prefix_cache: bool = False
    exactness: Exactness = Exactness(False, "")
    structures: bool = False  # requests may have a grammar
    state_bytes: int = 0  # of a row's recurrent state; 0: none
    snapshots: int = 0  # of recurrent states
    snapshot_blocks: int = 0  # KV blocks between two boundaries with a snapshot; 0: no snapshots
    layers: tuple[LayerKind, ...] = ()
    drafters: tuple[str, ...] = ()  # available ones
    drafter: str = "none"
    draft_parameters: int = 0
    prompt_launches: PromptLaunches = PromptLaunches(0, 0, 0, "")
    sampled_vocab: int = 0  # ids below this may be sampled; 0: the whole vocabulary
    weights: tuple[WeightFormat, ...] = ()  # empty: random weights
    tensor_parallel: int = 1  # ranks of the model


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=101):
    protocol: int
    server_id: str
    info: EngineInfo


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=110):
    """The engine's loop runs. Sent every HEARTBEAT_S, beside other messages."""


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=102):
    """The request is queued: the first message about every handle that is not refused."""

    handle: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=103):
    """The request is not queued; no other message about its handle follows.

    code: ALREADY_EXISTS, RESOURCE_EXHAUSTED or INVALID_ARGUMENT. field: the path of the offending field, or empty.
    """

    handle: int
    code: str
    message: str
    field: str = ""


class Admitted(msgspec.Struct, frozen=True, array_like=True, tag=109):
    """The request got its first row. Sent once, before messages about its prompt or tokens.

    cached_tokens: prompt tokens from the prefix cache, as in its `Finished`. queue_s: seconds since submission, on the
    engine's clock. waited_for, waited_s: its longest wait in the engine, in seconds.
    """

    handle: int
    cached_tokens: int
    queue_s: float
    waited_for: WaitReason = WaitReason.LAUNCH
    waited_s: float = 0.0


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A request's end; nothing follows.

    reason: a `FinishReason`. stop_token_id: the id that ended it, or -1. Times are seconds on the engine's clock, -1
        for a part that was not reached: in the queue, from admission to the first token, from submission to the first
        token, and from the first token to the last. drafted, accepted: verified and accepted drafts by position, up to
        the last position with any.
    tokens_per_launch: average over launches that brought it any; 0 without a token. evictions, pauses: how often it
        lost its row, and waited in it, for lack of KV blocks. chunks_deferred: launches that left its next chunk out.
    """

    handle: int
    reason: int
    stop_token_id: int = -1
    cached_tokens: int = 0
    queue_s: float = -1.0
    prefill_s: float = -1.0
    first_token_s: float = -1.0
    decode_s: float = -1.0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    tokens_per_launch: float = 0.0
    evictions: int = 0
    pauses: int = 0
    chunks_deferred: int = 0


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one token of an `Output`: `index` is its index in the columns."""

    index: int
    chosen: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class Output(msgspec.Struct, frozen=True, array_like=True, tag=104):
    """A commit's tokens for this front end. A token and its request's `Finished` come in one message."""

    launch: int
    handles: bytes  # int64 [n]
    tokens: bytes  # int32 [n]
    logprobs: tuple[Logprobs, ...] = ()
    finished: tuple[Finished, ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, tag=108):
    """Log-probabilities of consecutive prompt tokens of one request, of the model's raw distribution.

    All come before the first token, in order, each once; the prompt's first token has none. offset: index of the first
    described prompt token. chosen: float32 [n]. top_ids: int32 [n, top], top_logprobs: float32 [n, top], most likely
    first; top as requested.
    """

    handle: int
    offset: int
    chosen: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class AbortResult(msgspec.Struct, frozen=True, array_like=True, tag=105):
    """The result of an abort. outcomes: ABORTED, ALREADY_FINISHED or NOT_FOUND for each of `request_ids`, in order; for
    `all_requests`, the ids that were aborted.
    """

    call: int
    request_ids: tuple[str, ...]
    outcomes: tuple[str, ...]


class StatsReply(msgspec.Struct, frozen=True, array_like=True, tag=106):
    call: int
    stats: EngineStats


class TraceReply(msgspec.Struct, frozen=True, array_like=True, tag=111):
    call: int
    trace: Trace


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=107):
    """The engine stops: every request of this connection has ended with this. The socket closes next.

    reason: SHUTDOWN, DEVICE or INTERNAL. message: a fixed sentence for clients.
    """

    reason: str
    message: str


ToFrontEnd = (
    Welcome
    | Heartbeat
    | Accepted
    | Refused
    | Admitted
    | PromptLogprobs
    | Output
    | AbortResult
    | StatsReply
    | TraceReply
    | KvReply
    | Failed
)

_encoder: Final = msgspec.msgpack.Encoder()
_to_engine: Final[msgspec.msgpack.Decoder[ToEngine]] = msgspec.msgpack.Decoder(ToEngine)
_to_front_end: Final[msgspec.msgpack.Decoder[ToFrontEnd]] = msgspec.msgpack.Decoder(ToFrontEnd)


def encode_frame(message: ToEngine | ToFrontEnd) -> bytes:
    """Encode length and body, ready to send."""
    return framed(_encoder.encode(message))


def decode_to_engine(body: bytes) -> ToEngine:
    """Decode a front end's message. Raises ProtocolError. Checks types and their bounds;
    `runahead.runtime.engine.submit_check` checks the rest.
    """
    try:
        return _to_engine.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a front end sent an unreadable message: {error}") from error
    except UnicodeDecodeError as error:  # whose message repeats the text
        raise ProtocolError("a front end sent an unreadable message: a text is not UTF-8") from error
    except RecursionError as error:
        raise ProtocolError("a front end sent an unreadable message: lists in lists without end") from error


def decode_to_front_end(body: bytes) -> ToFrontEnd:
    """Decode an engine's message. Raises ProtocolError."""
    try:
        return _to_front_end.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the engine sent an unreadable message: {error}") from error
