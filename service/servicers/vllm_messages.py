"""Messages of the facade `vllm.grpc.engine.VllmEngine`: its requests become this contract's, and this service's answers
become its own.

Each field of a request is mapped or refused by name. Fields without presence follow vLLM: 0 turns `top_p` and
`repetition_penalty` off, and `n` of 0 is 1. `skip_special_tokens` and `spaces_between_special_tokens` control text,
which the facade does not return: they matter only for stop strings, which are matched in text without special tokens.
`tokenized.original_text` is informational.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final

from google.protobuf.message import Message
from google.rpc import error_details_pb2
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from runahead.runtime.wire.figures import EngineStats
from runahead.runtime.wire.messages import EngineInfo
from runahead.service.contract.errors import ServiceError, Violation, Violations, invalid_argument
from runahead.service.contract.limits import LIMITS
from runahead.service.engine.request_stream import RequestRefusedError
from runahead.v1 import Delta, Finished, FinishReason, GenerateRequest, Token

_MOST_INT32: Final = 2**31 - 1
_SEEDS: Final = 2**64
_NO: Final = "is not supported by this server"
_UNSUPPORTED: Final = (
    "kv_transfer_params",
    "kv_transfer_params_json",
    "mm_inputs",
    "extra_mm_inputs",
    "media_refs",
)
_SAME: Final = ("min_p", "presence_penalty", "frequency_penalty")

# Facade names of this contract's fields, by their paths' prefixes.
_NAMES: Final = (
    ("sampling.", "sampling_params."),
    ("stopping.include_stop", "sampling_params.include_stop_str_in_output"),
    ("stopping.", "sampling_params."),
    ("output.", "sampling_params."),
    ("structure.choice.texts", "sampling_params.choice.choices"),
    ("structure.ebnf", "sampling_params.grammar"),
    ("structure.", "sampling_params."),
    ("token_ids.ids", "tokenized.input_ids"),
    ("prompt", "input"),
)

_REASONS: Final = {
    FinishReason.FINISH_REASON_END_OF_SEQUENCE: "stop",
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
    FinishReason.FINISH_REASON_CONTEXT_LENGTH: "length",
    FinishReason.FINISH_REASON_ABORTED: "abort",
}
_CHUNK_BYTES: Final = 1 << 18
_ENTRY_BYTES: Final = 10  # of a log-probability and its id in a message


def generate_request(request: Any, context_length: int) -> GenerateRequest:
    """Convert a request. Values are not validated yet, unless this contract can't hold them.

    context_length: the longest completion if `max_tokens` is unset. Raises ServiceError (INVALID_ARGUMENT) with the
    unsupported fields.
    """
    found, params = Violations(), request.sampling_params
    found.require_known(request)
    _check_supported(request, found)
    ours = GenerateRequest()
    if request.request_id:
        ours.request_id = request.request_id
    which = request.WhichOneof("input")
    found.require(which is not None, "input", "is missing: set tokenized or text")
    if which == "text":
        ours.text = request.text
    elif which == "tokenized":
        ours.token_ids.ids.extend(request.tokenized.input_ids)
        ours.token_ids.SetInParent()
    if params.n:
        ours.n = params.n
    _fill_sampling(ours, params, found)
    _fill_structure(ours, params)
    stopping = ours.stopping
    stopping.max_tokens = min(params.max_tokens if params.HasField("max_tokens") else context_length, _MOST_INT32)
    stopping.min_tokens = min(params.min_tokens, _MOST_INT32)
    stopping.stop.extend(params.stop)
    stopping.stop_token_ids.extend(params.stop_token_ids)
    stopping.ignore_eos = params.ignore_eos
    stopping.include_stop = params.include_stop_str_in_output
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            setattr(ours.output, name, getattr(params, name))
    found.raise_if_any()
    return ours


@contextmanager
def named_as_there() -> Iterator[None]:
    """Rename this contract's fields in the body's errors to the facade's."""
    try:
        yield
    except ServiceError as error:
        violations = [
            Violation(_name(fault.field), _name(fault.description))
            for detail in error.details
            if isinstance(detail, error_details_pb2.BadRequest)
            for fault in detail.field_violations
        ]
        if not violations:
            raise
        raise invalid_argument(violations, error.reason) from error
    except RequestRefusedError as refused:
        raise RequestRefusedError(refused.code, refused.message, _name(refused.field)) from refused


