"""One simulated replica beside a real one: the bundled model on this machine's CPU.

Times of launches are measured with decode batches and with prompts beside rows, in rounds, so that seconds of noise
touch few measurements of any point. The two replicas are then compared on arrivals that none of these times come from.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise
from math import inf
from typing import Final

import grpc
from msgspec.structs import replace

from benchmarks.fleet import replica as simulated
from benchmarks.fleet.costs import Costs
from benchmarks.fleet.figures import Figures
from benchmarks.fleet.simulation import Fleet, simulate
from benchmarks.fleet.traffic import NO_TENANT, Request, Traffic
from benchmarks.local_service import local_service
from runahead.service.commands.bench import calls
from runahead.service.commands.bench import figures as of_run
from runahead.service.commands.bench.calls import Outcome, Planned
from runahead.v1 import GenerationServiceStub, GetModelInfoRequest, StatsRequest

BOUND: Final = 0.15
_LOAD: Final = 0.6  # of the rate that the measured times allow
_ROWS: Final = (1, 4, 16)
_PROMPTS: Final = (16, 64, 112)
_ROUNDS, _MOST_ROUNDS = 5, 10
_FALL: Final = 0.9
_PREFIX, _OF_EACH = 128, 3
_BESIDE, _ROW_PROMPT, _ROW_ANSWER, _APART_S = 4, 16, 900, 0.25
_COMPARED: Final = ("first token p50 ms", "tokens/s", "cached %")
_PRINTED: Final = (*_COMPARED, "first token p99 ms", "gap p50 ms", "gap p99 ms")


def trace(rate: float, seconds: float, seed: int) -> Traffic:
    """What both serve. rate: requests a second."""
    return Traffic(rate, seconds, seed=seed, tenants=20, prefix=128, prompt=48, answer=48, spread=0.5)


def prompts(traffic: Traffic, vocab: int) -> list[Planned]:
    """The requests with token ids below `vocab`."""

    def ids(seed: str, count: int) -> tuple[int, ...]:
        return tuple(random.Random(seed).choices(range(2, vocab), k=count))

    return [
        Planned(
            request.arrived / 1e3,
            ids(f"tenant {request.tenant}", request.prefix) + ids(f"own {place}", request.prompt - request.prefix),
            request.answer,
        )
        for place, request in enumerate(traffic.requests())
    ]


class Replica:
    """A running service. Each measurement uses different token ids, so that none hits another's cached prefix."""

    def __init__(self, channel: grpc.aio.Channel, vocab: int) -> None:
        self._channel, self.vocab = channel, vocab
        self._dice = random.Random(0)

    async def run(self, requests: Sequence[Planned]) -> tuple[list[Outcome], float]:
        """Raises RuntimeError if one fails."""
        outcomes, seconds = await calls.run([self._channel], requests, (), None)
        if failures := [outcome.failure for outcome in outcomes if outcome.failure]:
            raise RuntimeError(f"{len(failures)} requests failed, the first with {failures[0]}")
        return outcomes, seconds

    async def tokens(self) -> tuple[int, int]:
        """Return prompt tokens and cached prompt tokens so far."""
        found = (await GenerationServiceStub(self._channel).Stats(StatsRequest())).stats.tokens
        return found.prompt, found.cached

    async def decode_ms(self, rows: int) -> float:
        """Return the time a token of `rows` decoding rows, in ms. A busy client reads several tokens at once, so single
        gaps say less."""
        outcomes, _ = await self.run([self._random(0.0, _ROW_PROMPT, 128) for _ in range(rows)])
        return 1e3 * statistics.median(outcome.token_s for outcome in outcomes)

    async def beside_rows(self) -> list[tuple[int, float, float]]:
        """Send prompts of `_PROMPTS` tokens in turn, behind a cached prefix and beside rows. Return the tokens of each,
        the time of its launch and its time to first token, in ms."""
        prefix = self._ids(_PREFIX)
        rows = [self._random(0.0, _ROW_PROMPT, _ROW_ANSWER) for _ in range(_BESIDE)]
        tokens = (_PROMPTS[0], *_PROMPTS * _OF_EACH)  # the first one caches the prefix
        due_s = [_APART_S * (1 + place + self._dice.random() / 4) for place in range(len(tokens))]
        lone = [Planned(due, prefix + self._ids(each), 1) for due, each in zip(due_s, tokens, strict=True)]
        outcomes, _ = await self.run([*rows, *lone])
        at = list(accumulate(outcomes[0].gaps_s, initial=outcomes[0].first_token_s or 0.0))  # tokens of one row
        found = list[tuple[int, float, float]]()
        for each, prompt, outcome in list(zip(tokens, lone, outcomes[_BESIDE:], strict=True))[1:]:
            first_s = outcome.first_token_s or 0.0
            if prompt.due_s + first_s > at[-1]:
                raise RuntimeError(f"rows of {_ROW_ANSWER} tokens ended before the prompts beside them")
            found.append((each, 1e3 * gap_that_ends(at, prompt.due_s + first_s), 1e3 * first_s))
        return found

    def _random(self, due_s: float, tokens: int, answer: int) -> Planned:
        return Planned(due_s, self._ids(tokens), answer)

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._dice.choices(range(2, self.vocab), k=count))


