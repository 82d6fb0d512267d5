"""Drafts and structures through the service on a GPU. No bit hangs on them, at any depth.

Without the prefix cache: whether a prefix is found is a matter of timing, and a completion's keys and values were
written by decode steps, where those of a prompt that says the same are a chunk's.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

import jsonschema
import pytest

from runahead.v1 import GenerateRequest, ServerStats
from tests.parity.client import Answer
from tests.parity.comparing import compare
from tests.parity.figures import check_at_rest, check_depth
from tests.parity.services import DEPTHS, figures_everywhere, run_everywhere, services_at_every_depth
from tests.parity.structures import SCHEMA
from tests.parity.workload import SNIPPETS, Asked, workload
from tests.schemas import SCHEMAS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FLAGS: Final = ("--device", "cuda", "--dtype", "bfloat16", "--no-prefix-cache")
DRAFTING: Final = (*FLAGS, "--drafter", "ngram", "--draft-tokens", "3")
REQUESTS, TOGETHER = 48, 16
SCHEMAS_ASKED: Final = 12
REGEX: Final = r"[a-z]{3}_[a-z]{2,9}\(\)"
CHOICES: Final = ("the first of them", "the second of them", "another")

Urls = dict[str, str]  # by depth


@pytest.fixture(scope="module")
def services() -> Iterator[tuple[Urls, Urls]]:
    """Without a drafter, and with one."""
    with (
        services_at_every_depth(lambda i: FLAGS, ("serial", "2")) as without,
        services_at_every_depth(lambda i: DRAFTING) as drafting,
    ):
        yield without, drafting


def plain_requests() -> list[Asked]:
    return [item for seed in range(4) for item in workload(seed)][:REQUESTS]


def structured_requests() -> list[Asked]:
    """Of every kind of structure, greedy and drawn, some with log-probabilities."""
    made: list[Asked] = []
    for number in range(SCHEMAS_ASKED + 9):
        request = GenerateRequest(request_id=f"fits-{number}", text=SNIPPETS[number % len(SNIPPETS)])
        request.sampling.temperature, request.sampling.seed = (0.0, 0.8)[number % 2], 300 + number
        request.stopping.max_tokens = 150
        if number % 4 == 1:
            request.output.logprobs = 2
        kind = number - SCHEMAS_ASKED
        if kind < 0:
            request.structure.json_schema = json.dumps(SCHEMAS[77 * number % len(SCHEMAS)])
        elif kind % 3 == 0:
            request.structure.json_schema = json.dumps(SCHEMA)
        elif kind % 3 == 1:
            request.structure.regex = REGEX
        else:
            request.structure.choice.texts.extend(CHOICES)
        made.append(Asked(request, delay_s=0.004 * number))
    return made


def check_fits(request: GenerateRequest, text: str) -> None:
    """A completion that has ended by itself is what was asked for."""
    match request.structure.WhichOneof("kind"):
        case "regex":
            assert re.fullmatch(REGEX, text), text
        case "choice":
            assert text in CHOICES, text
        case _:
            jsonschema.Draft202012Validator(json.loads(request.structure.json_schema)).validate(json.loads(text))


def compare_all(asked: list[Asked], expected: list[Answer], found: list[Answer], where: str) -> None:
    for item, ours, theirs in zip(asked, expected, found, strict=True):
        compare(item, ours, theirs, f"{where}, {item.request.request_id}")


def counted(stats: ServerStats) -> Counter[str]:
    tokens = stats.tokens
    looked_at, right = (sum(drafts.values()) for drafts in (tokens.drafted, tokens.accepted))
    return Counter(launches=stats.chain.launches, held=tokens.held_rows, drafted=looked_at, right=right)


def grown(before: ServerStats, after: ServerStats) -> dict[str, int]:
    """Launches, rows that were held in one, and drafts that were looked at and that were right."""
    since = counted(after)
    since.subtract(counted(before))
    return dict(since)


def test_drafts_change_no_bit_of_what_a_service_says_at_any_depth(services: tuple[Urls, Urls]) -> None:
    without, drafting = services
    urls = {"without": without["serial"], **drafting}
    asked = plain_requests()
    assert len(asked) == REQUESTS
    before = asyncio.run(figures_everywhere(drafting))
    for first in range(0, REQUESTS, TOGETHER):
        some = asked[first : first + TOGETHER]
        answers = asyncio.run(run_everywhere(urls, some))
        for depth in DEPTHS:
            compare_all(some, answers["without"], answers[depth], f"depth {depth}")
    for depth, stats in asyncio.run(figures_everywhere(drafting)).items():
        since = grown(before[depth], stats)
        print(f"depth {depth}: {since}, {dict(stats.graphs.fallbacks)}, overlap ratio {stats.chain.overlap_ratio:.3f}")
        check_depth(stats, depth)
        check_at_rest(stats, 0)
        assert 0 < since["right"] < since["drafted"], "drafts were looked at, and not all were right"


def test_structures_fit_at_every_depth_and_change_no_bit_of_the_rows_beside_them(services: tuple[Urls, Urls]) -> None:
    """Some of the rows beside them are drafted for, and so are they, by what their grammars force and by the drafter;
    of a service without one, by what they force alone."""
    without, drafting = services
    urls = {"without": without["serial"], "forced alone": without["2"], **drafting}
    plain, fitting = plain_requests()[:TOGETHER], structured_requests()
    (alone,) = asyncio.run(run_everywhere({"": without["serial"]}, plain)).values()
    before = asyncio.run(figures_everywhere(urls))
    answers = asyncio.run(run_everywhere(urls, [*plain, *fitting]))
    after = asyncio.run(figures_everywhere(urls))
    whole = forced = 0
    for item, answer in zip(fitting, answers["without"][len(plain) :], strict=True):
        assert answer.reason in ("END_OF_SEQUENCE", "LENGTH"), f"{item.request.request_id}: {answer.reason}"
        if answer.reason == "END_OF_SEQUENCE":
            check_fits(item.request, answer.text)
            whole += 1
    assert whole > len(fitting) // 2, f"{whole} of {len(fitting)} have ended by themselves"
    for where in urls:
        compare_all(plain, alone, answers[where][: len(plain)], f"{where}, beside structures")
        compare_all(fitting, answers["without"][len(plain) :], answers[where][len(plain) :], where)
        since = grown(before[where], after[where])
        print(f"{where}: {whole} of {len(fitting)} whole, {since}, {dict(after[where].graphs.fallbacks)}")
        check_at_rest(after[where], 0)
        assert where not in drafting or since["right"] > 0, f"{where}: no draft was right"
        forced += since["right"] if where not in drafting else 0
        masks = after[where].masks.written - before[where].masks.written
        assert masks >= sum(len(answer.tokens) for answer in answers[where][len(plain) :])
    assert forced > 0, "nothing that was forced was kept"
