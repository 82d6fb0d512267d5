"""Row invariance, tried out: a token's logits are the same bits whatever ran beside it and however it got there.

The kernels are row-invariant as far as the libraries under them keep to one order of sums, which they do not promise.
This fails loudly on a machine where they don't: at every start of the CPU device
(`runahead.runtime.models.cpu_check.cpu_kernels`), and in tests with more rows, threads and chunks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from runahead.runtime.kernels.reference.linear import RowInvarianceError
from runahead.runtime.models.cpu_check.trial import MASKED, Trial
from runahead.runtime.models.decoder import Decoder

_LONGEST_CHUNK = 72


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """What was compared: tokens, in how many forwards, of which so many had decode rows and chunks together."""

    tokens: int
    forwards: int
    mixed_forwards: int
    widest_forward: int  # query tokens


@torch.inference_mode()
def self_test(
    decoder: Decoder,
    rows: Sequence[int] = (1, 2, 3, 5, 8, 13, 31, 72),
    threads: Sequence[int] = (1, 2),
    longest: int = 48,
    seed: int = 0,
) -> SelfTestReport:
    """Compare every token's logits in random schedules with those of its sequence alone, token by token, bit by bit.

    rows: numbers of sequences that run together. threads: torch threads to try. longest: tokens of a sequence; one in
    eight is four times as long. A schedule draws, for every forward, who takes part, in which order, with chunks of
    which length, and puts masked rows between them. Raises RowInvarianceError at the first difference.
    """
    draw = random.Random(seed)
    context = min(4 * longest, decoder.config.max_position_embeddings)
    sequences = [_sequence(decoder, draw, context, longest) for _ in range(max(rows))]
    with _threads(threads[0]):
        alone = [_alone(decoder, sequence, context) for sequence in sequences]
    report = SelfTestReport(0, 0, 0, 0)
    for count in threads:
        for together in rows:
            with _threads(count):
                chosen = draw.sample(range(len(sequences)), together)
                trial = Trial(decoder, [sequences[i] for i in chosen], context, 16, draw.randrange(1 << 30))
                report = _compare(trial, [alone[i] for i in chosen], draw, report, f"{together} rows, {count} threads")
    return report


def _sequence(decoder: Decoder, draw: random.Random, context: int, longest: int) -> list[int]:
    length = draw.randint(context // 2, context) if draw.random() < 0.125 else draw.randint(1, min(longest, context))
    return [draw.randrange(decoder.config.vocab_size) for _ in range(length)]


def _alone(decoder: Decoder, sequence: list[int], context: int) -> torch.Tensor:
    trial = Trial(decoder, [sequence], context, 16, seed=0)
    return torch.cat([trial.advance([(0, 1)])[0] for _ in sequence])


def _compare(
    trial: Trial, alone: list[torch.Tensor], draw: random.Random, report: SelfTestReport, where: str
) -> SelfTestReport:
    """Run `trial` to its end on a random schedule."""
    tokens, forwards, mixed, widest = report.tokens, report.forwards, report.mixed_forwards, report.widest_forward
    while unfinished := [i for i, known in enumerate(trial.tokens) if trial.computed[i] < len(known)]:
        work = _draw_work(trial, unfinished, draw)
        begun = list(trial.computed)
        for (sequence, count), logits in zip(work, trial.advance(work), strict=True):
            if sequence == MASKED:
                continue
            first = begun[sequence]
            if not torch.equal(logits, alone[sequence][first : first + count]):
                raise RowInvarianceError(
                    f"positions {first} to {first + count - 1} of a sequence have other logits among {where}, in a "
                    f"forward of {sum(n for _, n in work)} tokens, than alone: a library's arithmetic depends on the "
                    "batch on this machine"
                )
            tokens += count
        live = [count for sequence, count in work if sequence != MASKED]
        forwards += 1
        mixed += min(live) == 1 < max(live)
        widest = max(widest, sum(count for _, count in work))
    return SelfTestReport(tokens, forwards, mixed, widest)


def _draw_work(trial: Trial, unfinished: list[int], draw: random.Random) -> list[tuple[int, int]]:
    taking_part = [i for i in unfinished if draw.random() < 0.9] or unfinished[:1]
    draw.shuffle(taking_part)
    chunky = draw.random() < 0.5  # else a decode launch
    work: list[tuple[int, int]] = []
    for sequence in taking_part:
        left = len(trial.tokens[sequence]) - trial.computed[sequence]
        most = min(left, _LONGEST_CHUNK) if chunky and draw.random() < 0.4 else 1
        work.append((sequence, draw.randint(1, most)))
        if draw.random() < 0.1:
            work.append((MASKED, 1))
    return work


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
