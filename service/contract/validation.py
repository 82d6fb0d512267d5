"""Validates GenerateRequest and GenerateOnceRequest and fills in defaults.

Independent of the engine. Collects all violations, up to `Limits.violations` and for a list `Limits.list_violations`.
"""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from runahead.runtime.wire.messages import EngineInfo
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams, allowed_mask
from runahead.service.contract.errors import (
    NO_TOKENIZER,
    Violation,
    Violations,
    checking,
    id_sentence,
    invalid_argument,
)
from runahead.service.contract.inputs import CheckedChat, StructureSource, check_chat, check_structure
from runahead.service.contract.limits import LIMITS
from runahead.service.credentials.callers import Caller
from runahead.v1 import (
    AbortRequest,
    GenerateOnceRequest,
    GenerateRequest,
    OutputOptions,
    SamplingOptions,
    StoppingOptions,
)

AnyGenerateRequest = GenerateRequest | GenerateOnceRequest  # they have the same fields

_CALLER: Final = re.compile(r"^[A-Za-z0-9._~%-]{1,100}/")  # before an id
_SEEDS: Final = 1 << 64
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]+")
_REQUEST_ID_SENTENCE: Final = f"must be 1 to {LIMITS.request_id_length} of the characters A-Z a-z 0-9 . _ : -"
_NO_PENALTY_SLOTS: Final = "is not supported by this server, which was started with penalty_slots 0"

# With each one's neutral value and bounds.
_PENALTIES: Final = (
    ("repetition_penalty", 1.0, LIMITS.repetition_penalty_min, LIMITS.repetition_penalty_max),
    ("presence_penalty", 0.0, -LIMITS.additive_penalty, LIMITS.additive_penalty),
    ("frequency_penalty", 0.0, -LIMITS.additive_penalty, LIMITS.additive_penalty),
)


@dataclass(frozen=True, slots=True)
class TextParams:
    """Text options, which only the front end applies. max_tokens_per_message: 0 means unbounded. turn_ends: the
    `stop_token_ids` that end a chat's answer.
    """

    stop: tuple[str, ...]
    include_stop: bool
    max_tokens_per_message: int
    turn_ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A valid request. Only the length of a text or chat prompt is unchecked until it is tokenized.

    engine_id: the engine's id if it differs (`runahead.service.calls.admission`).
    caller: empty without authentication. outranks: its priority counts against other callers.
    prompt: text, a chat, or int32 [n] token ids. echo: send the prompt's tokens back.
    structure: the constraint; grammar: its compiled form (`Submit`), empty before. n: the number of completions;
        `sampling.seed` is the first one's.
    """

    request_id: str
    prompt: str | CheckedChat | NDArray[np.int32]
    sampling: SamplingParams
    stopping: StoppingParams
    text: TextParams
    echo: bool
    priority: int
    cache_salt: str
    add_special_tokens: bool
    engine_id: str = ""
    caller: str = ""
    outranks: bool = True
    structure: StructureSource | None = None
    grammar: str = ""
    n: int = 1


def check_request(request: AnyGenerateRequest, info: EngineInfo, has_tokenizer: bool = True) -> CheckedRequest:
    """Validate a request. Raises ServiceError (INVALID_ARGUMENT) that names every invalid field; without a tokenizer
    also every text field.
    """
    found = Violations()
    found.require_known(request)
    if not has_tokenizer:
        _check_no_text(request, found)
    request_id = request.request_id if request.HasField("request_id") else uuid.uuid4().hex
    found.require(_is_request_id(request_id), "request_id", _REQUEST_ID_SENTENCE)
    prompt = _check_prompt_field(request, info, found)
    stopping = _check_stopping(request.stopping, info, found)
    sampling = _sampling_of(request.sampling, request.output, info, found)
    _check_something_to_draw(sampling, stopping, info.eos_token_ids, found)
    text = _check_text(request.stopping, request.output, found)
    found.require(
        len(request.cache_salt.encode()) <= LIMITS.cache_salt_bytes,
        "cache_salt",
        f"must be at most {LIMITS.cache_salt_bytes} bytes",
    )
    found.require(
        abs(request.priority) <= LIMITS.priority, "priority", f"must be within -{LIMITS.priority} and {LIMITS.priority}"
    )
    structure = check_structure(request, found) if request.HasField("structure") else None
    n = _check_n(request, info, found)
    found.raise_if_any()
    return CheckedRequest(
        request_id=request_id,
        prompt=prompt,
        sampling=sampling,
        stopping=stopping,
        text=text,
        echo=request.output.echo,
        priority=request.priority,
        cache_salt=request.cache_salt,
        add_special_tokens=request.add_special_tokens or not request.HasField("add_special_tokens"),
        structure=structure,
        n=n,
    )


def engine_prefix(caller: Caller) -> str:
    """Return what precedes the caller's request ids in the engine: nothing without authentication."""
    return f"{caller.name}/" if caller.name else ""


