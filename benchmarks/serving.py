"""Speed of the service on this machine, through gRPC: beside `transformers`, at each depth, and to a first token.

Prompts are decoded greedily, with as many tokens each, ends ignored. Medians of rounds are shown.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
import numpy as np
import torch

from benchmarks.local_service import local_service
from runahead.v1 import GenerateRequest, GenerationServiceStub, GetModelInfoRequest, StatsRequest

PROMPTS: Final = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "def is_prime(n):\n    if n < 2:\n",
    "import os\n\n\ndef walk(top, onerror=None):\n",
)
TOKENS: Final = 128
ROUNDS: Final = 3
DEPTHS: Final = ("serial", "1", "2", "3", "4")
BACKGROUND: Final = 7  # streams beside a first token that is timed
_STREAMS: Final = (1, 8, 64)  # at each depth
_PROBES: Final = 100  # first tokens
_CACHED: Final = (128, 512, 2000)  # tokens of prompts that are cached already
_PAIRS: Final = 15
Found = TypeVar("Found")


@cache
def _runner() -> asyncio.Runner:
    """One event loop for all tables: gRPC's own thread complains of a second one."""
    return asyncio.Runner()


def _run(work: Coroutine[Any, Any, Found]) -> Found:
    return _runner().run(work)


def prompts(count: int) -> list[str]:
    """`count` prompts, in turn."""
    return [PROMPTS[i % len(PROMPTS)] for i in range(count)]


def _request(prompt: str | Sequence[int], max_tokens: int, salt: str = "") -> GenerateRequest:
    request = GenerateRequest(cache_salt=salt) if salt else GenerateRequest()
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    request.sampling.temperature = 0.0
    request.stopping.max_tokens = max_tokens
    request.stopping.ignore_eos = True
    return request


async def _stream(stub: GenerationServiceStub, request: GenerateRequest) -> tuple[int, float, int]:
    """Tokens, milliseconds to the first of them, and cached tokens of the prompt."""
    begun, tokens, first, cached = time.perf_counter(), 0, 0.0, 0
    async for response in stub.Generate(request):
        event = response.WhichOneof("event")
        if event in ("delta", "finished"):  # the only token may have no text
            first = first or 1e3 * (time.perf_counter() - begun)
        if event == "delta":
            tokens += len(response.delta.tokens)
        elif event == "finished":
            cached = response.finished.usage.cached_tokens
    return tokens, first, cached


async def tokens_a_second(url: str, streams: int, max_tokens: int = TOKENS) -> float:
    """Over all streams, from the first call to the last end."""
    async with grpc.aio.insecure_channel(url) as channel:
        stub, begun = GenerationServiceStub(channel), time.perf_counter()
        found = await asyncio.gather(*(_stream(stub, _request(prompt, max_tokens)) for prompt in prompts(streams)))
        return sum(tokens for tokens, _, _ in found) / (time.perf_counter() - begun)


async def _chain(url: str) -> tuple[float, float, float]:
    """The service's own figures since its start: overlap ratio, idle time and host time a launch, microseconds."""
    async with grpc.aio.insecure_channel(url) as channel:
        chain = (await GenerationServiceStub(channel).Stats(StatsRequest())).stats.chain
        launches = max(1, chain.launches_retired)
        return chain.overlap_ratio, 1e6 * chain.device_idle_s / launches, 1e6 * chain.host_s / launches


