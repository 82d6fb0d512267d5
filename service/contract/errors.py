"""What goes wrong, as a client sees it: a status code, a sentence and `google.rpc` details.

Each error has a reason, which `ErrorInfo` carries under the domain `runahead`, and `STATUS_OF` is the one table that
says which status a reason has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from runahead.runtime.wire.parameters import FinishReason

ERROR_DOMAIN: Final = "runahead"
INTERNAL_SENTENCE: Final = "the server failed to serve this request; its log has the reason under the request's id"
SHUTDOWN_SENTENCE: Final = "the server is shutting down"
PUSHBACK_HEADER: Final = "grpc-retry-pushback-ms"  # gRPC's own clients come back after this many milliseconds

STATUS_OF: Final[Mapping[str, grpc.StatusCode]] = MappingProxyType(
    {
        "INVALID_FIELD": grpc.StatusCode.INVALID_ARGUMENT,
        "MALFORMED": grpc.StatusCode.INVALID_ARGUMENT,
        "DUPLICATE_ID": grpc.StatusCode.ALREADY_EXISTS,
        "NO_MESSAGE": grpc.StatusCode.INVALID_ARGUMENT,
        "SECOND_MESSAGE": grpc.StatusCode.INVALID_ARGUMENT,
        "UPLOAD_TIMEOUT": grpc.StatusCode.DEADLINE_EXCEEDED,
        "TOO_LONG": grpc.StatusCode.DEADLINE_EXCEEDED,
        "NO_CREDENTIALS": grpc.StatusCode.UNAUTHENTICATED,
        "UNKNOWN_CREDENTIALS": grpc.StatusCode.UNAUTHENTICATED,
        "NO_RIGHT": grpc.StatusCode.PERMISSION_DENIED,
        "NO_TOKENIZER": grpc.StatusCode.FAILED_PRECONDITION,
        "NO_STRUCTURE": grpc.StatusCode.FAILED_PRECONDITION,
        "NO_CHAT_TEMPLATE": grpc.StatusCode.FAILED_PRECONDITION,
        "NOTHING_LEFT": grpc.StatusCode.FAILED_PRECONDITION,
        "STRUCTURE_COST": grpc.StatusCode.FAILED_PRECONDITION,
        # Of the service in all, and of a caller: see `runahead.service.calls.admission`.
        "STREAMS_LIMIT": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CALLER_STREAMS_LIMIT": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUED_TOKENS_LIMIT": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CALLER_QUEUED_TOKENS_LIMIT": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TOKENIZING_LIMIT": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CALLER_TOKENIZING_LIMIT": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "UPLOADS_LIMIT": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CALLER_UPLOADS_LIMIT": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CHAT_COST": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "WATCHERS_LIMIT": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "STALLED_READER": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "SLOW_READER": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "NOT_SERVED": grpc.StatusCode.UNIMPLEMENTED,
        "NON_FINITE": grpc.StatusCode.INTERNAL,
        "UNEXPECTED": grpc.StatusCode.INTERNAL,
        "STRUCTURE_MISMATCH": grpc.StatusCode.INTERNAL,
        "STRUCTURE_LOST": grpc.StatusCode.UNAVAILABLE,
        "CHAT_LOST": grpc.StatusCode.UNAVAILABLE,
        # The engine has stopped, or is about to, or does not answer.
        "SHUTDOWN": grpc.StatusCode.UNAVAILABLE,
        "DEVICE": grpc.StatusCode.UNAVAILABLE,
        "INTERNAL": grpc.StatusCode.UNAVAILABLE,
        "ENGINE_LOST": grpc.StatusCode.UNAVAILABLE,
        "ENGINE_SILENT": grpc.StatusCode.UNAVAILABLE,
        "PROTOCOL": grpc.StatusCode.UNAVAILABLE,
    }
)


@dataclass(frozen=True, slots=True)
class Violation:
    """A field by its path, such as `sampling.top_p`, and a sentence that says what it must be."""

    field: str
    sentence: str


class ServiceError(Exception):
    """Ends a call with a status. The sentence and the details go to the client as they are.

    reason: a key of `STATUS_OF`; one that is not there, which only an engine gives, is UNAVAILABLE.
    details: beside ErrorInfo. retry_s: when to try again, for RetryInfo; None where nobody can say. metadata: of
    ErrorInfo.
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
        """The same, where this completion of several has ended the call."""
        sentence = f"completion {index}: {self.sentence}"
        return ServiceError(self.reason, sentence, self.details, retry_s=self.retry_s, metadata={"index": str(index)})


def invalid_argument(violations: Sequence[Violation], reason: str = "INVALID_FIELD") -> ServiceError:
    """INVALID_ARGUMENT; the sentence is that of the first violation, BadRequest has them all."""
    fields = [
        error_details_pb2.BadRequest.FieldViolation(field=violation.field, description=violation.sentence)
        for violation in violations
    ]
    return ServiceError(reason, violations[0].sentence, [error_details_pb2.BadRequest(field_violations=fields)])


