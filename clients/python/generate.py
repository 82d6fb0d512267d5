"""Streams a completion and the answer of a chat, aborts a completion, and reads what a refusal says.

python generate.py HOST:PORT [CA_FILE TOKEN_FILE]

With CA_FILE and TOKEN_FILE the calls go through TLS and carry the token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from runahead_client.v1 import (
    AbortOutcome,
    AbortRequest,
    Chat,
    ChatMessage,
    FinishReason,
    GenerateRequest,
    GenerationServiceStub,
    SamplingOptions,
    StoppingOptions,
)

# Calls are spread over the servers behind a name, and made again after UNAVAILABLE alone, by gRPC itself.
SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [{"service": "runahead.v1.GenerationService"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}
TIMEOUT_S = 60.0

COMPLETION = GenerateRequest(
    text="def read_lines(path):\n",
    sampling=SamplingOptions(temperature=0),
    stopping=StoppingOptions(max_tokens=32),
)
# The server makes a prompt of the messages, with the model's chat template.
CHAT = GenerateRequest(
    chat=Chat(
        messages=[
            ChatMessage(role="system", content="Answer in one sentence."),
            ChatMessage(role="user", content="How does Python read the lines of a file?"),
        ]
    ),
    sampling=SamplingOptions(temperature=0),
    stopping=StoppingOptions(max_tokens=32),
)


def connect(address: str, ca_file: str | None = None, token_file: str | None = None) -> grpc.Channel:
    options = [("grpc.service_config", json.dumps(SERVICE_CONFIG))]
    if ca_file is None or token_file is None:
        return grpc.insecure_channel(address, options)
    credentials = grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials(Path(ca_file).read_bytes()),
        grpc.access_token_call_credentials(Path(token_file).read_text().strip()),  # authorization: Bearer TOKEN
    )
    return grpc.secure_channel(address, credentials, options)


def stream(service: GenerationServiceStub, request: GenerateRequest) -> None:
    """Prints text as it arrives: `accepted` comes first, then deltas, and `finished` last."""
    for response in service.Generate(request, timeout=TIMEOUT_S):
        if response.HasField("delta"):
            print(response.delta.text, end="", flush=True)
        elif response.HasField("finished"):
            usage = response.finished.usage
            print(f"\nfinished: {FinishReason.Name(response.finished.reason)}, {usage.completion_tokens} tokens")


def chat(service: GenerationServiceStub) -> None:
    """Streams the answer of a chat. A model without a chat template takes none."""
    try:
        stream(service, CHAT)
    except grpc.RpcError as error:
        explain(error)


def abort(service: GenerationServiceStub) -> None:
    """Ends a stream by its id, as another process could. To end one's own, `call.cancel()` does."""
    request = GenerateRequest(text="def main():\n", stopping=StoppingOptions(max_tokens=2000, ignore_eos=True))
    request_id = ""
    for response in service.Generate(request, timeout=TIMEOUT_S):
        if response.HasField("accepted"):
            request_id = response.accepted.request_id
        elif response.HasField("delta") and request_id:
            answer = service.Abort(AbortRequest(request_ids=[request_id]), timeout=TIMEOUT_S)
            print(f"abort: {AbortOutcome.Name(answer.results[0].outcome)}")
            request_id = ""  # once is enough; what was on its way still arrives
        elif response.HasField("finished"):
            print(f"finished: {FinishReason.Name(response.finished.reason)}")


def refused(service: GenerationServiceStub) -> None:
    """Asks for what no server gives."""
    request = GenerateRequest(text="x", stopping=StoppingOptions(max_tokens=0))
    try:
        list(service.Generate(request, timeout=TIMEOUT_S))
    except grpc.RpcError as error:
        explain(error)


def explain(error: grpc.RpcError) -> None:
    """Prints an error's code and sentence, and the details that say what to do about it."""
    print(f"refused: {error.code().name}: {error.details()}")
    status = rpc_status.from_call(error)  # google.rpc.Status, or None
    for packed in status.details if status else ():
        info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if packed.Unpack(info):
            print(f"  reason {info.reason} of {info.domain}")
        elif packed.Unpack(bad_request):
            for violation in bad_request.field_violations:
                print(f"  field {violation.field}: {violation.description}")
        elif packed.Unpack(retry):
            print(f"  try again in {retry.retry_delay.ToTimedelta().total_seconds():.1f} s")


def main() -> int:
    with connect(*sys.argv[1:]) as channel:
        service = GenerationServiceStub(channel)
        try:
            stream(service, COMPLETION)
            chat(service)
            abort(service)
            refused(service)
        except grpc.RpcError as error:
            explain(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
