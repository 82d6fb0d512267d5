"""Errors as a client sees them: a status code, a sentence and `google.rpc` details.

Each error has a reason in `ErrorInfo` under the domain `runahead`; `STATUS_OF` maps reasons to statuses. The violations
of a request, unknown fields among them, are collected into one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar

import grpc
import numpy as np
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from numpy.typing import NDArray

from runahead.runtime.wire.parameters import FinishReason
from runahead.service.contract.limits import LIMITS

ERROR_DOMAIN: Final = "runahead"
INTERNAL_SENTENCE: Final = "the server failed to serve this request; its log has the reason under the request's id"
SHUTDOWN_SENTENCE: Final = "the server is shutting down"
PUSHBACK_HEADER: Final = "grpc-retry-pushback-ms"  # gRPC clients with a retry policy wait this many milliseconds

_REASONS_OF: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: ("INVALID_FIELD", "MALFORMED", "NO_MESSAGE", "SECOND_MESSAGE"),
    grpc.StatusCode.ALREADY_EXISTS: ("DUPLICATE_ID",),
    grpc.StatusCode.DEADLINE_EXCEEDED: ("UPLOAD_TIMEOUT", "TOO_LONG"),
    grpc.StatusCode.UNAUTHENTICATED: ("NO_CREDENTIALS", "UNKNOWN_CREDENTIALS"),
    grpc.StatusCode.PERMISSION_DENIED: ("NO_RIGHT",),
    grpc.StatusCode.FAILED_PRECONDITION: (
        *("NO_TOKENIZER", "NO_STRUCTURE", "NO_CHAT_TEMPLATE", "NOTHING_LEFT", "STRUCTURE_COST"),
    ),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        # Limits of the service and of a caller: see `runahead.service.calls.admission`.
        *("STREAMS_LIMIT", "CALLER_STREAMS_LIMIT", "QUEUED_TOKENS_LIMIT", "CALLER_QUEUED_TOKENS_LIMIT"),
        *("TOKENIZING_LIMIT", "CALLER_TOKENIZING_LIMIT", "UPLOADS_LIMIT", "CALLER_UPLOADS_LIMIT"),
        *("QUEUE_FULL", "CHAT_COST", "WATCHERS_LIMIT", "STALLED_READER", "SLOW_READER"),
    ),
    grpc.StatusCode.UNIMPLEMENTED: ("NOT_SERVED",),
    grpc.StatusCode.INTERNAL: ("NON_FINITE", "UNEXPECTED", "STRUCTURE_MISMATCH"),
    grpc.StatusCode.UNAVAILABLE: (
        *("STRUCTURE_LOST", "CHAT_LOST"),
        # The engine has stopped, is stopping or does not answer.
        *("SHUTDOWN", "DEVICE", "INTERNAL", "ENGINE_LOST", "ENGINE_SILENT", "PROTOCOL"),
    ),
}
STATUS_OF: Final[Mapping[str, grpc.StatusCode]] = MappingProxyType(
    {reason: code for code, reasons in _REASONS_OF.items() for reason in reasons}
)
# Ends of requests that the engine gave up.
_GIVEN_UP: Final[Mapping[int, tuple[str, str]]] = MappingProxyType(
    {
        FinishReason.NON_FINITE: ("NON_FINITE", "the model's logits are not finite, or the penalties made them so"),
        FinishReason.NOTHING_LEFT: (
            "NOTHING_LEFT",
            "no token is left at this position: the structure, allowed_token_ids and min_tokens forbid all of them",
        ),
        FinishReason.STRUCTURE_LOST: (
            "STRUCTURE_LOST",
            "the request's structure can't be followed any further, since what follows it has died; the request may be "
            "sent again",
        ),
        FinishReason.STRUCTURE_COST: (
            "STRUCTURE_COST",
            "the request's structure costs more to follow at this position than one may, and would do so again with "
            "the same seed",
        ),
        FinishReason.STRUCTURE_MISMATCH: (
            "STRUCTURE_MISMATCH",
            "the request's structure does not take a token that it allowed, which is a fault of the server",
        ),
    }
)

T = TypeVar("T")

NO_TOKENIZER: Final = "is not supported by this server, which was started without a tokenizer: it takes token ids only"

_UNKNOWN: Final = "is the number of a field that this server does not know"
_LENGTH: Final = 2  # wire type of length-delimited values: texts, bytes, messages, packed lists


@dataclass(frozen=True, slots=True)
class Violation:
    """An invalid field by its path, such as `sampling.top_p`, and a sentence that says what it must be."""

    field: str
    sentence: str


class ServiceError(Exception):
    """Ends a call with a status; the sentence and the details go to the client unchanged.

    reason: a key of `STATUS_OF`; an unknown one, from an engine, is UNAVAILABLE.
    details: beside ErrorInfo. retry_s: the delay in RetryInfo, None if unknown. metadata: of ErrorInfo.
    """

    def __init__(
        self,
        reason: str,
        sentence: str,
        details: Sequence[Message] = (),
        *,
        retry_s: float | None = None,
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.code = STATUS_OF.get(reason, grpc.StatusCode.UNAVAILABLE)
        self.sentence = sentence
        self.details = tuple(details)
        self.retry_s = retry_s
        self.metadata = metadata

    def at_index(self, index: int) -> ServiceError:
        """Return the error with the index of the completion that ended the call."""
        sentence = f"completion {index}: {self.sentence}"
        return ServiceError(self.reason, sentence, self.details, retry_s=self.retry_s, metadata={"index": str(index)})


def invalid_argument(violations: Sequence[Violation], reason: str = "INVALID_FIELD") -> ServiceError:
    """Make INVALID_ARGUMENT: the sentence is the first violation's, BadRequest has all."""
    fields = [
        error_details_pb2.BadRequest.FieldViolation(field=violation.field, description=violation.sentence)
        for violation in violations
    ]
    return ServiceError(reason, violations[0].sentence, [error_details_pb2.BadRequest(field_violations=fields)])