def already_exists(request_id: str) -> ServiceError:
    """ALREADY_EXISTS for a request id in use."""
    return ServiceError("DUPLICATE_ID", f"request_id {request_id!r} is in use")


def exhausted(
    reason: str, sentence: str, retry_s: float, *, subject: str = "server", limit: tuple[str, int] | None = None
) -> ServiceError:
    """RESOURCE_EXHAUSTED: which limit was reached, and when to try again.

    subject: whose limit, of the server in all or of a caller. limit: the setting that says it, and its value.
    """
    violation = error_details_pb2.QuotaFailure.Violation(subject=subject, description=sentence)
    if limit is not None:
        violation.quota_id, violation.quota_value = limit
    return ServiceError(reason, sentence, [error_details_pb2.QuotaFailure(violations=[violation])], retry_s=retry_s)


def no_tokenizer() -> ServiceError:
    """FAILED_PRECONDITION for a call that is about text, on a server without a tokenizer."""
    return ServiceError(
        "NO_TOKENIZER", "this server was started without a tokenizer: it takes and gives token ids, and no text"
    )


def no_structure(why: str) -> ServiceError:
    """FAILED_PRECONDITION for a request with a structure, on a server that can't follow one. why: the end of a
    sentence."""
    return ServiceError("NO_STRUCTURE", f"this server takes no structure: {why}")


def no_chat_template(why: str) -> ServiceError:
    """FAILED_PRECONDITION for a chat that no template can be rendered for. why: a sentence without its end."""
    return ServiceError("NO_CHAT_TEMPLATE", f"this server takes no chat: {why}")


def slow_reader() -> ServiceError:
    """RESOURCE_EXHAUSTED for a stream whose reader left too much unread. Trying again does not help a slow reader."""
    return ServiceError("SLOW_READER", "the stream's reader is too slow: too much is unread")


def stalled_reader(after_s: float) -> ServiceError:
    """RESOURCE_EXHAUSTED for a stream of which nothing was read for so long."""
    return ServiceError("STALLED_READER", f"nothing of the stream was read for {after_s:g} s")


def unavailable(reason: str, sentence: str) -> ServiceError:
    """UNAVAILABLE, for a reason such as SHUTDOWN or one that the engine gives."""
    return ServiceError(reason, sentence)


def shutting_down() -> ServiceError:
    """UNAVAILABLE for every call that a shutdown meets."""
    return unavailable("SHUTDOWN", SHUTDOWN_SENTENCE)


def given_up(reason: int) -> ServiceError | None:
    """For a request that the engine has ended since it could not go on. None where it ended in another way.

    reason: a `FinishReason` of the wire. INTERNAL for logits that were NaN or infinite, as the model gave them or after
    penalties, and where the grammar does not take a token that its mask allowed; FAILED_PRECONDITION where all that the
    grammar allows is forbidden, or it costs more than it may; UNAVAILABLE where who followed it is gone.
    """
    match reason:
        case FinishReason.NON_FINITE:
            return ServiceError("NON_FINITE", "the model's logits are not finite, or the penalties made them so")
        case FinishReason.NOTHING_LEFT:
            sentence = (
                "no token is left at this position: the structure, allowed_token_ids and min_tokens forbid all of them"
            )
            return ServiceError("NOTHING_LEFT", sentence)
        case FinishReason.STRUCTURE_LOST:
            sentence = (
                "the request's structure can't be followed any further, since what follows it has died; the request "
                "may be sent again"
            )
            return ServiceError("STRUCTURE_LOST", sentence)
        case FinishReason.STRUCTURE_COST:
            sentence = (
                "the request's structure costs more to follow at this position than one may, "
                "and would do so again with the same seed"
            )
            return ServiceError("STRUCTURE_COST", sentence)
        case FinishReason.STRUCTURE_MISMATCH:
            sentence = "the request's structure does not take a token that it allowed, which is a fault of the server"
            return ServiceError("STRUCTURE_MISMATCH", sentence)
    return None


def internal() -> ServiceError:
    """INTERNAL with a fixed sentence."""
    return ServiceError("UNEXPECTED", INTERNAL_SENTENCE)


def to_status(error: ServiceError, request_id: str = "", headers: Sequence[tuple[str, str]] = ()) -> grpc.Status:
    """The status to abort a call with.

    request_id: what RequestInfo calls the request. headers: what else a call is known by, `x-request-id` and the like;
    they are in the trailing metadata, and in RequestInfo as `serving_data`, NAME=VALUE with spaces between.
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
        any_detail = Any()
        any_detail.Pack(detail)
        packed.append(any_detail)
    code = code_pb2.Code.Value(error.code.name)
    status = rpc_status.to_status(status_pb2.Status(code=code, message=error.sentence, details=packed))
    metadata = (*status.trailing_metadata, *pushback, *headers)
    complete: grpc.Status = status._replace(trailing_metadata=metadata)
    return complete