def owned_by(caller: Caller, request: CheckedRequest, *, shares_prefixes: bool) -> CheckedRequest:
    """Return the request as the engine gets it. Unless prefixes are shared, it finds only its caller's blocks."""
    prefix = engine_prefix(caller)
    return replace(
        request,
        engine_id=prefix + request.request_id,
        cache_salt=request.cache_salt if shares_prefixes else prefix + request.cache_salt,
        caller=caller.name,
        outranks="priority" in caller.rights,
    )


def each_alone(request: CheckedRequest) -> list[CheckedRequest]:
    """Split a request into one for each completion, by index."""
    seed = request.sampling.seed
    seeds = [(seed + index) % _SEEDS for index in range(request.n)]
    return [replace(request, sampling=msgspec.structs.replace(request.sampling, seed=one), n=1) for one in seeds]


def check_prompt_tokens(ids: NDArray[np.int32], field: str, info: EngineInfo) -> None:
    """Check a prompt's length and ids. Raises ServiceError (INVALID_ARGUMENT)."""
    found = Violations()
    _check_length(len(ids), field, info, found)
    found.require_range(ids, info.vocab_size, field)
    found.raise_if_any()


def check_known(request: Message) -> None:
    """Refuse unknown fields. Raises ServiceError (INVALID_ARGUMENT)."""
    with checking(request):
        pass


def check_once(request: GenerateOnceRequest) -> None:
    """Check the fields that GenerateOnce does not support. Raises ServiceError (INVALID_ARGUMENT)."""
    if request.output.HasField("max_tokens_per_message"):
        field = "output.max_tokens_per_message"
        raise invalid_argument([Violation(field, f"{field} has no meaning for GenerateOnce, and must be unset")])


def check_abort(request: AbortRequest, *, may_name_callers: bool = False) -> None:
    """Validate Abort: ids or all but not both, and well-formed ids. Raises ServiceError (INVALID_ARGUMENT).

    may_name_callers: an id may begin with a caller's name and a slash.
    """
    count = len(request.request_ids)
    with checking(request) as found:
        found.require(count > 0 or request.all, "request_ids", "must name at least one request, unless all is set")
        found.require(count == 0 or not request.all, "all", "must not be set together with request_ids")
        if found.require_at_most(LIMITS.abort_ids, count, "request_ids"):
            ids = [_CALLER.sub("", text) if may_name_callers else text for text in request.request_ids]
            wrong = [index for index, request_id in enumerate(ids) if not _is_request_id(request_id)]
            found.require_none("request_ids", wrong, lambda index: (f"request_ids[{index}]", _REQUEST_ID_SENTENCE))


def _check_no_text(request: AnyGenerateRequest, found: Violations) -> None:
    found.require(not request.HasField("text"), "text", NO_TOKENIZER)
    found.require(not request.stopping.stop, "stopping.stop", NO_TOKENIZER)
    found.require(not request.stopping.include_stop, "stopping.include_stop", NO_TOKENIZER)
    found.require(not request.output.echo, "output.echo", NO_TOKENIZER)
    found.require(not request.HasField("structure"), "structure", NO_TOKENIZER)


def _is_request_id(text: str) -> bool:
    return len(text) <= LIMITS.request_id_length and _REQUEST_ID.fullmatch(text) is not None


