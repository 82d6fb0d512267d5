"""Decode steps through gRPC: a service of its own, and one stream for each row from several client processes.

One process of Python can't read as many messages as the service sends: with one client the client would be measured.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from benchmarks.gpu_table.clients import client
from benchmarks.gpu_table.decode import Batch, Steps, prompt_of, sampling_of
from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.settings import flags
from benchmarks.gpu_table.shapes import Shape
from benchmarks.local_service import LocalService, local_service
from runahead.v1 import GenerateRequest

START_S: Final = 400.0  # a service whose kernels are compiled first
CLIENTS: Final = 8
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.25, 16.0


def request_of(row: int, batch: Batch, tokens: int, vocab_size: int) -> bytes:
    """The `GenerateRequest` of a row of the batch, encoded."""
    request = GenerateRequest()
    request.token_ids.ids.extend(prompt_of(row, batch.prompts[row], vocab_size).tolist())
    wanted = sampling_of(row, batch.sampling)
    request.sampling.temperature, request.sampling.top_p = wanted.temperature, wanted.top_p
    request.sampling.seed = wanted.seed
    if wanted.logprobs >= 0:
        request.output.logprobs = wanted.logprobs
    request.stopping.max_tokens, request.stopping.ignore_eos = tokens, True
    return request.SerializeToString()


@dataclass(frozen=True, slots=True)
class Served:
    """A service of random weights, and who calls it. vocab_size: of its model."""

    shape: Shape
    vocab_size: int
    service: LocalService
    clients: ProcessPoolExecutor

    def generate(self, batch: Batch, tokens: int) -> tuple[float, float]:
        """Seconds from the first call to the last stream's end, and tokens a message."""
        requests = [request_of(row, batch, tokens, self.vocab_size) for row in range(batch.rows)]
        shares = [share for share in (requests[place::CLIENTS] for place in range(CLIENTS)) if share]
        delay_s = _FIRST_DELAY_S
        while True:
            begin_at = time.monotonic() + delay_s
            futures = [self.clients.submit(client, self.service.url, share, begin_at) for share in shares]
            streamed = [future.result() for future in futures]
            if all(one.in_time for one in streamed):
                break
            delay_s *= 2  # somebody was not ready yet, and has asked for nothing: all begin again together
            if delay_s > _LONGEST_DELAY_S:
                raise BenchmarkError("the clients can't begin together: this machine is too busy to measure on")
        took = max(one.ended_at for one in streamed) - begin_at
        return took, sum(one.tokens for one in streamed) / sum(one.messages for one in streamed)


@contextlib.contextmanager
def served(shape: Shape, settings: Mapping[str, int | float | str | bool]) -> Iterator[Served]:
    """Start the service, and end both it and the clients afterwards. settings: of the engine. Raises ServiceFailed."""
    with tempfile.TemporaryDirectory(prefix="runahead-") as name:
        config = shape.write(Path(name))
        arguments = ["--model", name, "--tokenizer", "none", *flags(settings)]
        with (
            ProcessPoolExecutor(CLIENTS, mp_context=get_context("spawn")) as clients,
            local_service(arguments, START_S) as service,
        ):
            yield Served(shape, config.vocab_size, service, clients)


def through_grpc(served: Served, batch: Batch, repeats: int) -> Steps:
    """As `through_the_engine`, but by the clients' clock, and with tokens a message in the long runs."""
    workload = served.shape.workload
    runs, packing = [], []
    served.generate(batch, workload.short)  # fills the prefix cache: how prompts got in is not what is measured
    for _ in range(repeats):
        short, _ = served.generate(batch, workload.short)
        long, per_message = served.generate(batch, workload.long)
        runs.append((short, long))
        packing.append(per_message)
    step = statistics.median(long - short for short, long in runs) / workload.steps * 1e3
    return Steps(step, tuple(runs), tokens_per_message=statistics.mean(packing))