def _check_supported(request: Any, found: Violations) -> None:
    params = request.sampling_params
    for name in _UNSUPPORTED:
        found.require(not _is_set(request, name), name, _NO)
    rank = request.data_parallel_rank
    found.require(rank == 0, "data_parallel_rank", f"must be 0, the only rank there is, or unset, and is {rank}")
    for name in ("structural_tag", "truncate_prompt_tokens", "grammar_from_first_token"):
        found.require(not _is_set(params, name), f"sampling_params.{name}", _NO)
    found.require(
        not params.stop or params.skip_special_tokens,
        "sampling_params.skip_special_tokens",
        "must be set together with stop: stop strings are looked for in the text without special tokens",
    )


def _fill_sampling(ours: GenerateRequest, params: Any, found: Violations) -> None:
    sampling = ours.sampling
    if params.HasField("temperature"):
        sampling.temperature = params.temperature
    for name in _SAME:
        setattr(sampling, name, getattr(params, name))
    for name in ("top_p", "repetition_penalty"):
        if getattr(params, name):  # an unset field reads as 0, which is not a valid value
            setattr(sampling, name, getattr(params, name))
    sampling.top_k = min(params.top_k, _MOST_INT32)  # there are no more tokens
    if params.HasField("seed"):
        sampling.seed = params.seed % _SEEDS
    for token_id, value in sorted(params.logit_bias.items()):
        if found.require(token_id >= 0, f"sampling_params.logit_bias[{token_id}]", "must be of a token id"):
            sampling.logit_bias[token_id] = value


def _fill_structure(ours: GenerateRequest, params: Any) -> None:
    constraint = params.WhichOneof("constraint")
    if constraint == "choice":
        ours.structure.choice.texts.extend(params.choice.choices)
        ours.structure.choice.SetInParent()
    elif constraint == "grammar":
        ours.structure.ebnf = params.grammar
    elif constraint in ("json_schema", "json_object", "regex"):
        setattr(ours.structure, constraint, getattr(params, constraint))


def _is_set(message: Message, name: str) -> bool:
    return any(field.name == name for field, _ in message.ListFields())


def _name(text: str) -> str:
    """Translate a path, or the path at a sentence's beginning, to the facade's name."""
    if text == "n" or text.startswith("n "):
        return f"sampling_params.{text}"
    for ours, theirs in _NAMES:
        if text.startswith(ours):
            return theirs + text.removeprefix(ours)
    return text


def input_logprobs(tokens: Iterable[Token], top: int) -> Any:
    """Convert a prompt's log-probabilities; the first token has none. top: entries at each position."""
    found = pb.InputLogProbs()
    for token in tokens:
        found.token_ids.append(token.id)
        value = found.token_logprobs.add()
        if token.HasField("logprob"):
            value.value = token.logprob
        if top:
            found.top_logprobs.append(_top(token))
    return found


def check_input_logprobs(prompt_tokens: int, top: int) -> None:
    """Check that the prompt's log-probabilities fit one message. Raises ServiceError (INVALID_ARGUMENT)."""
    size = prompt_tokens * _ENTRY_BYTES * (1 + max(top, 0))
    if top >= 0 and size > LIMITS.once_prompt_bytes:
        field = "sampling_params.prompt_logprobs"
        sentence = (
            f"may take {size} bytes for this prompt of {prompt_tokens} tokens, and one message has "
            f"{LIMITS.once_prompt_bytes} for them"
        )
        raise invalid_argument([Violation(field, f"{field} {sentence}")])


def output_logprobs(tokens: Sequence[Token], top: int) -> Any:
    """Convert generated tokens' log-probabilities. top: entries at each position, -1 for no log-probabilities."""
    if top < 0:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[token.logprob for token in tokens],
        token_ids=[token.id for token in tokens],
        top_logprobs=[_top(token) for token in tokens] if top else (),
    )


def chunk(delta: Delta, prompt_tokens: int, cached_tokens: int, top: int, prompt: Any) -> Any:
    """Make a chunk of a completion. prompt: its log-probabilities, in completion 0's first chunk. `completion_tokens`
    counts this chunk's, which routers add up.
    """
    tokens = delta.tokens
    return pb.GenerateResponse(
        chunk=pb.GenerateStreamChunk(
            token_ids=[token.id for token in tokens],
            prompt_tokens=prompt_tokens,
            completion_tokens=len(tokens),
            cached_tokens=cached_tokens,
            output_logprobs=output_logprobs(tokens, top),
            input_logprobs=prompt,
            index=delta.index,
        )
    )


