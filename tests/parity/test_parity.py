"""Every depth gives the tokens, log-probabilities and finish reasons of `serial`, to the bit, through the real service.

The servers run the CPU device's test mode: seeded delays between host and device, and poison in whatever is given back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.parity.client import Answer, stats_at_rest
from tests.parity.services import BLOCK, DEPTHS, run_everywhere, services_at_every_depth
from tests.parity.workload import Asked, kinds, workload


@pytest.fixture(scope="module")
def services() -> Iterator[dict[str, str]]:
    """URLs by depth."""
    with services_at_every_depth(lambda i: ["--threads", "1", "--jitter-seed", str(7 + i)]) as urls:
        yield urls


def compare(asked: Asked, serial: Answer, other: Answer, where: str) -> None:
    """The same answer; of a request that was cut short, one answer is the beginning of the other."""
    for answer in (serial, other):
        assert answer.terminals == (0 if answer.cancelled else 1), f"{where}: {answer.terminals} terminals"
        assert answer.after_terminal == 0, f"{where}: something followed the terminal"
        assert not answer.reason.startswith("status"), f"{where}: {answer.reason}"
    if asked.abort_after or asked.cancel_after:
        common = min(len(serial.tokens), len(other.tokens))
        assert serial.tokens[:common] == other.tokens[:common], where
        common = min(len(serial.text), len(other.text))
        assert serial.text[:common] == other.text[:common], where
        return
    assert other.tokens == serial.tokens, where
    assert other.logprobs == serial.logprobs, where
    assert (other.text, other.reason, other.stop) == (serial.text, serial.reason, serial.stop), where
    assert other.completion_tokens == serial.completion_tokens, where


@pytest.mark.timeout(0)  # each workload has its own
def test_every_depth_gives_the_answers_of_serial_to_the_bit(services: dict[str, str], seeds: range) -> None:
    asked_for: Counter[str] = Counter()
    happened: dict[str, Counter[str]] = {depth: Counter() for depth in DEPTHS}
    for seed in seeds:
        asked = workload(seed)
        asked_for.update(kinds(asked))  # keeps what was never asked for, at zero
        answers = asyncio.run(run_everywhere(services, asked))
        for depth in DEPTHS:
            happened[depth].update(events(asked, answers[depth]))
            for item, serial, other in zip(asked, answers["serial"], answers[depth], strict=True):
                compare(item, serial, other, f"seed {seed}, depth {depth}, request {item.request.request_id}")
    figures = {depth: asyncio.run(stats_at_rest(url)) for depth, url in services.items()}
    report(asked_for, happened, figures)
    assert all(asked_for.values()), asked_for
    for depth in DEPTHS:
        assert all(happened[depth].values()), happened[depth]
        chain, tokens, blocks, rows = (
            figures[depth].chain, figures[depth].tokens, figures[depth].blocks, figures[depth].rows,
        )  # fmt: skip
        assert (blocks.free, rows.free) == (blocks.total, rows.total), "something was not given back"
        assert (figures[depth].requests.waiting, figures[depth].requests.running) == (0, 0)
        assert tokens.generated >= 3 * chain.launches, "fewer than 3 rows were live on average"
        if depth == "serial":
            assert chain.overlapped == 0
        else:
            assert chain.overlap_ratio > 0.5
            assert tokens.void_rows > 0


def events(asked: list[Asked], answers: list[Answer]) -> Counter[str]:
    """How often each kind of event happened in one run of a workload."""
    counts: Counter[str] = Counter()
    for reason in ("END_OF_SEQUENCE", "STOP", "LENGTH", "CONTEXT_LENGTH", "ABORTED"):
        counts[reason] = sum(answer.reason == reason for answer in answers)
    for item, answer in zip(asked, answers, strict=True):
        counts["stop string met"] += answer.stop in tuple(item.request.stopping.stop)
        counts["stop token met"] += answer.reason == "STOP" and answer.stop not in tuple(item.request.stopping.stop)
        counts["cancelled"] += answer.cancelled
        counts["aborted in the queue or the prompt"] += answer.reason == "ABORTED" and not answer.tokens
        counts["aborted while decoding"] += answer.reason == "ABORTED" and bool(answer.tokens)
        counts["block boundaries crossed"] += len(answer.tokens) // BLOCK
    return counts


def report(asked_for: Counter[str], happened: dict[str, Counter[str]], figures: dict[str, object]) -> None:
    """Printed with -s: what was asked for, and what happened at each depth."""
    print("\nasked for: " + ", ".join(f"{name} {count}" for name, count in asked_for.items()))
    for depth, counts in happened.items():
        chain, tokens = figures[depth].chain, figures[depth].tokens  # type: ignore[attr-defined]
        print(
            f"depth {depth}: " + ", ".join(f"{name} {count}" for name, count in counts.items()) + f"; "
            f"launches {chain.launches}, rows a launch {tokens.generated / chain.launches:.1f}, "
            f"overlap ratio {chain.overlap_ratio:.2f}, void rows {tokens.void_rows}, chunks {tokens.prefill_chunks}"
        )
