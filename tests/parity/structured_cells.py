"""A cell of the matrix with structured requests: they have at every depth the answers of `serial`, through the service,
whatever befalls them, rows that are held among it; and what ends by itself is what was asked for.

What structure a request has follows from its prompt: two of three have one.
"""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections import Counter
from typing import Any, Final

import jsonschema

from runahead.v1 import GenerateRequest
from tests.parity.comparing import compare
from tests.parity.figures import check_at_rest, grown
from tests.parity.matrix import EVENTS, Run, workload_of
from tests.parity.services import figures_everywhere
from tests.parity.stopped_workers import run_with_late_masks
from tests.parity.workload import Asked

SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name_of_the_function": {"enum": ["read_lines", "write_lines", "count_lines"]},
        "is_deprecated": {"type": "boolean"},
        "number_of_lines": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name_of_the_function", "is_deprecated", "number_of_lines"],
    "additionalProperties": False,
}
ATTEMPTS, FIRST_ATTEMPT = 3, 70
NAME: Final = r"[a-z]{3}_[a-z]{2}"
ENDLESS: Final = r"([a-z_]+ = [a-z_]+\([0-9]*\)\n){40,}"  # nothing of it ends before it is long


def structured(asked: list[Asked], *, ends: bool) -> Counter[str]:
    """Gives most of the requests a structure: one that ends soon, or where the event needs them to go on one that does
    not. Returns how many of each kind."""
    kinds: Counter[str] = Counter()
    for item in asked:
        request = item.request
        said = request.text or " ".join(map(str, request.token_ids.ids))
        kind = ("plain", "json_schema", "regex")[zlib.crc32(said.encode()) % 3]
        if kind == "plain" or request.stopping.stop:
            kind = "plain"
        else:
            request.stopping.ignore_eos = False
            if not ends:
                kind = "endless"
                request.structure.regex = ENDLESS
            elif kind == "regex":
                request.structure.regex = NAME
            else:
                request.structure.json_schema = json.dumps(SCHEMA)
        kinds[kind] += 1
    return kinds


def fits(request: GenerateRequest, text: str) -> bool:
    """Is the completion, which has ended by itself, what was asked for?"""
    if request.structure.WhichOneof("kind") == "regex":
        return re.fullmatch(request.structure.regex, text) is not None
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))
    return True


def check_cell(kind: str, event: str, urls: dict[str, str], barrier_interval: int) -> None:
    """One cell on these services, which have the same pool; once more where what it is about happened at no depth."""
    for attempt in range(ATTEMPTS):
        happened = attempted(kind, event, urls, FIRST_ATTEMPT + attempt, barrier_interval)
        if all(sum(seen.get(name, 0) for seen in happened) for name in happened[-1]):
            return
    raise AssertionError(f"not everything that the cell is about happened in any of {ATTEMPTS} attempts: {happened}")


def attempted(kind: str, event: str, urls: dict[str, str], attempt: int, barrier_interval: int) -> list[dict[str, int]]:
    """Returns what was seen at each depth."""
    asked = workload_of(kind, event, attempt)
    kinds = structured(asked, ends=event in ("end-of-sequence", "prefix-hit"))
    assert len(kinds) > 1, "structured rows beside plain ones"
    before = asyncio.run(figures_everywhere(urls))
    answers = asyncio.run(run_with_late_masks(urls, asked))
    after = asyncio.run(figures_everywhere(urls))
    runs = {depth: Run(kind, depth, asked, answers[depth], grown(before[depth], after[depth])) for depth in urls}
    seen: list[dict[str, int]] = []
    told: list[str] = []
    for depth, run in runs.items():
        check_at_rest(after[depth], barrier_interval)
        whole = 0
        for item, ours, theirs in zip(asked, answers["serial"], run.answers, strict=True):
            compare(item, ours, theirs, f"{kind} / {event}, depth {depth}, request {item.request.request_id}")
            if item.request.HasField("structure") and theirs.reason == "END_OF_SEQUENCE":
                whole += fits(item.request, theirs.text)
        for first, again in EVENTS[event].twins:
            compare(asked[again], run.answers[first], run.answers[again], f"depth {depth}, request {first} again")
        masks = after[depth].masks.written - before[depth].masks.written
        assert masks >= sum(
            len(answer.tokens) for item, answer in zip(asked, run.answers, strict=True)
            if item.request.HasField("structure")
        )  # fmt: skip
        assert "json_schema" not in kinds or whole, "nothing has ended by itself"
        held = after[depth].tokens.held_rows - before[depth].tokens.held_rows
        assert held > 0, "every mask was there in time"
        seen.append(EVENTS[event].witness(run))
        told.append(f"{depth}: {seen[-1]}, {whole} whole, {held} held")
    print(f"\n{kind} / {event}, structured, {dict(kinds)}: " + "; ".join(told))
    return seen
