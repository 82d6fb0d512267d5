"""Converts requests of the facade `vllm.grpc.engine.VllmEngine` to this contract's.

Each field is mapped or refused by name. Fields without presence follow vLLM: 0 turns `top_p` and `repetition_penalty`
off, and `n` of 0 is 1. `skip_special_tokens` and `spaces_between_special_tokens` control text, which the facade does
not return: they matter only for stop strings, which are matched in text without special tokens.
`tokenized.original_text` is informational.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from google.protobuf.message import Message
from google.rpc import error_details_pb2

from runahead.service.contract.errors import ServiceError, Violation, Violations, invalid_argument
from runahead.service.engine.request_stream import RequestRefusedError
from runahead.v1 import GenerateRequest

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
