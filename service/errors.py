"""What goes wrong, as a client sees it: a status code, a sentence and `google.rpc` details."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

ERROR_DOMAIN: Final = "runahead"
INTERNAL_SENTENCE: Final = "the server failed to serve this request; its log has the reason under the request's id"


@dataclass(frozen=True, slots=True)
class Violation:
    """A field by its path, such as `sampling.top_p`, and a sentence that says what it must be."""

    field: str
    sentence: str


class ServiceError(Exception):
    """Ends a call with a status. The sentence and the details go to the client as they are."""

    def __init__(self, code: grpc.StatusCode, sentence: str, details: Sequence[Message] = ()) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence
        self.details = tuple(details)


def invalid_argument(violations: Sequence[Violation]) -> ServiceError:
    """INVALID_ARGUMENT; the sentence is that of the first violation, BadRequest has them all."""
    fields = [
        error_details_pb2.BadRequest.FieldViolation(field=violation.field, description=violation.sentence)
        for violation in violations
    ]
    bad_request = error_details_pb2.BadRequest(field_violations=fields)
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, violations[0].sentence, [bad_request])


def already_exists(request_id: str) -> ServiceError:
    """ALREADY_EXISTS for a request id in use."""
    return ServiceError(grpc.StatusCode.ALREADY_EXISTS, f"request_id {request_id!r} is in use")


def exhausted(sentence: str, retry_s: float) -> ServiceError:
    """RESOURCE_EXHAUSTED, and when to try again."""
    delay = Duration()
    delay.FromMilliseconds(round(retry_s * 1000))
    return ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence, [error_details_pb2.RetryInfo(retry_delay=delay)])


def no_tokenizer() -> ServiceError:
    """FAILED_PRECONDITION for a call that is about text, on a server without a tokenizer."""
    return ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "this server was started without a tokenizer: it takes and gives token ids, and no text",
    )


def slow_reader() -> ServiceError:
    """RESOURCE_EXHAUSTED for a stream whose reader left too much unread. Trying again does not help a slow reader."""
    return ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "the stream's reader is too slow: too much is unread")


def unavailable(reason: str, sentence: str) -> ServiceError:
    """UNAVAILABLE; `reason`, such as SHUTDOWN, is in ErrorInfo."""
    info = error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN)
    return ServiceError(grpc.StatusCode.UNAVAILABLE, sentence, [info])


def non_finite() -> ServiceError:
    """INTERNAL for a request whose logits were NaN or infinite, as the model gave them or after its penalties."""
    info = error_details_pb2.ErrorInfo(reason="NON_FINITE", domain=ERROR_DOMAIN)
    return ServiceError(
        grpc.StatusCode.INTERNAL, "the model's logits are not finite, or the penalties made them so", [info]
    )


def internal() -> ServiceError:
    """INTERNAL with a fixed sentence."""
    return ServiceError(grpc.StatusCode.INTERNAL, INTERNAL_SENTENCE)


def to_status(error: ServiceError, request_id: str = "") -> grpc.Status:
    """The status to abort a call with; with a request id, RequestInfo is among its details."""
    details = list(error.details)
    if request_id:
        details.append(error_details_pb2.RequestInfo(request_id=request_id))
    packed = []
    for detail in details:
        any_detail = Any()
        any_detail.Pack(detail)
        packed.append(any_detail)
    code = code_pb2.Code.Value(error.code.name)
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=code, message=error.sentence, details=packed))
    return status