def _check_prompt_field(
    request: AnyGenerateRequest, info: EngineInfo, found: Violations
) -> str | CheckedChat | NDArray[np.int32]:
    which = request.WhichOneof("prompt")
    if which == "chat":
        sentence = "must not be set beside chat, whose template writes special tokens"
        found.require(not request.HasField("add_special_tokens"), "add_special_tokens", sentence)
        return check_chat(request.chat, found)
    if which == "text":
        if found.require(bool(request.text), "text", "must not be empty"):
            found.require_text_bytes(request.text)
        return request.text
    found.require(which is not None, "prompt", "is missing: set text, chat or token_ids")
    found.require(not request.add_special_tokens or which is None, "add_special_tokens", "is about text, not token_ids")
    ids, field = request.token_ids.ids, "token_ids.ids"
    if which is None or not _check_length(len(ids), field, info, found):
        return np.empty(0, np.int32)
    # Ids are uint32 on the wire; int64 holds them until their range is checked.
    wide = np.fromiter(ids, np.int64, len(ids))
    found.require_range(wide, info.vocab_size, field)
    return np.minimum(wide, info.vocab_size).astype(np.int32)


def _check_n(request: AnyGenerateRequest, info: EngineInfo, found: Violations) -> int:
    if not request.HasField("n"):
        return 1
    found.require_between(1, request.n, most_completions(info), "n")
    return request.n


def most_completions(info: EngineInfo) -> int:
    """Return the most completions of one request; those without a row wait in the queue."""
    return min(LIMITS.completions, info.max_rows + info.max_queue)


def _check_length(count: int, field: str, info: EngineInfo, found: Violations) -> bool:
    longest = info.context_length - 1  # room for one token
    return found.require(count > 0, field, "must give at least one token") and found.require(
        count <= longest,
        field,
        f"has {count} tokens, and the context of {info.context_length} leaves room for a prompt of {longest}",
    )


def _sampling_of(
    options: SamplingOptions, output: OutputOptions, info: EngineInfo, found: Violations
) -> SamplingParams:
    temperature = options.temperature if options.HasField("temperature") else 1.0
    found.require(
        temperature == 0.0 or LIMITS.temperature_min <= temperature <= LIMITS.temperature_max,
        "sampling.temperature",
        f"must be 0, or {LIMITS.temperature_min:g} to {LIMITS.temperature_max:g}, and is {temperature:g}",
    )
    top_k = options.top_k
    found.require(top_k >= 0, "sampling.top_k", f"must be 0 (off) or more, and is {top_k}")
    top_p = options.top_p if options.HasField("top_p") else 1.0
    found.require(0.0 < top_p <= 1.0, "sampling.top_p", f"must be above 0 and at most 1, and is {top_p:g}")
    min_p = options.min_p
    found.require_between(0, min_p, 1, "sampling.min_p")
    penalties = _check_penalties(options, info, found)
    bias = _check_bias(options, info, found)
    allowed = found.require_ids(
        options.allowed_token_ids, info.vocab_size, info.vocab_size, "sampling.allowed_token_ids"
    )
    sampled = np.fromiter(allowed, np.int64, len(allowed)) if allowed else np.empty(0, np.int64)
    sampled = sampled[sampled < (info.sampled_vocab or info.vocab_size)]
    found.require(
        sampled.size > 0 or not allowed,
        "sampling.allowed_token_ids",
        f"has no id below {info.sampled_vocab}: the tokenizer has no token for the ids above, and none is sampled",
    )
    return SamplingParams(
        temperature=temperature,
        top_k=min(top_k, info.vocab_size),
        top_p=top_p,
        min_p=min_p,
        seed=options.seed if options.HasField("seed") else secrets.randbits(64),
        bias_ids=tuple(bias),
        bias_values=tuple(bias.values()),
        allowed_mask=allowed_mask(sampled, info.vocab_size) if sampled.size else b"",
        logprobs=_check_logprobs(output, "logprobs", found),
        prompt_logprobs=_check_logprobs(output, "prompt_logprobs", found),
        **penalties,
    )


