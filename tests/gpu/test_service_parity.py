"""The parity workloads through gRPC on a GPU: what serial says, at every depth.

In float32 a row's bits depend on the number of rows its products are computed with, and which rows share a launch is a
matter of timing: what may differ between two depths is a near tie, in at most one request of a hundred. In bfloat16, by
the exact kernels, nothing may.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.parity.client import Answer, stats_at_rest
from tests.parity.comparing import compare
from tests.parity.figures import check_depth
from tests.parity.services import DEPTHS, run_everywhere, services_at_every_depth
from tests.parity.workload import workload

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SEEDS = 8
LOGPROB_TOLERANCE = 2e-3
SHARE_THAT_MAY_DIFFER = 0.01


def agree(serial: Answer, other: Answer) -> bool:
    """The same tokens, as far as both went, and log-probabilities within rounding of each other."""
    common = min(len(serial.tokens), len(other.tokens))
    if serial.tokens[:common] != other.tokens[:common]:
        return False
    for (ours, _), (theirs, _) in zip(serial.logprobs, other.logprobs, strict=False):
        assert ours is not None and theirs is not None
        assert abs(ours - theirs) <= LOGPROB_TOLERANCE
    return True


def test_every_depth_gives_the_tokens_of_serial() -> None:
    compared, differing = 0, 0
    with services_at_every_depth(lambda i: ["--device", "cuda", "--dtype", "float32"]) as services:
        for seed in range(SEEDS):
            asked = workload(seed)
            answers = asyncio.run(run_everywhere(services, asked))
            for depth in DEPTHS[1:]:
                for item, serial, other in zip(asked, answers["serial"], answers[depth], strict=True):
                    assert other.terminals == (0 if other.cancelled else 1)
                    compared += 1
                    if not agree(serial, other):
                        differing += 1
                    elif not (item.abort_after or item.cancel_after):
                        assert (other.reason, other.text) == (serial.reason, serial.text)
        figures = {depth: asyncio.run(stats_at_rest(url)) for depth, url in services.items()}
    for depth, stats in figures.items():
        chain = stats.chain
        print(
            f"depth {depth}: {chain.launches} launches, overlap ratio {chain.overlap_ratio:.2f}, "
            f"{stats.graphs.replays} replays, fallbacks {dict(stats.graphs.fallbacks)}"
        )
        check_depth(stats, depth)
        assert stats.blocks.free + stats.blocks.cached == stats.blocks.total
    void = {depth: stats.tokens.void_rows for depth, stats in figures.items()}
    assert void["4"] > void["1"], f"as if a chain of 4 were no deeper than one of 1: {void}"
    print(f"{differing} of {compared} answers differ from serial's")
    assert differing <= SHARE_THAT_MAY_DIFFER * compared


def test_by_the_exact_kernels_every_depth_says_what_serial_says_to_the_bit() -> None:
    """Without the prefix cache: whether a prefix is found is a matter of timing, and a completion's keys and values
    were written by decode steps, where those of a prompt that says the same are a chunk's."""
    flags = ["--device", "cuda", "--dtype", "bfloat16", "--exact", "on", "--no-prefix-cache"]
    with services_at_every_depth(lambda i: flags) as services:
        for seed in range(SEEDS):
            asked = workload(seed)
            answers = asyncio.run(run_everywhere(services, asked))
            for depth in DEPTHS[1:]:
                for item, serial, other in zip(asked, answers["serial"], answers[depth], strict=True):
                    compare(item, serial, other, f"seed {seed}, depth {depth}, {item.request.request_id}")
        figures = {depth: asyncio.run(stats_at_rest(url)) for depth, url in services.items()}
    for depth, stats in figures.items():
        check_depth(stats, depth)
        assert stats.chain.launches_by_kind["mixed"] > 0, "no prompt ran beside decode rows"
    assert figures["4"].tokens.void_rows > figures["1"].tokens.void_rows, "as if a chain of 4 were no deeper"
