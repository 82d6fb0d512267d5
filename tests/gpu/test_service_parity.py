"""The parity workloads through gRPC on a GPU: what serial says, at every depth, to the bit.

Without the prefix cache: whether a prefix is found is a matter of timing, and a completion's keys and values were
written by decode steps, where those of a prompt that says the same are a chunk's.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.parity.client import stats_at_rest
from tests.parity.comparing import compare
from tests.parity.figures import check_depth
from tests.parity.services import DEPTHS, run_everywhere, services_at_every_depth
from tests.parity.upcycled import BUNDLED, upcycled
from tests.parity.workload import workload

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("model", "dtype", "seeds"),
    [
        ("dense", "bfloat16", 8),
        ("dense", "float32", 3),
        ("dense", "float16", 3),
        ("hybrid", "bfloat16", 3),
        ("mixtral", "bfloat16", 3),
    ],
)
def test_every_depth_says_what_serial_says_to_the_bit(
    model: str, dtype: str, seeds: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The hybrid has experts, too; those of `mixtral` are the dense model's feed-forwards."""
    folders = {"dense": BUNDLED, "hybrid": BUNDLED / "hybrid"}
    folder = folders[model] if model in folders else upcycled(tmp_path_factory.mktemp(model))
    flags = ["--model", str(folder), "--device", "cuda", "--dtype", dtype, "--no-prefix-cache"]
    with services_at_every_depth(lambda i: flags) as services:
        for seed in range(seeds):
            asked = workload(seed)
            answers = asyncio.run(run_everywhere(services, asked))
            for depth in DEPTHS[1:]:
                for item, serial, other in zip(asked, answers["serial"], answers[depth], strict=True):
                    compare(item, serial, other, f"seed {seed}, depth {depth}, {item.request.request_id}")
        figures = {depth: asyncio.run(stats_at_rest(url)) for depth, url in services.items()}
    for depth, stats in figures.items():
        check_depth(stats, depth)
        assert stats.chain.launches_by_kind["mixed"] > 0, "no prompt ran beside decode rows"
        assert stats.blocks.free == stats.blocks.total
    assert figures["4"].tokens.void_rows > figures["1"].tokens.void_rows, "as if a chain of 4 were no deeper"
