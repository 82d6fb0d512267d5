"""What callers with a library of gRPC do wrong, or do and regret. Each is done again and again, and counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import grpc

from benchmarks.soak.world import PATIENCE_S, World, completion, now_s
from runahead.v1 import (
    AbortRequest,
    FinishReason,
    GenerateRequest,
    GenerationServiceStub,
    SamplingOptions,
    StatsRequest,
    StoppingOptions,
    TokenIds,
)

Fault = Callable[[World, GenerationServiceStub, grpc.aio.Channel], Awaitable[None]]
_GENERATE: Final = "/runahead.v1.GenerationService/Generate"
_INVALID: Final = (
    GenerateRequest(),
    GenerateRequest(text=""),
    GenerateRequest(text="x" * ((1 << 20) + 1)),
    GenerateRequest(token_ids=TokenIds(ids=[1 << 30])),
    GenerateRequest(text="x", sampling=SamplingOptions(temperature=-1.0)),
    GenerateRequest(text="x", sampling=SamplingOptions(top_p=2.0)),
    GenerateRequest(text="x", stopping=StoppingOptions(max_tokens=0)),
    GenerateRequest(text="x", request_id="not an id"),
    GenerateRequest(text="def f(x):\n" * 5000),
)


async def _ended(world: World, name: str, call: Any, *codes: grpc.StatusCode) -> None:
    """Reads a call to its end, which must have one of these codes."""
    began_s, failed = now_s(), None
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.RpcError as error:
        failed = error
    world.expect(name, began_s, failed, codes)


async def cancelled(world: World, stub: GenerationServiceStub, channel: grpc.aio.Channel) -> None:
    """A call is cancelled before it is accepted, while its prompt is computed, and while it brings tokens."""
    for name, events in (("at once", 0), ("in the prefill", 1), ("in the decode", 4)):
        began_s, seen = now_s(), 0
        request = completion(400, lines=100, salt=world.new_id())
        call = stub.Generate(request, timeout=PATIENCE_S, metadata=world.metadata("noise"))
        try:
            if not events:
                await asyncio.sleep(0)
            while seen < events and await call.read() is not grpc.aio.EOF:
                seen += 1
            is_open = call.cancel()
            await call.code()
            world.happened(f"cancelled {name}" if is_open else "calls that had ended before they were cancelled")
        except grpc.RpcError as error:
            world.expect(f"cancelled {name}", began_s, error, [grpc.StatusCode.CANCELLED])


async def invalid(world: World, stub: GenerationServiceStub, channel: grpc.aio.Channel) -> None:
    """Fields that are wrong, bytes that are no message, a message and headers that are too large, no such method."""
    mine: dict[str, Any] = {"timeout": PATIENCE_S, "metadata": world.metadata("noise")}
    for request in _INVALID:
        await _ended(world, "invalid fields", stub.Generate(request, **mine), grpc.StatusCode.INVALID_ARGUMENT)
    raw: Any = channel.unary_stream(_GENERATE)
    await _ended(world, "bytes that are no message", raw(b"\xff\xff", **mine), grpc.StatusCode.INVALID_ARGUMENT)
    large = GenerateRequest(token_ids=TokenIds(ids=[1] * (5 << 20))).SerializeToString()
    await _ended(world, "a message that is too large", raw(large, **mine), grpc.StatusCode.RESOURCE_EXHAUSTED)
    headers = (*world.metadata("noise"), ("x-long", "x" * 20_000))
    long_headers = stub.Generate(completion(1), timeout=PATIENCE_S, metadata=headers)
    await _ended(world, "headers that are too long", long_headers, grpc.StatusCode.RESOURCE_EXHAUSTED)
    absent: Any = channel.unary_stream("/runahead.v1.GenerationService/Absent")
    codes = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED)
    await _ended(world, "a method that is not there", absent(b"", **mine), *codes)


async def stranger(world: World, stub: GenerationServiceStub, channel: grpc.aio.Channel) -> None:
    """No credential, one that nobody has, and one without the right."""
    for name, metadata in (("none", ()), ("unknown", (("authorization", "Bearer nobody-has-this-token"),))):
        call = stub.Generate(completion(1), timeout=PATIENCE_S, metadata=metadata)
        await _ended(world, f"credentials: {name}", call, grpc.StatusCode.UNAUTHENTICATED)
    began_s, failed = now_s(), None
    try:
        await stub.Stats(StatsRequest(), timeout=PATIENCE_S, metadata=world.metadata("noise"))
    except grpc.RpcError as error:
        failed = error
    world.expect("credentials: without the right", began_s, failed, [grpc.StatusCode.PERMISSION_DENIED])


async def duplicate(world: World, stub: GenerationServiceStub, channel: grpc.aio.Channel) -> None:
    """An id that is in use; the request that has it goes on to its end."""
    request, mine = completion(300), world.metadata("noise")  # long enough to be there when the second comes
    request.request_id = world.new_id()
    first = stub.Generate(request, timeout=PATIENCE_S, metadata=mine)
    with contextlib.suppress(grpc.RpcError):
        if await first.read() is not grpc.aio.EOF:
            second = stub.Generate(request, timeout=PATIENCE_S, metadata=mine)
            await _ended(world, "an id that is in use", second, grpc.StatusCode.ALREADY_EXISTS)
    await _ended(world, "the request that has the id ends well", first, grpc.StatusCode.OK)


async def aborted(world: World, stub: GenerationServiceStub, channel: grpc.aio.Channel) -> None:
    """One by its id, and then all of a caller's."""
    mine = world.metadata("aborter")
    for count in (1, 4):
        requests = [completion(800, lines=10) for _ in range(count)]
        for request in requests:
            request.request_id = world.new_id()
        began_s = now_s()
        calls = [stub.Generate(request, timeout=PATIENCE_S, metadata=mine) for request in requests]
        try:
            for call in calls:
                await call.read()
            ids = [request.request_id for request in requests]
            order = AbortRequest(request_ids=ids) if count == 1 else AbortRequest(all=True)
            await stub.Abort(order, timeout=PATIENCE_S, metadata=mine)
            for call in calls:
                reason = await _reason(call)
                if reason != FinishReason.FINISH_REASON_ABORTED:
                    world.wrong.append(f"aborted: ended with {FinishReason.Name(reason)}")
                world.happened("aborted by its id" if count == 1 else "aborted with all of its caller's")
        except grpc.RpcError as error:
            world.expect("aborted", began_s, error, [])
            for call in calls:
                call.cancel()