def exhausted(
    reason: str, sentence: str, retry_s: float, *, subject: str = "server", limit: tuple[str, int] | None = None
) -> ServiceError:
    """Make RESOURCE_EXHAUSTED with the reached limit and the retry delay.

    subject: whose limit, the server's or a caller's. limit: the setting and its value.
    """
    violation = error_details_pb2.QuotaFailure.Violation(subject=subject, description=sentence)
    if limit is not None:
        violation.quota_id, violation.quota_value = limit
    return ServiceError(reason, sentence, [error_details_pb2.QuotaFailure(violations=[violation])], retry_s=retry_s)


def no_tokenizer() -> ServiceError:
    """Make FAILED_PRECONDITION for a text call on a server without a tokenizer."""
    return ServiceError(
        "NO_TOKENIZER", "this server was started without a tokenizer: it takes and gives token ids, and no text"
    )


def no_structure(why: str) -> ServiceError:
    """Make FAILED_PRECONDITION for a structure that the server can't follow. why: the end of a sentence."""
    return ServiceError("NO_STRUCTURE", f"this server takes no structure: {why}")


def no_chat_template(why: str) -> ServiceError:
    """Make FAILED_PRECONDITION for a chat that can't be rendered. why: a sentence without a period."""
    return ServiceError("NO_CHAT_TEMPLATE", f"this server takes no chat: {why}")


def shutting_down() -> ServiceError:
    """Make UNAVAILABLE for calls during a shutdown."""
    return ServiceError("SHUTDOWN", SHUTDOWN_SENTENCE)


def given_up(reason: int) -> ServiceError | None:
    """Return the error of a request that the engine could not go on with; None if it ended in another way."""
    return ServiceError(*_GIVEN_UP[reason]) if reason in _GIVEN_UP else None


def to_status(error: ServiceError, request_id: str = "", headers: Sequence[tuple[str, str]] = ()) -> grpc.Status:
    """Make the status that aborts a call.

    request_id: for RequestInfo. headers: the call's ids such as `x-request-id`; they go into the trailing metadata and
    into RequestInfo's `serving_data` as space-separated NAME=VALUE.
    """
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata)
    details = [info, *error.details]
    pushback: list[tuple[str, str]] = []
    if error.retry_s is not None:
        delay, milliseconds = Duration(), round(error.retry_s * 1000)
        delay.FromMilliseconds(milliseconds)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        pushback.append((PUSHBACK_HEADER, str(milliseconds)))
    if request_id:
        serving_data = " ".join(f"{name}={value}" for name, value in headers)
        details.append(error_details_pb2.RequestInfo(request_id=request_id, serving_data=serving_data))
    packed = []
    for detail in details:
        any_detail = any_pb2.Any()
        any_detail.Pack(detail)
        packed.append(any_detail)
    code = code_pb2.Code.Value(error.code.name)
    status = rpc_status.to_status(status_pb2.Status(code=code, message=error.sentence, details=packed))
    metadata = (*status.trailing_metadata, *pushback, *headers)
    complete: grpc.Status = status._replace(trailing_metadata=metadata)
    return complete


