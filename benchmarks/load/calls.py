"""One completion as a client sees it: its times, its tokens, and whether it ended once and as it may."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from runahead.v1 import GenerateRequest, GenerationServiceStub

PATIENCE_S = 120.0  # a call without an end after so long has lost it


@dataclass(slots=True)
class Call:
    """Seconds are of the monotonic clock. code: how the call ended. reason: of ErrorInfo, where it failed.

    fault: a sentence where the stream was none: an event at the wrong place, no end, or more than one.
    """

    began_s: float
    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    reason: str = ""
    what: str = ""  # the sentence that came with the status
    accepted_s: float | None = None
    first_token_s: float | None = None
    ended_s: float = 0.0
    tokens: tuple[int, ...] = ()
    is_finished: bool = False
    fault: str = ""

    @property
    def is_refused(self) -> bool:
        """Whether the call was refused for lack of room, before any work."""
        return self.code == grpc.StatusCode.RESOURCE_EXHAUSTED and self.accepted_s is None

    def wrong(self, expected: tuple[int, ...]) -> str:
        """What is wrong with the call, which may have been refused and nothing else; empty where nothing is."""
        if self.fault or self.is_refused:
            return self.fault
        if self.is_finished and self.code != grpc.StatusCode.OK:
            return f"a status {self.code.name} followed the end"
        if not self.is_finished:
            return f"ended with {self.code.name} ({self.reason}): {self.what}"
        if self.tokens != expected:
            return f"its {len(self.tokens)} tokens are not the {len(expected)} of the calm run"
        return ""


async def completed(
    stub: GenerationServiceStub,
    request: GenerateRequest,
    *,
    metadata: Sequence[tuple[str, str]] = (),
    patience_s: float = PATIENCE_S,
) -> Call:
    """Makes a call and reads it to its end."""
    call = Call(time.monotonic())
    tokens: list[int] = []
    stream = stub.Generate(request, timeout=patience_s, metadata=tuple(metadata))
    try:
        async for response in stream:
            now, kind = time.monotonic(), response.WhichOneof("event")
            if call.is_finished:
                call.fault = call.fault or f"an event {kind!r} followed the end"
            elif (kind == "accepted") != (call.accepted_s is None):
                call.fault = call.fault or f"an event {kind!r} where it does not belong"
            elif kind == "accepted":
                call.accepted_s = now
            elif kind == "delta":
                call.first_token_s = call.first_token_s or now
                tokens += [token.id for token in response.delta.tokens]
            elif kind == "finished":
                call.is_finished = True
                if response.finished.usage.completion_tokens != len(tokens):
                    call.fault = f"{len(tokens)} tokens came and {response.finished.usage.completion_tokens} were sent"
        call.code = grpc.StatusCode.OK
        if not call.is_finished:
            call.fault = call.fault or "the call ended well without an end of its stream"
    except grpc.RpcError as error:
        _note_failure(call, error)
    call.ended_s, call.tokens = time.monotonic(), tuple(tokens)
    return call


def reason_of(error: grpc.RpcError) -> str:
    """What ErrorInfo names; empty where the status has none."""
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    for detail in () if status is None else status.details:
        if detail.Unpack(info):
            return str(info.reason)
    return ""


def _note_failure(call: Call, error: grpc.RpcError) -> None:
    call.code, call.what, call.reason = error.code(), error.details() or "", reason_of(error)
    if call.code == grpc.StatusCode.DEADLINE_EXCEEDED and not call.reason and not call.is_finished:
        call.fault = "the call had no end in time"
