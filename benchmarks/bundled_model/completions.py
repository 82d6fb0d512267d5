"""Function heads from files the model never saw, completed by the running service."""

from __future__ import annotations

import ast
import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.bundled_model.corpus import SourceFile, is_python
from benchmarks.local_service import local_service
from runahead.v1 import generate_pb2, generation_service_pb2_grpc

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A head and what the service made of it. `ended`: by itself, with the end token. `parses`: head and completion."""

    head: str
    text: str
    ended: bool
    parses: bool


def head_of(definition: str) -> str | None:
    """A function's decorators, signature and docstring, with the newline; None if nothing is left to complete."""
    node = ast.parse(definition).body[0]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    last = node.body[0].lineno - 1
    if ast.get_docstring(node, clean=False) is not None:
        if len(node.body) == 1:
            return None
        last = node.body[0].end_lineno or last
    if last < node.lineno:
        return None  # a body on the line of its `def`
    return "\n".join(definition.split("\n")[:last]) + "\n"


def choose_heads(files: Sequence[SourceFile], count: int) -> list[str]:
    """`count` heads of the top-level functions of `files`, in the order of their SHA-256."""
    heads = {head for file in files for text in file.definitions if (head := head_of(text)) is not None}
    return sorted(heads, key=lambda head: hashlib.sha256(head.encode()).digest())[:count]


async def _complete(url: str, heads: Sequence[str], max_tokens: int, temperature: float) -> list[Completion]:
    async with grpc.aio.insecure_channel(url) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)

        async def one(seed: int, head: str) -> Completion:
            request = generate_pb2.GenerateOnceRequest(
                text=head,
                sampling=generate_pb2.SamplingOptions(temperature=temperature, seed=seed),
                stopping=generate_pb2.StoppingOptions(max_tokens=max_tokens),
            )
            answer = await stub.GenerateOnce(request, timeout=TIMEOUT_S)
            ended = answer.finished.reason == generate_pb2.FINISH_REASON_END_OF_SEQUENCE
            return Completion(head, answer.text, ended, is_python(head + answer.text))

        return list(await asyncio.gather(*(one(seed, head) for seed, head in enumerate(heads))))


def complete(
    model: Path, heads: Sequence[str], max_tokens: int, temperatures: Sequence[float]
) -> dict[float, list[Completion]]:
    """All heads at once at each temperature, head i with seed i, through a service started for it."""
    with local_service(["--model", str(model)]) as service:
        return {t: asyncio.run(_complete(service.url, heads, max_tokens, t)) for t in temperatures}