def complete(ids: Sequence[int], finished: Finished, scored: Any, prompt: Any) -> Any:
    """Make the end. ids: of all tokens. scored, prompt: log-probabilities that no chunk has brought."""
    answer = pb.GenerateComplete(
        output_ids=ids,
        finish_reason=_REASONS[finished.reason],
        prompt_tokens=finished.usage.prompt_tokens,
        completion_tokens=len(ids),
        cached_tokens=finished.usage.cached_tokens,
        output_logprobs=scored,
        input_logprobs=prompt,
        index=finished.index,
    )
    # the stop sequence or token, other than the model's end of sequence
    if finished.reason == FinishReason.FINISH_REASON_STOP:
        if finished.stop.WhichOneof("match") == "text":
            answer.matched_stop_str = finished.stop.text
        elif finished.stop.WhichOneof("match") == "token_id":
            answer.matched_token_id = finished.stop.token_id
    return pb.GenerateResponse(complete=answer)


def model_info(info: EngineInfo) -> Any:
    """Describe the model by its served name: local paths are not shown."""
    return pb.GetModelInfoResponse(
        model_path=info.model,
        is_generation=True,
        max_context_length=info.context_length,
        vocab_size=info.vocab_size,
        served_model_name=info.model,
        architectures=[info.architecture],
        eos_token_ids=info.eos_token_ids,
        bos_token_id=max(info.bos_token_id, 0),
        max_req_input_len=info.context_length - 1,
    )


def server_info(info: EngineInfo, stats: EngineStats) -> Any:
    return pb.GetServerInfoResponse(
        active_requests=stats.waiting + stats.running,
        uptime_seconds=stats.uptime_s,
        server_type="vllm-grpc",  # this protocol's own name
        data_parallel_size=1,
        kv_cache_dtype=info.kv_dtype,
        block_size=info.block_size,
        model_dtype=f"torch.{info.dtype}",
        max_num_seqs=info.max_rows,
    )


def loads(info: EngineInfo, stats: EngineStats, queued_tokens: int, version: str, include: Iterable[str]) -> Any:
    """Report the load of the only rank. queued_tokens: prompt tokens that wait for a row. include: section names, a
    filter.

    No name, or `all`, fills every section; unknown names fill nothing. `gen_throughput` stays 0, which means unknown.
    """
    used = stats.blocks_total - stats.blocks_free - stats.blocks_cached
    queues: dict[str, float] = {
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_total_reqs": stats.running + stats.waiting,
        "num_waiting_uncached_tokens": min(queued_tokens, _MOST_INT32),
    }
    memory: dict[str, float] = {
        "num_used_tokens": used * info.block_size,
        "max_total_num_tokens": stats.blocks_total * info.block_size,
        "token_usage": used / stats.blocks_total if stats.blocks_total else 0.0,
    }
    core = {
        **queues,
        **memory,
        "cache_hit_rate": stats.cached_tokens / stats.queried_tokens if stats.queried_tokens else 0.0,
        "utilization": stats.running / info.max_rows,
        "max_running_requests": info.max_rows,
    }
    sections = {"all": core, "core": core, "queues": queues, "memory": memory}
    load = pb.SchedulerLoad()
    for name in set(include) or ("all",):
        load.MergeFrom(pb.SchedulerLoad(**sections.get(name, {})))
    now = datetime.now(UTC).isoformat()
    return pb.GetLoadsResponse(timestamp=now, version=version, dp_rank_count=1, loads=[load])


def tokenizer_chunks(archive: bytes) -> Iterator[Any]:
    """Split a zip archive into messages; the last one has its SHA-256."""
    for offset in range(0, len(archive), _CHUNK_BYTES):
        is_last = offset + _CHUNK_BYTES >= len(archive)
        yield common_pb2.GetTokenizerChunk(
            data=archive[offset : offset + _CHUNK_BYTES], sha256=sha256(archive).hexdigest() if is_last else ""
        )


def _top(token: Token) -> Any:
    return pb.TopLogProbs(values=[top.logprob for top in token.top], token_ids=[top.id for top in token.top])