class Violations:
    """Collects violations."""

    def __init__(self) -> None:
        self._found: list[Violation] = []

    def require(self, good: bool, field: str, sentence: str) -> bool:
        """Record `field sentence` unless `good`. Returns `good`."""
        if not good and len(self._found) < LIMITS.violations:
            self._found.append(Violation(field, f"{field} {sentence}"))
        return good

    def require_at_most(self, limit: int, count: int, field: str) -> bool:
        """Record a list of more than `limit` entries. Returns whether the list is short enough."""
        return self.require(count <= limit, field, f"must have at most {limit} entries, and has {count}")

    def require_ids(self, ids: Sequence[int], limit: int, vocab_size: int, field: str) -> Sequence[int]:
        """Record too many ids, or ids not below `vocab_size` by index. Returns the ids if valid."""
        if not ids or not self.require_at_most(limit, len(ids), field):
            return ()
        # Ids are uint32 on the wire; int64 holds them all.
        return ids if self.require_range(np.fromiter(ids, np.int64, len(ids)), vocab_size, field) else ()

    def require_range(self, ids: NDArray[np.int32] | NDArray[np.int64], vocab_size: int, field: str) -> bool:
        """Record ids not below `vocab_size` by index. Returns whether there are none."""
        wrong: list[int] = np.flatnonzero(ids >= vocab_size).tolist()
        self.require_none(field, wrong, lambda at: (f"{field}[{at}]", id_sentence(int(ids[at]), vocab_size)))
        return not wrong

    def require_between(self, low: float, value: float, high: float, field: str) -> bool:
        """Record a value outside its bounds. Returns whether it is inside."""
        sentence = f"must be {_shown(low)} to {_shown(high)}, and is {_shown(value)}"
        return self.require(low <= value <= high, field, sentence)

    def require_none(self, field: str, wrong: Sequence[T], described: Callable[[T], tuple[str, str]]) -> None:
        """Record the first wrong entries of a list and the number of the others. described: an entry's path and
        sentence.
        """
        for entry in wrong[: LIMITS.list_violations]:
            self.require(False, *described(entry))
        more = len(wrong) - LIMITS.list_violations
        self.require(more <= 0, field, f"has {more} more such entries")

    def require_sizes(self, sizes: Sequence[int], most: int, field: str) -> None:
        """Record texts that are empty or larger than `most`. sizes: bytes in UTF-8."""
        wrong = [index for index, size in enumerate(sizes) if not 0 < size <= most]
        sentence = f"must be 1 to {most} bytes of UTF-8, and has"
        self.require_none(field, wrong, lambda at: (f"{field}[{at}]", f"{sentence} {sizes[at]}"))

    def require_text_bytes(self, text: str) -> None:
        """Record a prompt's text that is too long."""
        limit = LIMITS.prompt_text_bytes
        self.require(len(text.encode()) <= limit, "text", f"must be at most {limit} bytes of UTF-8")

    def require_known(self, request: Message) -> None:
        """Record unknown fields: a newer client's field is refused, never ignored."""
        self.require_none("request", list(unknown_fields(request, LIMITS.unknown_bytes).items()), lambda item: item)

    def raise_if_any(self) -> None:
        """Raise ServiceError (INVALID_ARGUMENT) with the recorded violations, if any."""
        if self._found:
            raise invalid_argument(self._found)


@contextmanager
def checking(request: Message) -> Iterator[Violations]:
    """Collect a request's violations in the body, unknown fields first. Raises ServiceError (INVALID_ARGUMENT) with all
    of them at the body's end.
    """
    found = Violations()
    found.require_known(request)
    yield found
    found.raise_if_any()


def id_sentence(token_id: int, vocab_size: int) -> str:
    """Say why an id is invalid."""
    return f"is token id {token_id}, and the vocabulary has {vocab_size}"


def _shown(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def unknown_fields(request: Message, most_bytes: int) -> dict[str, str]:
    """Return a sentence for each unknown field by its path: `sampling.99` for an unknown number, the field's name for a
    wrong wire type.

    most_bytes: of unknown fields; above this they are not listed one by one, because naming a million takes a second.
    """
    known = type(request)()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    size = request.ByteSize() - known.ByteSize()
    if size > most_bytes:
        return {"request": f"has {size} bytes of fields that are not supported by this server"}
    found: dict[str, str] = {}
    if size:
        _walk(request, "", found)
    return found


def _walk(message: Message, path: str, found: dict[str, str]) -> None:
    fields: Any = message.DESCRIPTOR.fields_by_number
    unknown_set = UnknownFieldSet(message)
    for unknown in (unknown_set[index] for index in range(len(unknown_set))):
        field = fields.get(unknown.field_number)
        if field is None:
            found[f"{path}{unknown.field_number}"] = _UNKNOWN
        elif field.message_type is not None and unknown.wire_type == _LENGTH:
            # The library takes a map entry with one unknown field for an unknown field.
            entry: Any = GetMessageClass(field.message_type).FromString(unknown.data)
            _walk(entry, f"{path}{field.name}[{entry.key}].", found)
        else:
            found[f"{path}{field.name}"] = "is encoded as another type than the contract's"
    for field, value in message.ListFields():
        if isinstance(value, Message):
            _walk(value, f"{path}{field.name}.", found)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for index, entry in enumerate(value):
                _walk(entry, f"{path}{field.name}[{index}].", found)
