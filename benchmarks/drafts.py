"""What drafts bring: tokens a second of code completion with each drafter, beside none, in turns.

The prompts are heads of functions from files that neither the bundled model nor its head was trained on, each a stream
of its own; the end token is ignored, so that all services say as many tokens. Services live side by side, all but one
of them idle. Below each line stands what the chain did of each service, by its own figures: on a GPU the client that
reads the streams may be slower than what it measures.

A shape in a model's place has random weights. What those write greedily soon repeats itself, so that drafts are right:
it shows what launches with drafts cost and whether they overlap, and not what drafts bring.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from benchmarks.bundled_model.completions import choose_heads
from benchmarks.bundled_model.corpus import held_out_files, standard_library
from benchmarks.chain_figures import ChainFigures, chain_figures, flags_of
from benchmarks.gpu_table.shapes import random_weights
from benchmarks.local_service import local_service
from runahead.runtime.checkpoint import BUNDLED_FOLDER
from runahead.v1 import GenerateRequest, GenerationServiceStub

DRAFTERS: Final = ("ngram", "eagle")
TEMPERATURES: Final = (0.0, 0.8)
TOKENS: Final = 192
ROUNDS: Final = {1: 16, 4: 8, 16: 5}  # by streams: completions differ in how often they repeat themselves
GOALS: Final = {1: 1.5}  # by streams, at temperature 0
NEVER_BELOW: Final = 0.97
BLOCKS: Final = 4096  # of a shape's services, which share the memory of a GPU


@dataclass(frozen=True, slots=True)
class Cell:
    """So many streams at a temperature. rounds: tokens a second without drafts, and with those of each drafter,
    in turns, a tuple a round. chains: of the same services, over all rounds."""

    temperature: float
    streams: int
    rounds: tuple[tuple[float, ...], ...]
    chains: tuple[ChainFigures, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Each drafter's figure relative to the same round's without a drafter, the median of all rounds."""
        of_rounds = [[figure / figures[0] for figure in figures[1:]] for figures in self.rounds]
        return tuple(statistics.median(ratios) for ratios in zip(*of_rounds, strict=True))

    @property
    def goal(self) -> float:
        wanted = GOALS.get(self.streams, NEVER_BELOW)
        return wanted if self.temperature == 0 else NEVER_BELOW

    @property
    def line(self) -> str:
        plain, *drafted = (statistics.median(figures) for figures in zip(*self.rounds, strict=True))
        parts = [f"{self.temperature:>11g}{self.streams:>9}{plain:>9.0f}"]
        for figure, ratio in zip(drafted, self.ratios, strict=True):
            parts.append(f"{figure:>9.0f}{ratio:>8.2f} {'met' if ratio >= self.goal else 'MISSED':6}")
        return "".join(parts) + f"{self.goal:>7g}"


async def _said(stub: GenerationServiceStub, prompt: str, place: int, temperature: float, tokens: int) -> int:
    request = GenerateRequest(text=prompt)
    request.sampling.temperature = temperature
    request.sampling.seed = place
    request.stopping.max_tokens = tokens
    request.stopping.ignore_eos = True
    return sum([len(r.delta.tokens) async for r in stub.Generate(request) if r.WhichOneof("event") == "delta"])


async def _speed(
    url: str, prompts: Sequence[tuple[int, str]], temperature: float, tokens: int
) -> tuple[float, ChainFigures]:
    """Tokens a second over all streams, from the first call to the last end, and what the chain did."""
    async with grpc.aio.insecure_channel(url) as channel:
        stub = GenerationServiceStub(channel)
        before, begun = await chain_figures(stub), time.perf_counter()
        counts = await asyncio.gather(*(_said(stub, text, place, temperature, tokens) for place, text in prompts))
        took = time.perf_counter() - begun
        return sum(counts) / took, (await chain_figures(stub)).since(before)


def _cell(urls: Sequence[str], heads: Sequence[str], temperature: float, streams: int, tokens: int) -> Cell:
    """Rounds in turns: which service is first changes with each."""
    rounds, chains = [], [ChainFigures() for _ in urls]
    for number in range(ROUNDS[streams]):
        prompts = [(place, heads[place % len(heads)]) for place in range(number * streams, (number + 1) * streams)]
        turn = [(number + place) % len(urls) for place in range(len(urls))]
        found = {which: asyncio.run(_speed(urls[which], prompts, temperature, tokens)) for which in turn}
        rounds.append(tuple(found[which][0] for which in range(len(urls))))
        chains = [chain.and_of(found[which][1]) for which, chain in enumerate(chains)]
    return Cell(temperature, streams, tuple(rounds), tuple(chains))


def drafters_of(folder: Path) -> tuple[str, ...]:
    """Return the measured drafters. The bundled head belongs to the bundled model: other models have only `ngram`."""
    return DRAFTERS if folder.resolve() == BUNDLED_FOLDER.resolve() else ("ngram",)


def main(folder: Path, device: str = "cpu", more: Sequence[str] = (), shape: str = "", tokens: int = TOKENS) -> None:
    """Print the table. more: flags of all services. shape: in the place of the model that is in the folder."""
    files = held_out_files()
    if not files:
        print(f"no held-out source files under {standard_library()}: this Python ships its library without source")
        return
    heads = choose_heads(files, max(streams * rounds for streams, rounds in ROUNDS.items()))
    with contextlib.ExitStack() as stack:
        if shape:
            folder = stack.enter_context(random_weights(shape))
            more = ["--load-format", "dummy", "--num-blocks", str(BLOCKS), *more]
        drafters = drafters_of(folder)
        if drafters != DRAFTERS:
            print(f"{shape or folder.name} has no draft head of its own: eagle is left out")
        columns = "".join(f"{name:>9}{'ratio':>8}{'':7}" for name in drafters)
        print(f"{'temperature':>11}{'streams':>9}{'none':>9}{columns}{'goal':>7}")
        flags = ["--model", str(folder), *flags_of(device), *more]
        services = [stack.enter_context(local_service([*flags, "--drafter", name])) for name in ("none", *drafters)]
        urls = [service.url for service in services]
        for url in urls:
            asyncio.run(_speed(url, list(enumerate(heads[:16])), 0.0, 16))
        for temperature in TEMPERATURES:
            for streams in ROUNDS:
                cell = _cell(urls, heads, temperature, streams, tokens)
                print(cell.line, flush=True)
                for name, chain in zip(("none", *drafters), cell.chains, strict=True):
                    print(f"{name:>20}: {chain.line}", flush=True)