def gap_that_ends(times: Sequence[float], at: float) -> float:
    """Return the gap before the one of `times` that is closest to `at`, the second or a later one."""
    place = min(range(1, len(times)), key=lambda each: abs(times[each] - at))
    return times[place] - times[place - 1]


async def measured_costs(replica: Replica, kv_tokens: int) -> Costs:
    """Fit costs to rounds of measurements, with the sizes of docs/settings.md for CPUs. Rounds are added while the fit
    contradicts itself. Raises RuntimeError if the last one still does."""
    await replica.decode_ms(_BESIDE)  # warm-up
    decode = dict[int, list[float]]((rows, []) for rows in _ROWS)
    prompts = list[tuple[int, float, float]]()
    for number in range(1, _MOST_ROUNDS + 1):
        for rows, times in decode.items():
            times.append(await replica.decode_ms(rows))
        prompts += await replica.beside_rows()
        if number >= _ROUNDS:
            costs = fitted(decode, prompts, kv_tokens)
            wrong = contradiction(costs)
            fit = f"decode {costs.decode_ms}, prompts {costs.prompt_ms}, overhead {costs.overhead_ms} ms"
            print(f"{number} rounds: {fit}{wrong and f': {wrong}'}")
            if not wrong:
                return costs
    raise RuntimeError(f"after {_MOST_ROUNDS} rounds {wrong}: is the machine busy with something else?")


def fitted(decode: dict[int, list[float]], prompts: list[tuple[int, float, float]], kv_tokens: int) -> Costs:
    """Fit costs to the medians of all rounds, and the Theil-Sen line to prompts.

    decode: times a token, in ms, by rows. prompts: what `Replica.beside_rows` returned.
    """
    launches = {each: statistics.median(ms for tokens, ms, _ in prompts if tokens == each) for each in _PROMPTS}
    firsts = {each: statistics.median(ms for tokens, _, ms in prompts if tokens == each) for each in _PROMPTS}
    token_ms = statistics.median((launches[b] - launches[a]) / (b - a) for a, b in combinations(_PROMPTS, 2))
    least_ms = statistics.median(ms - token_ms * (tokens + _BESIDE) for tokens, ms in launches.items())
    costs = Costs(
        source="this machine",
        decode_ms=[(rows, round(statistics.median(times), 2)) for rows, times in decode.items()],
        prompt_ms=(round(least_ms, 2), round(token_ms, 3)),
        overhead_ms=0.0,
        longest_prompt=2048,
        kv_tokens=kv_tokens,
        max_rows=64,
        prefill_chunk=128,
        max_prefill_tokens=256,
        mixed_prefill_tokens=256,
        run_ahead=2,
    )
    overhead_ms = statistics.median(ms - simulated_beside_rows(costs, tokens) for tokens, ms in firsts.items())
    return replace(costs, overhead_ms=max(0.0, round(overhead_ms, 2)))


