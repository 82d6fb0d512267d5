"""A server of a model that speaks bytes: its ids are the bytes of a text, so that a test reads what it was sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import grpc

from runahead.service.contract.errors import Violation, invalid_argument, to_status
from runahead.v1 import generate_pb2, generation_service_pb2_grpc, model_pb2

BEGIN, END = "<|im_start|>", "<|im_end|>"
EVIL: Final = "a\x1b]0;title\x07b\x9b2Jc\r\nd\te"  # sets a title, clears the screen


class ChatService(generation_service_pb2_grpc.GenerationServiceServicer):
    """Answers the last message by what it says."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.requests: list[generate_pb2.GenerateRequest] = []
        self.cancelled = threading.Event()
        self.info = model_pb2.GetModelInfoResponse(
            model="bytes\x1b[2J",
            has_tokenizer=True,
            chat=True,
            chat_template="{{ messages }}",
            context_length=400,
            eos_token_ids=[301],
            limits=model_pb2.Limits(prompt_tokens=399, prompt_text_bytes=1 << 20, max_tokens=1 << 20),
        )

    def GetModelInfo(self, request: Any, context: Any) -> model_pb2.GetModelInfoResponse:
        return self.info

    def Generate(self, request: Any, context: Any) -> Iterator[generate_pb2.GenerateResponse]:
        prompt = said(*((message.role, message.content) for message in request.chat.messages))
        if len(prompt) > self.info.limits.prompt_tokens:
            sentence = f"chat has {len(prompt)} tokens, and the context has less"
            error = invalid_argument([Violation("chat", sentence)])
            context.abort_with_status(to_status(error))
        self.prompts.append(prompt)
        self.requests.append(request)
        message = prompt.rpartition(f"{BEGIN}user\n")[2].partition(END)[0]
        if message == "endless":  # asked before anything is sent: the client may cancel at its first sight
            context.add_callback(self.cancelled.set)
        yield generate_pb2.GenerateResponse(accepted=generate_pb2.Accepted(request_id="r", prompt_tokens=len(prompt)))
        if message == "refuse":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many\x1b[2J of them")
        text = EVIL if message == "evil" else f"You said {message}."
        for part in (text[:3], text[3:]):
            yield generate_pb2.GenerateResponse(delta=generate_pb2.Delta(text=part))
        if message == "endless":
            self.cancelled.wait()
            return
        reason = generate_pb2.FINISH_REASON_LENGTH if message == "long" else generate_pb2.FINISH_REASON_END_OF_SEQUENCE
        finished = generate_pb2.Finished(reason=reason)
        finished.usage.prompt_tokens, finished.usage.completion_tokens = len(prompt), 21
        finished.timing.decode.FromMilliseconds(100)
        yield generate_pb2.GenerateResponse(finished=finished)


@contextmanager
def serving(service: ChatService) -> Iterator[str]:
    """Its address."""
    server = grpc.server(ThreadPoolExecutor(4))
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        service.cancelled.set()
        server.stop(None).wait()


def said(*messages: tuple[str, str]) -> str:
    """The prompt of messages, each with who says it, as the template has it."""
    return "".join(f"{BEGIN}{role}\n{content}{END}\n" for role, content in messages) + f"{BEGIN}assistant\n"
