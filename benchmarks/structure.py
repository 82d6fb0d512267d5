"""What a structure costs: the rows beside it, and the row itself.

Plain streams complete heads of functions that the bundled model was not trained on. In turns, with which of the two
comes first changing, the other rows of the batch are plain too, or are JSON by a schema. The gaps between tokens of the
plain streams are compared, those of the first tokens left out, while prompts are read. *held* is the share of launches
in which a JSON row was held. Below it stands what the chain did, by the service's own figures (on a GPU the client that
reads 64 streams is slower than what it measures), and what a launch takes of the processors, by what takes it: that
hangs little on what else the machine does. The batch's own
pace stands beside what was published of another engine. Then one row alone is JSON, and the same row without a
structure; and broken structures are refused beside a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Final

import grpc

from benchmarks import broken_structures
from benchmarks.bundled_model.completions import choose_heads
from benchmarks.bundled_model.corpus import held_out_files, standard_library
from benchmarks.chain_figures import ChainFigures, chain_figures, flags_of
from benchmarks.gpu_table.shapes import SHAPES
from benchmarks.local_service import LocalService, local_service
from benchmarks.processor_time import PARTS, seconds_by_part
from runahead.runtime.checkpoint import BUNDLED_FOLDER
from runahead.v1 import GenerateRequest, GenerationServiceStub

ROWS: Final = 64
BESIDE: Final = (1, 32)  # of these rows, so many are JSON
TOKENS: Final = {"cpu": 96, "cuda": 192}
WARM: Final = 16  # first gaps of a stream that don't count
ROUNDS: Final = 5
GOAL: Final = 1.02  # of the median gap beside JSON rows, to that beside none
PUBLISHED: Final = (132.7, 106.1)  # tokens/s of a whole batch, one row with a grammar: a public report on vLLM
ALONE_TOKENS: Final = 256
SCHEMA: Final = json.dumps(
    {
        "type": "array",
        "minItems": 1000,
        "items": {
            "type": "object",
            "properties": {
                "identifier": {"type": "integer", "minimum": 0, "maximum": 99999},
                "display_name": {"type": "string", "maxLength": 12},
                "is_active": {"type": "boolean"},
                "category": {"enum": ["function", "method", "class", "module"]},
            },
            "required": ["identifier", "display_name", "is_active", "category"],
            "additionalProperties": False,
        },
    }
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Of one batch: the gaps between tokens of its watched streams, ascending, in seconds; pace: tokens a second of all
    its rows, watched or not; what the chain did; processor time of the service's parts, in seconds."""

    gaps: tuple[float, ...]
    pace: float
    chain: ChainFigures
    took: Mapping[str, float]

    def quantile(self, share: float) -> float:
        return self.gaps[int(share * (len(self.gaps) - 1))]


