"""How many drafts of a request are right hangs neither on how its prompt came to be in the cache, nor on its cut."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from benchmarks.local_service import local_service
from runahead.runtime.checkpoint import BUNDLED_FOLDER
from runahead.v1 import GenerateRequest, GenerationServiceStub, GetModelInfoRequest, GetModelInfoResponse
from tests.parity.client import Answer, run_workload
from tests.parity.drafters import OF_ACCEPTANCE, OVER_STATES, WITH_WEIGHTS, flags_of, parameters_of
from tests.parity.workload import Asked

pytestmark = pytest.mark.timeout(300)

PROMPT = (
    'def lines_of(path):\n    """The lines of a file, without what ends them."""\n'
    '    with open(path, encoding="utf-8") as file:\n        return [line.rstrip("\\n") for line in file]\n\n\n'
    "def words_of(path):\n"
)
WAYS = {
    "whole": ("--run-ahead", "serial"),
    "cut": ("--run-ahead", "2", "--prefill-chunk", "16", "--max-prefill-tokens", "16", "--jitter-seed", "5"),
}


def asked(ids: list[int], temperature: float, salt: str) -> list[Asked]:
    request = GenerateRequest(cache_salt=salt)
    request.token_ids.ids[:] = ids
    request.sampling.temperature, request.sampling.seed = temperature, 3
    request.stopping.max_tokens, request.stopping.ignore_eos = 70, True
    return [Asked(request)]


def info_of(url: str) -> GetModelInfoResponse:
    with grpc.insecure_channel(url) as channel:
        found: GetModelInfoResponse = GenerationServiceStub(channel).GetModelInfo(GetModelInfoRequest(), timeout=30)
    return found


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind == OF_ACCEPTANCE else [pytest.mark.large])
        for kind in (*WITH_WEIGHTS, OVER_STATES)
    ],
)
def test_acceptance_is_that_of_a_cold_start(kind: str, tmp_path: Path) -> None:
    """The second request finds its prompt in the cache; the third what the first has said too, which was drafted, and
    had entries made of expected hidden states until the next forward wrote over them."""
    prompt = Tokenizer.from_file(str(BUNDLED_FOLDER / "tokenizer.json")).encode(PROMPT).ids
    counts: dict[str, list[tuple[int, int] | None]] = {}
    drafting = flags_of(kind, tmp_path)
    parameters = parameters_of(kind, tmp_path)
    flags = ["--threads", "1", "--num-blocks", "600", *drafting, "--draft-tokens", "3"]
    for way, more in WAYS.items():
        found = counts.setdefault(way, [])
        with local_service([*flags, *more]) as service:

            def ask(ids: list[int], temperature: float, salt: str, url: str = service.url) -> Answer:
                return asyncio.run(run_workload(url, asked(ids, temperature, salt)))[0]

            for temperature in (0.0, 0.8):
                first, again = (ask(prompt, temperature, f"{temperature}") for _ in range(2))
                assert (first.cached_tokens, again.cached_tokens) == (0, (len(prompt) - 1) // 16 * 16)
                assert again.tokens == first.tokens and again.drafts == first.drafts
                longer = [*prompt, *first.tokens[:60]]
                warm, cold = (ask(longer, temperature, salt) for salt in (f"{temperature}", f"another {temperature}"))
                assert (warm.cached_tokens, cold.cached_tokens) == ((len(longer) - 1) // 16 * 16, 0)
                assert warm.tokens == cold.tokens and warm.drafts == cold.drafts
                found += [first.drafts, warm.drafts]
            model = info_of(service.url)
            assert (model.engine.drafter, model.engine.draft_parameters) == (drafting[1], parameters)
            assert drafting[1] in model.drafters
    assert counts["cut"] == counts["whole"]
    assert all(count is not None and count[1] > 0 for count in counts["whole"]), "some were right"
    print(f"\n{kind}: drafts looked at and right, of each request: {counts['whole']}")