def _generate_of_transformers(folder: Path) -> Callable[[int], float]:
    """Tokens a second of `generate` at a batch size, float32, with one torch thread or all, whichever is faster."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), padding_side="left")
    tokenizer.pad_token_id = 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def with_threads(batch: int, threads: int) -> float:
        torch.set_num_threads(threads)
        inputs: Any = tokenizer(prompts(batch), return_tensors="pt", padding=True, return_token_type_ids=False)
        begun, lengths = time.perf_counter(), {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
        with torch.inference_mode():
            out = model.generate(**inputs, do_sample=False, pad_token_id=0, **lengths)
        return float(batch * (out.shape[1] - inputs["input_ids"].shape[1]) / (time.perf_counter() - begun))

    return lambda batch: max(with_threads(batch, threads) for threads in {1, os.cpu_count() or 1})


def throughput(folder: Path) -> None:
    """Print tokens a second beside `transformers` `generate` on the same weights; rounds alternate."""
    generate = _generate_of_transformers(folder)
    found: dict[str, list[float]] = {}
    with local_service(["--model", str(folder)]) as service:
        _run(tokens_a_second(service.url, 16, 16))
        generate(1)
        for _ in range(ROUNDS):
            for streams in (1, 16):
                found.setdefault(f"r{streams}", []).append(_run(tokens_a_second(service.url, streams)))
                found.setdefault(f"t{streams}", []).append(generate(streams))
        ratio, _, _ = _run(_chain(service.url))
    print(f"{'':36} {'tokens/s':>9} {'÷ generate, batch 1':>20}  goal")
    for key, label, goal in (
        ("r1", "runahead, 1 stream through gRPC", "1.0"),
        ("t1", "transformers generate, batch 1", ""),
        ("r16", "runahead, 16 streams through gRPC", "4.0"),
        ("t16", "transformers generate, batch 16", ""),
    ):
        speed = statistics.median(found[key])
        print(f"{label:36} {speed:>9.0f} {speed / statistics.median(found['t1']):>20.2f}  {goal}")
    print(f"overlap ratio of the service over these runs: {ratio:.3f}")


def depths(folder: Path, device: str) -> None:
    """Print tokens a second at every depth, with the ratio to `serial` in brackets."""
    head = f"{'depth':>8}" + "".join(f"{f'{streams} streams, tokens/s':>24}" for streams in _STREAMS)
    print(head + f"{'overlap':>9}{'idle µs':>9}{'host µs':>9}")
    base: list[float] = []
    for depth in ("serial", "1", "2", "4"):
        with local_service(["--model", str(folder), "--device", device, "--run-ahead", depth]) as service:
            _run(tokens_a_second(service.url, 8, 16))
            tokens = 512 if device == "cuda" else 64
            speeds = [
                statistics.median(_run(tokens_a_second(service.url, streams, tokens)) for _ in range(ROUNDS))
                for streams in _STREAMS
            ]
            overlap, idle_us, host_us = _run(_chain(service.url))
        base = base or speeds
        cells = "".join(f"{f'{now:.0f} ({now / first:.2f})':>24}" for now, first in zip(speeds, base, strict=True))
        print(f"{depth:>8}{cells}{overlap:>9.3f}{idle_us:>9.1f}{host_us:>9.0f}", flush=True)


def first_token(folder: Path) -> None:
    """Print the time to a first token at every depth, while other streams run."""
    print(f"{'depth':>8} {'p50 ms':>8} {'p99 ms':>8} {'overlap ratio':>14}")
    for depth in DEPTHS:
        with local_service(["--model", str(folder), "--run-ahead", depth, "--no-prefix-cache"]) as service:
            times = _run(_first_tokens_ms(service.url))
            ratio, _, _ = _run(_chain(service.url))
        p99 = statistics.quantiles(times, n=100, method="inclusive")[-1]
        print(f"{depth:>8} {statistics.median(times):>8.1f} {p99:>8.1f} {ratio:>14.3f}", flush=True)


async def _first_tokens_ms(url: str) -> list[float]:
    async with grpc.aio.insecure_channel(url) as channel:
        stub = GenerationServiceStub(channel)

        async def keep_busy(prompt: str) -> None:
            while True:
                await _stream(stub, _request(prompt, 400))

        busy = [asyncio.create_task(keep_busy(prompt)) for prompt in prompts(BACKGROUND)]
        try:
            found = [(await _stream(stub, _request(prompt, 2)))[1] for prompt in prompts(5 + _PROBES)]
        finally:
            for task in busy:
                task.cancel()
            await asyncio.gather(*busy, return_exceptions=True)
    return found[5:]


def prefix_hit(folder: Path) -> None:
    """Print the time to a first token of a prompt that is cached but for its last block. Each pair asks for a prompt
    twice, under a salt of its own."""
    print(f"{'prompt tokens':>14} {'cached':>7} {'cold p50 ms':>12} {'hit p50 ms':>11} {'cold ÷ hit':>11}")
    with local_service(["--model", str(folder)]) as service:
        _run(_prefix_hits(service.url))


async def _prefix_hits(url: str) -> None:
    async with grpc.aio.insecure_channel(url) as channel:
        stub, dice = GenerationServiceStub(channel), np.random.default_rng(0)
        info = await stub.GetModelInfo(GetModelInfoRequest())
        await _stream(stub, _request(dice.integers(2, info.vocab_size, 100).tolist(), 1, "warm"))
        for length in (n for n in _CACHED if n < info.context_length):
            cold, hit, cached = [], [], 0
            for pair in range(_PAIRS):
                request = _request(dice.integers(2, info.vocab_size, length).tolist(), 1, f"{length}-{pair}")
                cold.append((await _stream(stub, request))[1])
                _, milliseconds, cached = await _stream(stub, request)
                hit.append(milliseconds)
            before, after = statistics.median(cold), statistics.median(hit)
            print(f"{length:>14} {cached:>7} {before:>12.1f} {after:>11.1f} {before / after:>11.1f}", flush=True)