@dataclass(frozen=True, slots=True)
class Cell:
    """So many JSON rows in a batch. pairs: beside none, and beside them, a pair a round."""

    beside: int
    pairs: tuple[tuple[Batch, Batch], ...]

    def ratio(self, share: float) -> float:
        """Of a round's two quantiles, the median over all rounds."""
        return statistics.median(json_.quantile(share) / none.quantile(share) for none, json_ in self.pairs)

    @property
    def line(self) -> str:
        figures = ""
        for share in (0.5, 0.99):
            none, json_ = (statistics.median(batch.quantile(share) for batch in side) for side in self._sides)
            figures += f"{none * 1e3:>10.1f}{json_ * 1e3:>10.1f}{self.ratio(share):>7.2f}"
        chain = self._chains[1]
        share = chain.held / self.beside / chain.launches
        verdict = "met" if self.ratio(0.5) <= GOAL else "MISSED"
        return f"{ROWS - self.beside:>6}{self.beside:>6}{figures}{share:>8.1%}  {GOAL:g} {verdict}"

    @property
    def pace_line(self) -> str:
        none, json_ = (statistics.median(batch.pace for batch in side) for side in self._sides)
        ratio = statistics.median(json_.pace / none.pace for none, json_ in self.pairs)
        published = f"{PUBLISHED[0]:g} and {PUBLISHED[1]:g}, {PUBLISHED[1] / PUBLISHED[0]:.2f}"
        beside = f" (published of vLLM: {published})" if self.beside == 1 else ""
        return f"{'':14}tokens/s of the batch: none {none:.0f}, beside {json_:.0f}, {ratio:.2f}{beside}"

    @property
    def chain_lines(self) -> str:
        """What the chain did beside none and beside JSON rows, and how much longer a launch was on the device."""
        none, json_ = self._chains
        each = statistics.median(b.chain.launch_ms / a.chain.launch_ms for a, b in self.pairs) if none.device_s else 1.0
        return f"{'':14}none: {none.line}\n{'':14}beside: {json_.line}; {each:.3f} times as long"

    @property
    def processor_line(self) -> str:
        """ms of processor time a launch, beside none and beside JSON rows, and their ratio over all parts."""
        figures, both = "", [0.0, 0.0]
        for part in PARTS:
            times = [
                1e3 * statistics.median(batch.took[part] / batch.chain.launches for batch in side)
                for side in self._sides
            ]
            figures += f"{part}: {times[0]:.2f} and {times[1]:.2f}, "
            both = [whole + one for whole, one in zip(both, times, strict=True)]
        ratio = f"{both[1] / both[0]:.2f}" if both[0] else "unknown: the kernel counts none"
        return f"{'':14}{figures}all: {both[0]:.2f} and {both[1]:.2f}, ratio {ratio}"

    @property
    def _chains(self) -> tuple[ChainFigures, ChainFigures]:
        none, json_ = (reduce(ChainFigures.and_of, (batch.chain for batch in side)) for side in self._sides)
        return none, json_

    @property
    def _sides(self) -> tuple[tuple[Batch, ...], tuple[Batch, ...]]:
        none, json_ = zip(*self.pairs, strict=True)
        return none, json_


def _request(prompt: str, place: int, tokens: int, *, is_json: bool) -> GenerateRequest:
    request = GenerateRequest(text=prompt)
    request.sampling.temperature = 0.8
    request.sampling.seed = place
    request.stopping.max_tokens = tokens
    if is_json:
        request.structure.json_schema = SCHEMA
    else:
        request.stopping.ignore_eos = True
    return request


async def _gaps(stub: GenerationServiceStub, request: GenerateRequest) -> list[float]:
    """Seconds from each message with tokens to the next, for each token in it an equal part."""
    found: list[float] = []
    before = time.perf_counter()
    async for response in stub.Generate(request):
        if count := len(response.delta.tokens):
            now = time.perf_counter()
            found += [(now - before) / count] * count
            before = now
    return found


async def _batch(service: LocalService, prompts: Sequence[str], beside: int, tokens: int, *, is_json: bool) -> Batch:
    """All rows at once; the last `beside` of them are not watched, and JSON or not."""
    async with grpc.aio.insecure_channel(service.url) as channel:
        stub = GenerationServiceStub(channel)
        before, took = await chain_figures(stub), seconds_by_part(service)
        watched = len(prompts) - beside
        streams = [
            _gaps(stub, _request(prompt, place, tokens, is_json=is_json and place >= watched))
            for place, prompt in enumerate(prompts)
        ]
        gaps = [stream[WARM:] for stream in await asyncio.gather(*streams)]
        after, took_by_now = await chain_figures(stub), seconds_by_part(service)
        return Batch(
            tuple(sorted(gap for stream in gaps[:watched] for gap in stream)),
            sum(len(stream) / sum(stream) for stream in gaps),
            after.since(before),
            {part: took_by_now[part] - took[part] for part in PARTS},
        )


