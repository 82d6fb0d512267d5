"""The parity matrix: what befalls the requests of a kind, and the witness that it happened.

Request 0 of every cell is a short one that meets its stop string, if it has any. Whatever a cell does to its requests
must be seen to have happened, in what the services count or in the answers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from runahead.v1 import GenerateRequest
from tests.parity.client import Answer
from tests.parity.request_kinds import KINDS
from tests.parity.services import BLOCK
from tests.parity.workload import After, Asked, random_ids

SHORT: Final = "class Queue:\n    def __init__(self, maxsize=0):\n        self."
GOES_ON: Final = (
    "import os\n",
    "x = 1\n",
    "for i in range(10):\n    print(",
    "def read(path):\n    with open(path) as f:\n",
)
ENDS_SOON: Final = (
    "def get(self, key):\n    return self.data",
    "def add(a, b):\n    ",
    "def size(self):\n    return len(",
    "def __repr__(self):\n    return",
)
WHOLE: Final = 1 << 20  # more tokens than any answer has: after the end of it


@dataclass(slots=True)
class Script:
    """A cell's workload in the making. name: unique among all that the services are sent. uneven: some of its rows may
    get many more tokens than others in the same launches."""

    kind: str
    name: str
    dice: random.Random
    uneven: bool = False
    asked: list[Asked] = field(default_factory=list)

    def ask(
        self,
        prompt: str | list[int],
        max_tokens: int,
        *,
        ends: bool = False,
        priority: int = 0,
        salt: str = "",
        after: After | None = None,
        abort_after: int = 0,
        cancel_after: int = 0,
        seeded_as: int | None = None,
        kind: str | None = None,
    ) -> None:
        """One more request of the cell's kind (or another one's), whose prefix no other cell shares.

        ends: it may end by itself. seeded_as: place of the request whose sampling it takes over.
        """
        i = len(self.asked)
        request = GenerateRequest(request_id=f"{self.name}-{i}", cache_salt=f"{self.name}{salt}", priority=priority)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        request.stopping.max_tokens = max_tokens
        request.stopping.ignore_eos = not ends
        KINDS[kind or self.kind](request, i if seeded_as is None else seeded_as)
        self.asked.append(Asked(request, abort_after=abort_after, cancel_after=cancel_after, after=after))

    def ids(self, count: int) -> list[int]:
        return random_ids(self.dice, count)


@dataclass(frozen=True, slots=True)
class Run:
    """One cell on one service. counted: what its figures grew by, see `tests.parity.figures`."""

    kind: str
    depth: str
    asked: list[Asked]
    answers: list[Answer]
    counted: Counter[str]

    def ended(self, reason: str) -> int:
        return sum(answer.reason == reason for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Event:
    """pool: of which services. script: makes the workload. witness: what happened, by name; none of it may be zero.

    twins: pairs of requests, by place, that must have the same answer.
    """

    pool: str
    script: Callable[[Script], None]
    witness: Callable[[Run], dict[str, int]]
    twins: tuple[tuple[int, int], ...] = ()


def _staggered(script: Script) -> None:
    script.ask(SHORT, 20, after=After(4, 3))
    script.ask(GOES_ON[0], 32)
    for i in range(1, 4):
        script.ask(GOES_ON[i], 28, after=After(i, 3))


def _saw_staggered(run: Run) -> dict[str, int]:
    return {"admitted to a running chain": run.counted["admitted to a running chain"]}


def _end_of_sequence(script: Script) -> None:
    script.ask(SHORT, 20)
    for prompt in ENDS_SOON:
        script.ask(prompt, 48, ends=True)
    script.ask(GOES_ON[0], 56)


def _saw_end_of_sequence(run: Run) -> dict[str, int]:
    longest = max(len(answer.tokens) for answer in run.answers)
    ends = [answer for answer in run.answers if answer.reason == "END_OF_SEQUENCE"]
    seen = {"ended while others went on": sum(len(answer.tokens) < longest - 8 for answer in ends)}
    if run.depth != "serial":
        seen["void rows"] = run.counted["void rows"]
    return seen


def _pause(script: Script) -> None:
    """Five rows that end with 6 blocks each, 30 in all, where there are 28: not all can go on, and the first can. Where
    some may end before others grow, nine that begin with 2 and end with 7: three of them are enough."""
    script.ask(SHORT, 12)
    rows, prompt, tokens = (9, 20, 90) if script.uneven else (5, 62, 34)
    for _ in range(rows):
        script.ask(script.ids(prompt), tokens)


def _saw_pause(run: Run) -> dict[str, int]:
    return {name: run.counted[name] for name in ("paused", "resumed")}


def _eviction(script: Script) -> None:
    """Three rows that end with 10 blocks each, where there are 28, and one that goes before them and grows to 7: when
    it asks for one more and none is left, another gives up its own, however many tokens a launch brings."""
    script.ask(SHORT, 12, after=After(1, 2))
    script.ask(script.ids(40), 64, priority=1)
    for _ in range(3):
        script.ask(script.ids(90), 60)


def _saw_eviction(run: Run) -> dict[str, int]:
    return {name: run.counted[name] for name in ("evicted", "readmitted", "recomputed tokens")}


def _block_boundary(script: Script) -> None:
    """The last token is never forwarded: rows that fill their last block to the end, and rows that go one beyond."""
    script.ask(SHORT, 20)
    for prompt, forwarded in ((15, 32), (16, 33), (17, 48), (31, 49), (32, 64)):
        script.ask(script.ids(prompt), forwarded + 1 - prompt)


def _saw_block_boundary(run: Run) -> dict[str, int]:
    filled = [(answer.prompt_length + len(answer.tokens) - 1) % BLOCK == 0 for answer in run.answers]
    return {
        "reserved blocks": run.counted["reserved blocks"],
        "adopted blocks": run.counted["adopted blocks"],
        "ended with full blocks": sum(filled),
    }


def _abort(script: Script) -> None:
    """Once at once, twice while decoding, and one stream cancelled, beside three that go on."""
    script.ask(SHORT, 20)
    script.ask(script.ids(70), 100, abort_after=-1)
    script.ask(GOES_ON[0], 150, abort_after=3)
    script.ask(GOES_ON[1], 150, abort_after=9)
    script.ask(GOES_ON[2], 150, cancel_after=5)
    script.ask(script.ids(20), 32)
    script.ask(GOES_ON[3], 32)


def _saw_abort(run: Run) -> dict[str, int]:
    return {
        "ended ABORTED": run.ended("ABORTED"),
        "aborted while decoding": run.counted["aborted while decoding"],
        "cancelled": run.counted["cancelled"],
        "went on": run.ended("LENGTH"),
    }


def _prefix_hit(script: Script) -> None:
    """Each prompt again once it is answered; then a part of one, and one under another salt. The last is a probe."""
    long, other = script.ids(70), script.ids(33)
    script.ask(SHORT * 3, 16)
    script.ask(long, 20)
    script.ask(other, 20)
    script.ask(SHORT * 3, 16, after=After(0, WHOLE), seeded_as=0)
    script.ask(long, 20, after=After(1, WHOLE), seeded_as=1)
    script.ask(other, 20, after=After(2, WHOLE), seeded_as=2)
    script.ask(long, 20, after=After(1, WHOLE), seeded_as=1, salt="another")
    script.ask(long[:40] + other[:20], 12, after=After(1, WHOLE), kind="greedy")


def _saw_prefix_hit(run: Run) -> dict[str, int]:
    again, salted, probe = run.answers[3:6], run.answers[6], run.answers[7]
    hits = sum(answer.cached_tokens > 0 for answer in again)
    seen = {
        "hits of a part": probe.cached_tokens,
        "no hit under another salt": int(salted.cached_tokens == 0),
        "cached tokens": run.counted["cached tokens"],
    }
    if run.kind == "prompt-logprobs":
        seen["every repeat computed again"] = int(hits == 0)
    else:
        seen["every repeat a hit"] = int(hits == len(again))
    return seen


def _logging(script: Script) -> None:
    script.ask(SHORT, 20)
    for prompt in GOES_ON:
        script.ask(prompt, 28)


def _saw_logging(run: Run) -> dict[str, int]:
    seen = {"logging barriers": run.counted["logging barriers"]}
    if run.depth != "serial":
        seen["overlapped launches"] = run.counted["overlapped launches"]
    return seen


EVENTS: Final = {
    "staggered-arrival": Event("roomy", _staggered, _saw_staggered),
    "end-of-sequence": Event("roomy", _end_of_sequence, _saw_end_of_sequence),
    "forced-pause": Event("tight", _pause, _saw_pause),
    "forced-eviction": Event("tight", _eviction, _saw_eviction),
    "block-boundary": Event("roomy", _block_boundary, _saw_block_boundary),
    "abort": Event("roomy", _abort, _saw_abort),
    "prefix-hit": Event("roomy", _prefix_hit, _saw_prefix_hit, twins=((0, 3), (1, 4), (2, 5), (1, 6))),
    "logging-barrier": Event("barrier", _logging, _saw_logging),
}


def saw_kind(run: Run) -> dict[str, int]:
    """What was asked for came, by name; none of it may be zero. That every token has its own is checked elsewhere."""
    match run.kind:
        case "logprobs":
            return {"log-probabilities": sum(len(answer.logprobs) for answer in run.answers)}
        case "prompt-logprobs":
            scored = [scored for answer in run.answers for scored, _ in answer.prompt_logprobs]
            return {"log-probabilities of prompts": sum(score is not None for score in scored)}
        case "stop-strings":
            pairs = zip(run.asked, run.answers, strict=True)
            return {"stop strings met": sum(answer.stop in tuple(item.request.stopping.stop) for item, answer in pairs)}
    return {}


def saw_depth(run: Run) -> dict[str, int]:
    """The chain was as deep as it was asked to be."""
    return {"launches at the full depth": run.counted["launches at the full depth"]}


def workload_of(kind: str, event: str, attempt: int, *, uneven: bool = False) -> list[Asked]:
    """The requests of a cell; each attempt has other prompts and shares no prefix with any. uneven: as `Script`'s."""
    name = f"{kind}.{event}.{attempt}"
    script = Script(kind, name, random.Random(name), uneven)
    EVENTS[event].script(script)
    return script.asked
