"""The same as generate.py with asyncio.

python generate_asyncio.py HOST:PORT [CA_FILE TOKEN_FILE]
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import grpc
from generate import CHAT, COMPLETION, SERVICE_CONFIG, TIMEOUT_S, explain
from runahead_client.v1 import (
    AbortOutcome,
    AbortRequest,
    FinishReason,
    GenerateRequest,
    GenerationServiceStub,
    StoppingOptions,
)


def connect(address: str, ca_file: str | None = None, token_file: str | None = None) -> grpc.aio.Channel:
    options = [("grpc.service_config", json.dumps(SERVICE_CONFIG))]
    if ca_file is None or token_file is None:
        return grpc.aio.insecure_channel(address, options)
    credentials = grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials(Path(ca_file).read_bytes()),
        grpc.access_token_call_credentials(Path(token_file).read_text().strip()),
    )
    return grpc.aio.secure_channel(address, credentials, options)


async def stream(service: Any, request: GenerateRequest) -> None:
    """Prints text as it arrives: `accepted` comes first, then deltas, and `finished` last."""
    async for response in service.Generate(request, timeout=TIMEOUT_S):
        if response.HasField("delta"):
            print(response.delta.text, end="", flush=True)
        elif response.HasField("finished"):
            usage = response.finished.usage
            print(f"\nfinished: {FinishReason.Name(response.finished.reason)}, {usage.completion_tokens} tokens")


async def chat(service: Any) -> None:
    """Streams the answer of a chat. A model without a chat template takes none."""
    try:
        await stream(service, CHAT)
    except grpc.aio.AioRpcError as error:
        explain(error)


async def abort(service: Any) -> None:
    """Ends a stream by its id, as another process could. A task that is cancelled ends its own stream by that."""
    request = GenerateRequest(text="def main():\n", stopping=StoppingOptions(max_tokens=2000, ignore_eos=True))
    request_id = ""
    async for response in service.Generate(request, timeout=TIMEOUT_S):
        if response.HasField("accepted"):
            request_id = response.accepted.request_id
        elif response.HasField("delta") and request_id:
            answer = await service.Abort(AbortRequest(request_ids=[request_id]), timeout=TIMEOUT_S)
            print(f"abort: {AbortOutcome.Name(answer.results[0].outcome)}")
            request_id = ""  # once is enough; what was on its way still arrives
        elif response.HasField("finished"):
            print(f"finished: {FinishReason.Name(response.finished.reason)}")


async def refused(service: Any) -> None:
    """Asks for what no server gives."""
    request = GenerateRequest(text="x", stopping=StoppingOptions(max_tokens=0))
    try:
        async for _ in service.Generate(request, timeout=TIMEOUT_S):
            pass
    except grpc.aio.AioRpcError as error:
        explain(error)


async def main() -> int:
    async with connect(*sys.argv[1:]) as channel:
        service: Any = GenerationServiceStub(channel)
        try:
            await stream(service, COMPLETION)
            await chat(service)
            await abort(service)
            await refused(service)
        except grpc.aio.AioRpcError as error:
            explain(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
