"""Tokens a second through gRPC, beside `transformers` `generate` on the same weights, in one run on the CPU.

Both decode greedily, the same prompts, the same number of tokens, end-of-sequence ignored. Rounds alternate, so that
a noisy minute hits both sides; medians are shown.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import torch

from benchmarks.local_service import local_service
from runahead.v1 import GenerateRequest, GenerationServiceStub, StatsRequest

PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "def is_prime(n):\n    if n < 2:\n",
    "import os\n\n\ndef walk(top, onerror=None):\n",
)
TOKENS = 128
ROUNDS = 3


def prompts(count: int) -> list[str]:
    """`count` prompts, in turn."""
    return [PROMPTS[i % len(PROMPTS)] for i in range(count)]


async def _stream(stub: GenerationServiceStub, prompt: str, max_tokens: int) -> int:
    request = GenerateRequest(text=prompt)
    request.sampling.temperature = 0.0
    request.stopping.max_tokens = max_tokens
    request.stopping.ignore_eos = True
    tokens = 0
    async for response in stub.Generate(request):
        if response.WhichOneof("event") == "delta":
            tokens += len(response.delta.tokens)
    return tokens


async def through_grpc(url: str, streams: int, max_tokens: int = TOKENS) -> float:
    """Tokens a second over all streams, from the first call to the last end."""
    async with grpc.aio.insecure_channel(url) as channel:
        stub = GenerationServiceStub(channel)
        begun = time.perf_counter()
        counts = await asyncio.gather(*(_stream(stub, prompt, max_tokens) for prompt in prompts(streams)))
        return sum(counts) / (time.perf_counter() - begun)


async def overlap_ratio(url: str) -> float:
    """The service's own figure since its start."""
    async with grpc.aio.insecure_channel(url) as channel:
        return float((await GenerationServiceStub(channel).Stats(StatsRequest())).stats.chain.overlap_ratio)


def transformers_generate(folder: Path) -> Callable[[int], float]:
    """Tokens a second of `generate` at a batch size, float32, with one torch thread or all, whichever is faster."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), padding_side="left")
    tokenizer.pad_token_id = 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def measure(batch: int) -> float:
        return max(with_threads(batch, threads) for threads in {1, os.cpu_count() or 1})

    def with_threads(batch: int, threads: int) -> float:
        torch.set_num_threads(threads)
        inputs = tokenizer(prompts(batch), return_tensors="pt", padding=True, return_token_type_ids=False)
        begun = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                **inputs, do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS, pad_token_id=0
            )
        seconds = time.perf_counter() - begun
        return float(batch * (out.shape[1] - inputs["input_ids"].shape[1]) / seconds)

    return measure


def main(folder: Path) -> None:
    """Print the table."""
    generate = transformers_generate(folder)
    found: dict[str, list[float]] = {}
    with local_service(["--model", str(folder)]) as service:
        asyncio.run(through_grpc(service.url, 16, 16))
        generate(1)
        for _ in range(ROUNDS):
            for streams in (1, 16):
                found.setdefault(f"runahead {streams}", []).append(asyncio.run(through_grpc(service.url, streams)))
                found.setdefault(f"transformers {streams}", []).append(generate(streams))
        ratio = asyncio.run(overlap_ratio(service.url))
    speed = {name: statistics.median(values) for name, values in found.items()}
    single = speed["transformers 1"]
    print(f"{'':36} {'tokens/s':>9} {'÷ generate, batch 1':>20}  goal")
    rows = (
        ("runahead, 1 stream through gRPC", "runahead 1", "1.0"),
        ("transformers generate, batch 1", "transformers 1", ""),
        ("runahead, 16 streams through gRPC", "runahead 16", "4.0"),
        ("transformers generate, batch 16", "transformers 16", ""),
    )
    for label, key, goal in rows:
        print(f"{label:36} {speed[key]:>9.0f} {speed[key] / single:>20.2f}  {goal}")
    print(f"overlap ratio of the service over these runs: {ratio:.3f}")