def contradiction(costs: Costs) -> str:
    """Return why no replica has these costs, or nothing. Launches of few rows may take equally long."""
    if any(more[1] < _FALL * fewer[1] for fewer, more in pairwise(costs.decode_ms)):
        return "a decode launch of more rows takes less time"
    if min(costs.prompt_ms) <= 0.0:
        return "a prompt's time is not above 0"
    if costs.overhead_ms > (most := costs.run_ahead * costs.decode_ms[0][1]):
        return f"the overhead is above {most:.2f} ms, {costs.run_ahead} decode launches of one row"
    return ""


def simulated_beside_rows(costs: Costs, tokens: int) -> float:
    """Return the median time to first token, in ms, that `costs` give to prompts of `Replica.beside_rows`."""
    figures = Figures(0.0, 0.0)
    replica = simulated.Replica(0, costs, figures)
    for _ in range(_BESIDE):
        replica.submit(Request(0.0, NO_TENANT, 0, _ROW_PROMPT, _ROW_ANSWER), 0.0)
    times, dice = [], random.Random(0)  # they arrive at any time of a launch
    for place in range(10 * _BESIDE):
        request = Request(1e3 * _APART_S * (1 + (place + dice.random() / 4) / _BESIDE), NO_TENANT, 0, tokens, 1)
        replica.advance(request.arrived)
        replica.submit(request, request.arrived)
        times.append(request)
    replica.advance(inf)
    return statistics.median(request.first - request.arrived for request in times)


def capacity(costs: Costs, traffic: Traffic) -> float:
    """Requests a second that 16 rows and the prompts between their launches allow, nothing cached."""
    requests = list(traffic.requests())
    answer = statistics.mean(request.answer for request in requests)
    prompt = statistics.mean(request.prompt for request in requests)
    row_ms = costs.decode_table()[_ROWS[-1]] / _ROWS[-1]
    return 1e3 / (answer * row_ms + costs.prompt_ms[0] + prompt * costs.prompt_ms[1])


async def _both(url: str, seconds: float, seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """Figures of the real replica and of the simulated one."""
    async with grpc.aio.insecure_channel(url) as channel:
        stub = GenerationServiceStub(channel)
        info, stats = await stub.GetModelInfo(GetModelInfoRequest()), (await stub.Stats(StatsRequest())).stats
        replica = Replica(channel, info.vocab_size)
        costs = await measured_costs(replica, stats.blocks.total * info.engine.block_size)
        traffic = trace(_LOAD * capacity(costs, trace(100.0, 60.0, seed)), seconds, seed)
        prompt, cached = await replica.tokens()
        outcomes, took = await replica.run(prompts(traffic, info.vocab_size))
        now = await replica.tokens()
        found = of_run.figures(traffic.rate, outcomes, took, of_run.Goal(200.0, 25.0))
        real = {
            "first token p50 ms": found.first_token_ms_p50 or 0.0,
            "tokens/s": found.tokens_per_s,
            "cached %": 100 * (now[1] - cached) / max(1, now[0] - prompt),
            "first token p99 ms": found.first_token_ms_p99 or 0.0,
            "gap p50 ms": found.gap_ms_p50 or 0.0,
            "gap p99 ms": found.gap_ms_p99 or 0.0,
        }
        print(f"{len(outcomes)} requests, {traffic.rate:.2f} a second, sent up to {found.late_ms_p99} ms late (p99)")
        return real, simulate(Fleet(1, "round-robin"), costs, traffic).numbers()


def compare(real: dict[str, float], found: dict[str, float]) -> bool:
    """Print both. Returns whether p50 of first tokens, tokens/s and hits are within the bound."""
    print(f"{'':20} {'real':>10} {'simulated':>10} {'off by':>8}")
    holds = True
    for name in _PRINTED:
        off = found[name] / real[name] - 1 if real[name] else 0.0 if found[name] == 0 else 1.0
        missed = name in _COMPARED and abs(off) > BOUND
        holds = holds and not missed
        print(f"{name:20} {real[name]:10.2f} {found[name]:10.2f} {off:8.1%}{' missed' if missed else ''}")
    return holds


def main(seconds: float, seed: int) -> int:
    """Returns 1 where a compared figure is further off than the bound, or nothing could be measured."""
    with local_service(["--no-request-log"]) as service:
        try:
            return 0 if compare(*asyncio.run(_both(service.url, seconds, seed))) else 1
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
