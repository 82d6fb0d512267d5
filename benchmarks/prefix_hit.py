"""What a full prefix-cache hit saves in time to first token, measured at the client, one request at a time.

Each pair asks for the same long prompt twice under a salt of its own: at first nothing of it is cached, the second
time everything is but the block that holds its last token.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import grpc
import numpy as np

from benchmarks.local_service import local_service
from runahead.v1 import GenerateRequest, GenerationServiceStub, GetModelInfoRequest

PAIRS = 15
LENGTHS = (128, 512, 2000)


def _request(tokens: list[int], salt: str) -> GenerateRequest:
    request = GenerateRequest(cache_salt=salt)
    request.token_ids.ids.extend(tokens)
    request.sampling.temperature = 0.0
    request.stopping.max_tokens = 1
    return request


def _first_token(stub: GenerationServiceStub, request: GenerateRequest) -> tuple[float, int]:
    """Milliseconds to the first token, and cached tokens."""
    begun = time.perf_counter()
    found = 0.0
    for response in stub.Generate(request):
        match response.WhichOneof("event"):
            case "delta":
                found = found or 1e3 * (time.perf_counter() - begun)
            case "finished":
                found = found or 1e3 * (time.perf_counter() - begun)  # the only token may have no text
                return found, response.finished.usage.cached_tokens
    raise RuntimeError("a stream ended without a terminal")


def main(folder: Path) -> None:
    """Print the table."""
    print(f"{'prompt tokens':>14} {'cached':>7} {'cold p50 ms':>12} {'hit p50 ms':>11} {'cold ÷ hit':>11}")
    with local_service(["--model", str(folder)]) as service, grpc.insecure_channel(service.url) as channel:
        stub = GenerationServiceStub(channel)
        info = stub.GetModelInfo(GetModelInfoRequest())
        dice = np.random.default_rng(0)
        _first_token(stub, _request(dice.integers(2, info.vocab_size, 100).tolist(), "warm"))
        for length in (n for n in LENGTHS if n < info.context_length):
            cold, hit, cached = [], [], 0
            for pair in range(PAIRS):
                request = _request(dice.integers(2, info.vocab_size, length).tolist(), f"{length}-{pair}")
                cold.append(_first_token(stub, request)[0])
                milliseconds, cached = _first_token(stub, request)
                hit.append(milliseconds)
            before, after = statistics.median(cold), statistics.median(hit)
            print(f"{length:>14} {cached:>7} {before:>12.1f} {after:>11.1f} {before / after:>11.1f}")
