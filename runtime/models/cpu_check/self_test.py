"""Tests row invariance: a token's logits have the same bits in any batch and with any chunks.

The kernels are row-invariant if their libraries keep one order of sums, which they do not promise. This detects
machines where they don't: at every start of the CPU device (`runahead.runtime.models.cpu_check.cpu_kernels`), and in
tests with more rows, threads and chunks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.reference.linear import RowInvarianceError
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.rounding import ceil_div

MASKED = -1  # stands for a sequence's number in `Trial.advance`


class Trial:
    """Numbered sequences, each with a block table. Tokens are given or appended."""

    def __init__(self, decoder: Decoder, sequences: Sequence[Sequence[int]], capacity: int, block_size: int, seed: int):
        """Make the sequences. capacity: most tokens of each."""
        self.tokens = [list(sequence) for sequence in sequences]
        self.computed = [0] * len(sequences)
        self._decoder = decoder
        self._blocks_each = ceil_div(capacity, block_size)
        num_blocks = len(sequences) * self._blocks_each * 2 + 1
        draw = torch.Generator().manual_seed(seed)
        self._cache = decoder.make_cache(num_blocks, block_size, state_slots=len(sequences) + 1)
        states = [tensor for each in self._cache.states for tensor in each]
        for tensor in (*self._cache.keys, *self._cache.values, *states):
            tensor.fill_(float("nan"))
        order = torch.randperm(num_blocks - 1, generator=draw) + 1
        owned = order[: len(sequences) * self._blocks_each].view(-1, self._blocks_each)
        self._spare = int(order[-1])  # unowned: entries of block tables beyond a row's length
        self._tables = owned.to(torch.int32)
        self._state_slots = torch.randperm(len(sequences), generator=draw).tolist()

    def advance(self, work: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Run one forward. work: (sequence, number of its next tokens), or (MASKED, number) for a masked row.

        Returns the logits of every query token by item of work, float32 [number, vocab], also for masked rows.
        """
        batch = self._batch(work)
        logits = self._decoder.logits(self._decoder.forward(batch, self._cache))
        for sequence, count in work:
            if sequence != MASKED:
                self.computed[sequence] += count
        return list(logits.split([count for _, count in work]))

    def _batch(self, work: Sequence[tuple[int, int]]) -> ForwardBatch:
        block_size = self._cache.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        seq_lens: list[int] = []
        state_slots: list[int] = []
        tables = torch.full((len(work), self._blocks_each + 1), self._spare, dtype=torch.int32)
        for row, (sequence, count) in enumerate(work):
            if sequence == MASKED:
                token_ids += [0] * count
                positions += [0] * count
                slots += [0] * count
                seq_lens.append(0)
                state_slots.append(row % (len(self.tokens) + 1))  # another row's slot, which must not change
                continue
            state_slots.append(self._state_slots[sequence])
            start = self.computed[sequence]
            used = ceil_div(start + count, block_size)
            table = self._tables[sequence].tolist()
            tables[row, :used] = self._tables[sequence, :used]
            token_ids += self.tokens[sequence][start : start + count]
            positions += range(start, start + count)
            slots += [table[p // block_size] * block_size + p % block_size for p in range(start, start + count)]
            seq_lens.append(start + count)
        starts = [0]
        for _, count in work:
            starts.append(starts[-1] + count)
        assert len(token_ids) == starts[-1], "work asks for tokens that a sequence does not have"
        device = self._decoder.device
        return ForwardBatch(
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            num_tokens=len(token_ids),
            num_rows=len(work),
            max_seq_len=max(seq_lens),
            is_decode=all(count == 1 for _, count in work),
            state_slots=torch.tensor(state_slots, dtype=torch.int32, device=device),
        )


_LONGEST_CHUNK = 72
_DISTINCT = 4  # sequences: to compute one alone takes a forward for each token


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """What was compared: tokens, forwards, and how many of these had decode rows and chunks together."""

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
) -> SelfTestReport:
    """Compare every token's logits in random schedules with its sequence's logits alone, token by token, bit by bit.

    rows: numbers of concurrent rows, of four sequences. threads: torch threads to try. longest: tokens of a
    sequence; one in four is four times as long. A schedule draws for every forward the participants, their order and
    chunk lengths, and adds masked rows. Raises RowInvarianceError at the first difference.
    """
    draw = random.Random(0)
    context = min(4 * longest, decoder.config.max_position_embeddings)
    sequences = [_sequence(decoder, draw, context, longest, index == 0) for index in range(_DISTINCT)]
    with _threads(threads[0]):
        alone = [_alone(decoder, sequence, context) for sequence in sequences]
    report = SelfTestReport(0, 0, 0, 0)
    for count in threads:
        for together in rows:
            with _threads(count):
                chosen = [index % _DISTINCT for index in draw.sample(range(max(rows)), together)]
                trial = Trial(decoder, [sequences[i] for i in chosen], context, 16, draw.randrange(1 << 30))
                report = _compare(trial, [alone[i] for i in chosen], draw, report, f"{together} rows, {count} threads")
    return report


def _sequence(decoder: Decoder, draw: random.Random, context: int, longest: int, is_long: bool) -> list[int]:
    length = draw.randint(context // 2, context) if is_long else draw.randint(1, min(longest, context))
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
    chunky = draw.random() < 0.5  # otherwise a decode launch
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
