"""Somebody who is served while others misbehave: whose calls all end well, with the same tokens each time."""

from __future__ import annotations

import time
from types import TracebackType

import grpc

from runahead.v1 import GenerateRequest, GenerationServiceStub, SamplingOptions, StoppingOptions

TIMEOUT_S = 60.0
TOKENS = 8


class Bystander:
    """A client with a connection of its own. The first call says what the right tokens are."""

    def __init__(self, url: str) -> None:
        self._channel = grpc.insecure_channel(url, [("grpc.use_local_subchannel_pool", 1)])
        self._stub = GenerationServiceStub(self._channel)
        self._right: list[int] = []
        self._right = self._call()[0]

    def __enter__(self) -> Bystander:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._channel.close()

    def first_tokens_s(self, calls: int) -> list[float]:
        """Makes calls, one after another. Returns how long each had to wait for its first token.

        Raises grpc.RpcError for a call that does not end well, AssertionError for one with other tokens.
        """
        return [self._checked() for _ in range(calls)]

    def _checked(self) -> float:
        tokens, first_s = self._call()
        assert tokens == self._right, f"{tokens} came, and {self._right} had come before"
        return first_s

    def _call(self) -> tuple[list[int], float]:
        request = GenerateRequest(
            text="def is_prime(n):\n",
            sampling=SamplingOptions(temperature=0.0),
            stopping=StoppingOptions(max_tokens=TOKENS, ignore_eos=True),
        )
        begun, first_s, tokens = time.monotonic(), 0.0, list[int]()
        for event in self._stub.Generate(request, timeout=TIMEOUT_S):
            if event.HasField("delta") and not tokens:
                first_s = time.monotonic() - begun
            tokens += [token.id for token in event.delta.tokens]
        assert len(tokens) == TOKENS
        return tokens, first_s
