"""A real router that follows the events of the KV cache sends prompts to the replica that has most of them."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import grpc
import pytest

from benchmarks.local_service import started_service
from runahead.v1 import GenerationServiceStub, StatsRequest
from tests.router.processes import FLAGS, KEY, launched

pytestmark = pytest.mark.timeout(400)
PREFIXES: Final = 16  # of which one replica alone can't cache all
CALLS: Final = 160
BLOCKS: Final = ("--num-blocks", "200", "--context-length", "512")
_LINES: Final = ("def ", "x = ", "return ", "for i in y:\n", "import os\n", "    ", "# note\n", "a + b\n")


@pytest.fixture
def environment(request: pytest.FixtureRequest) -> Path:
    given = request.config.getoption("--router")
    if not given:
        pytest.skip("the router has an environment of its own: make router runs it")
    return Path(given).resolve()


def prompts() -> Iterator[str]:
    """Each has one of a few long prefixes, and an end of its own."""
    chance = random.Random(1)
    prefixes = ["".join(chance.choice(_LINES) for _ in range(90)) + str(number) for number in range(PREFIXES)]
    for number in range(CALLS):
        yield f"{chance.choice(prefixes)}\n{number}\n"


def completed(url: str, prompt: str) -> None:
    body = json.dumps({"model": "bundled", "prompt": prompt, "max_tokens": 4, "temperature": 0}).encode()
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["choices"]


def hit_rate(environment: Path, folder: Path, policy: str) -> tuple[float, str]:
    """Cached tokens of all prompt tokens, over both replicas, and the router's log."""
    with ExitStack() as stack:
        flags = [*FLAGS, "--kv-events", *BLOCKS]
        replicas = [stack.enter_context(started_service(flags)) for _ in range(2)]
        router = stack.enter_context(launched(environment, folder, [each.url for each in replicas], policy))
        for prompt in prompts():
            completed(router.url, prompt)
        cached = total = 0
        for each in replicas:
            with grpc.insecure_channel(each.url) as channel:
                tokens = GenerationServiceStub(channel).Stats(StatsRequest()).stats.tokens
            cached, total = cached + tokens.cached, total + tokens.prompt
        return cached / total, router.log.read_text(errors="replace")


def test_a_router_that_follows_the_events_finds_more_prefixes(environment: Path, tmp_path: Path) -> None:
    spread, _ = hit_rate(environment, tmp_path, "round_robin")
    aware, log = hit_rate(environment, tmp_path, "cache_aware")
    print(f"prompt tokens that were cached: round robin {spread:.1%}, by events of the KV cache {aware:.1%}")
    assert log.count("KV event relay snapshot applied") == 2, "one for each replica"
    assert "Learned block_size from KV event" in log and "gap" not in log.lower()
    assert aware > spread + 0.1