async def _reason(call: Any) -> int:
    reason = FinishReason.FINISH_REASON_UNSPECIFIED
    while (event := await call.read()) is not grpc.aio.EOF:
        if event.HasField("finished"):
            reason = event.finished.reason
    return int(reason)


async def deadlines(
    world: World, stub: GenerationServiceStub, channel: grpc.aio.Channel, step_s: float = 0.002
) -> None:
    """A storm of calls that have a few milliseconds: step_s, twice as long, and so on."""
    mine = world.metadata("noise")
    calls = [stub.Generate(completion(300), timeout=step_s * number, metadata=mine) for number in range(1, 21)]
    for call in calls:
        await _ended(world, "deadlines that pass", call, grpc.StatusCode.DEADLINE_EXCEEDED)


async def burst(world: World, stub: GenerationServiceStub, channel: grpc.aio.Channel) -> None:
    """More calls at once than their caller may have."""
    mine = world.metadata("noise")
    calls = [stub.Generate(completion(2), timeout=PATIENCE_S, metadata=mine) for _ in range(80)]
    await asyncio.gather(*(_ended(world, "let in, in a burst", call, grpc.StatusCode.OK) for call in calls))


async def pressed(world: World, stub: GenerationServiceStub, channel: grpc.aio.Channel) -> None:
    """Completions that are short at first and take all KV blocks as they grow: rows have to pause, or to be evicted."""
    mine = world.metadata("noise")
    calls = [stub.Generate(completion(450), timeout=PATIENCE_S, metadata=mine) for _ in range(6)]
    await asyncio.gather(
        *(_ended(world, "completions that take all blocks", call, grpc.StatusCode.OK) for call in calls)
    )


FAULTS: Final[Sequence[tuple[Fault, float]]] = (  # and about how many seconds lie between two times
    (cancelled, 0.5),
    (invalid, 3.0),
    (stranger, 1.0),
    (duplicate, 1.0),
    (aborted, 1.0),
    (deadlines, 2.0),
    (burst, 5.0),
    (pressed, 3.0),
)
WANTED: Final = (
    "cancelled at once", "cancelled in the prefill", "cancelled in the decode", "invalid fields",
    "bytes that are no message", "a message that is too large", "headers that are too long",
    "a method that is not there", "credentials: none", "credentials: unknown", "credentials: without the right",
    "an id that is in use", "the request that has the id ends well", "aborted by its id",
    "aborted with all of its caller's", "deadlines that pass", "let in, in a burst", "refused for want of room",
    "completions that take all blocks",
)  # fmt: skip


async def keep_doing(world: World, fault: Fault, every_s: float) -> None:
    """Run until the soak has ended, on a separate connection."""
    channel, stub = world.connect()
    draws = world.draws(fault.__name__)
    while await world.pause(draws.expovariate(1 / every_s)):
        await fault(world, stub, channel)