async def _speed(url: str, prompt: str, *, is_json: bool) -> tuple[float, float]:
    """Tokens a second of one stream alone, from its first token on, and tokens a launch."""
    async with grpc.aio.insecure_channel(url) as channel:
        stub = GenerationServiceStub(channel)
        before = await chain_figures(stub)
        gaps = (await _gaps(stub, _request(prompt, 1, ALONE_TOKENS, is_json=is_json)))[1:]
        launches = (await chain_figures(stub)).since(before).launches
        return len(gaps) / sum(gaps), (1 + len(gaps)) / launches


def _cell(service: LocalService, heads: Sequence[str], beside: int, tokens: int) -> Cell:
    pairs = []
    for number in range(ROUNDS):
        prompts = [heads[(number * ROWS + place) % len(heads)] for place in range(ROWS)]
        order = (False, True) if number % 2 else (True, False)
        found = {is_json: asyncio.run(_batch(service, prompts, beside, tokens, is_json=is_json)) for is_json in order}
        pairs.append((found[False], found[True]))
    return Cell(beside, tuple(pairs))


@contextlib.contextmanager
def random_weights(shape: str) -> Iterator[Path]:
    """A checkpoint's folder for `--load-format dummy`: of this shape, with the bundled model's tokenizer.

    That has fewer tokens than the shape's vocabulary, as tokenizers of padded vocabularies do: no structure allows the
    others, and a mask is as long as the vocabulary.
    """
    with tempfile.TemporaryDirectory(prefix="runahead-") as folder:
        SHAPES[shape].write(Path(folder))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(BUNDLED_FOLDER / name, folder)
        yield Path(folder)


def main(folder: Path, device: str = "cpu", more: Sequence[str] = (), shape: str = "") -> None:
    """Print the tables. more: flags of the service. shape: in the place of the model that is in the folder."""
    files = held_out_files()
    if not files:
        print(f"no held-out source files under {standard_library()}: this Python ships its library without source")
        return
    heads = choose_heads(files, 2 * ROWS)
    with contextlib.ExitStack() as stack:
        if shape:
            folder, more = stack.enter_context(random_weights(shape)), ["--load-format", "dummy", *more]
        flags = ["--model", str(folder), "--max-rows", str(ROWS), *flags_of(device), *more]
        service = stack.enter_context(local_service(flags))
        url = service.url
        asyncio.run(
            _batch(service, heads[:4], 2, TOKENS[device], is_json=True)
        )  # the mask worker has started, and knows the schema
        print(f"load of the machine before: {os.getloadavg()[0]:.1f}")
        quantiles = "".join(f"{f'{name} none':>10}{'beside':>10}{'ratio':>7}" for name in ("p50", "p99"))
        print(f"{'plain':>6}{'JSON':>6}{quantiles}{'held':>8}  goal")
        for beside in BESIDE:
            cell = _cell(service, heads, beside, TOKENS[device])
            print(cell.line, cell.pace_line, cell.chain_lines, cell.processor_line, sep="\n", flush=True)
        print(f"(processor time in ms a launch, beside none and beside JSON rows; load now {os.getloadavg()[0]:.1f})")
        rounds = [
            (asyncio.run(_speed(url, head, is_json=True)), asyncio.run(_speed(url, head, is_json=False)))
            for head in heads[:ROUNDS]
        ]
        json_, plain = (statistics.median(speed for speed, _ in side) for side in zip(*rounds, strict=True))
        ratio = statistics.median(one[0] / other[0] for one, other in rounds)
        a_launch = statistics.median(one[1] for one, _ in rounds)
        print(f"one row alone: JSON {json_:.0f} tokens/s, without a structure {plain:.0f}: {ratio:.2f}")
        print(f"{a_launch:.2f} tokens of the JSON row a launch", flush=True)
        broken_structures.main(url, _request(heads[0], 1, ALONE_TOKENS, is_json=False))