def _check_penalties(options: SamplingOptions, info: EngineInfo, found: Violations) -> dict[str, float]:
    """Return the penalties by name, neutral where unset."""
    penalties: dict[str, float] = {}
    for name, off, low, high in _PENALTIES:
        field, value = f"sampling.{name}", getattr(options, name) if options.HasField(name) else off
        if found.require_between(low, value, high, field):
            found.require(value == off or info.penalty_slots > 0, field, _NO_PENALTY_SLOTS)
        penalties[name] = value
    return penalties


def _check_bias(options: SamplingOptions, info: EngineInfo, found: Violations) -> dict[int, float]:
    if not found.require_at_most(LIMITS.logit_bias_entries, len(options.logit_bias), "sampling.logit_bias"):
        return {}
    bias = dict(sorted(options.logit_bias.items()))
    most = LIMITS.logit_bias_value

    def described(token_id: int) -> tuple[str, str]:
        is_unknown = token_id >= info.vocab_size
        out_of_range = f"must be -{most:g} to {most:g}, and is {bias[token_id]:g}"
        sentence = id_sentence(token_id, info.vocab_size) if is_unknown else out_of_range
        return f"sampling.logit_bias[{token_id}]", sentence

    wrong = [token_id for token_id in bias if token_id >= info.vocab_size or not -most <= bias[token_id] <= most]
    found.require_none("sampling.logit_bias", wrong, described)
    return bias


def _check_logprobs(output: OutputOptions, name: str, found: Violations) -> int:
    if not output.HasField(name):
        return -1
    count = int(getattr(output, name))
    found.require_between(0, count, LIMITS.top_logprobs, f"output.{name}")
    return count


def _check_stopping(options: StoppingOptions, info: EngineInfo, found: Violations) -> StoppingParams:
    max_tokens = options.max_tokens if options.HasField("max_tokens") else LIMITS.default_max_tokens
    found.require_between(1, max_tokens, LIMITS.max_tokens, "stopping.max_tokens")
    found.require(
        0 <= options.min_tokens <= max_tokens,
        "stopping.min_tokens",
        f"must be 0 to max_tokens, which is {max_tokens}, and is {options.min_tokens}",
    )
    stop_ids = found.require_ids(
        options.stop_token_ids, LIMITS.stop_token_ids, info.vocab_size, "stopping.stop_token_ids"
    )
    return StoppingParams(
        max_tokens=max_tokens,
        min_tokens=options.min_tokens,
        stop_token_ids=tuple(sorted(set(stop_ids))),
        ignore_eos=options.ignore_eos,
    )


def check_chat_ends(request: CheckedRequest) -> None:
    """Check a chat request's stop ids, which are complete only after rendering. Raises ServiceError
    (INVALID_ARGUMENT).
    """
    found = Violations()
    _check_something_to_draw(request.sampling, request.stopping, (), found)
    found.raise_if_any()


def _check_something_to_draw(
    sampling: SamplingParams, stopping: StoppingParams, eos_token_ids: Sequence[int], found: Violations
) -> None:
    """Require an allowed token besides the ids that end a row: those are masked below min_tokens."""
    if not sampling.allowed_mask or not stopping.min_tokens:
        return
    ends = {*stopping.stop_token_ids, *(() if stopping.ignore_eos else eos_token_ids)}
    allowed = np.unpackbits(np.frombuffer(sampling.allowed_mask, np.uint8), bitorder="little").nonzero()[0]
    found.require(
        not ends.issuperset(allowed.tolist()),
        "sampling.allowed_token_ids",
        "allows only tokens that end the completion, and min_tokens forbids these at first",
    )


def _check_text(options: StoppingOptions, output: OutputOptions, found: Violations) -> TextParams:
    stops: Sequence[str] = ()
    if found.require_at_most(LIMITS.stop_strings, len(options.stop), "stopping.stop"):
        stops = options.stop
        found.require_sizes([len(stop.encode()) for stop in stops], LIMITS.stop_string_bytes, "stopping.stop")
    per_message = output.max_tokens_per_message
    if output.HasField("max_tokens_per_message"):
        found.require_between(1, per_message, LIMITS.max_tokens_per_message, "output.max_tokens_per_message")
    return TextParams(tuple(dict.fromkeys(stops)), options.include_stop, per_message)
