"""The row kernels against `HostRows`: the same plans and tokens, the same state, queries and result cells."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.rings import (  # noqa: E402
    FAULT_NONE,
    FAULT_PLAN_NUMBER,
    NON_FINITE,
    STATUS_FAULT,
    STOPPED,
    VOID,
    RingLayout,
    allocate_rings,
)
from runahead.runtime.drafters.ngram import NgramDrafter  # noqa: E402
from runahead.runtime.kernels.reference.sampling import Sampled  # noqa: E402
from runahead.runtime.plan import HEADER_WORDS, PLAN_WORDS, Admission, Chunk, LaunchPlan, stage  # noqa: E402
from runahead.runtime.programs.cpu.rows import HostRows  # noqa: E402
from runahead.runtime.row_record import token_mask  # noqa: E402
from runahead.runtime.scheduler.new_row import NO_COUNTS, NO_HISTORY, admission_record, penalty_list  # noqa: E402
from runahead.runtime.wire.parameters import MAX_BIAS, MAX_STOP_IDS, SamplingParams, StoppingParams  # noqa: E402
from tests.runtime.kernels.device_twin import DeviceTwin  # noqa: E402

MAX_ROWS = 6
BLOCK_SIZE = 8
CONTEXT = 64
VOCAB = 90
PENALTY_SLOTS = 3
CHUNKS = (8, 16, 24)
STALE = -99.0  # in a ring: what was there before
LAYOUT = RingLayout(slots=4, plan_words=PLAN_WORDS, bulk_words=4096, rows=MAX_ROWS, max_top=3, drafts=1)


class Pair:
    """One chain of plans through both implementations, each with rings of its own."""

    def __init__(self, seed: int, launched: int = 0, drafter: NgramDrafter | None = None) -> None:
        self.dice = random.Random(seed)
        self.host = HostRows(
            allocate_rings(LAYOUT),
            MAX_ROWS,
            CONTEXT // BLOCK_SIZE,
            VOCAB,
            BLOCK_SIZE,
            MAX_STOP_IDS,
            MAX_BIAS,
            penalty_slots=PENALTY_SLOTS,
            launched=launched,
            drafter=drafter,
        )
        self.twin = DeviceTwin(
            self.host, DEVICE, max_tokens=MAX_ROWS * max(CHUNKS), context_length=CONTEXT, launched=launched
        )
        self.rings, self.device = self.twin.rings, self.twin.device
        for slot in range(PENALTY_SLOTS):  # an admission clears what the row before it left
            self.host.poison_penalty_slot(slot)
            self.twin.forget(penalty_slot=slot)
        self.penalty_slots: dict[int, int] = {}
        self.prompt_left: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        self.blocks: dict[int, int] = {}
        self.last: tuple[list[int], list[bool]] = ([], [])
        self.seen: Counter[str] = Counter()

    # -------------------------------------------------- S

    def sample(self) -> None:
        places, slots = self.host.to_sample()
        self.host.begin()
        rows = len(self.last[0])
        tokens = np.array([self.dice.randrange(VOCAB) for _ in range(rows)], np.int32)
        finite = np.array([self.dice.random() > 0.03 for _ in range(rows)], np.bool_)
        tokens[~finite] = 0
        if rows:
            self.host.advance(places, slots, tokens[places], finite[places])
            expected = self.twin.advance(places, tokens[places], finite[places], padding=self.dice.randrange(3))
            for name, flag in (("stopped", STOPPED), ("void", VOID), ("non-finite", NON_FINITE)):
                self.seen[name] += int(np.count_nonzero(expected & flag))

    # -------------------------------------------------- a random plan

    def plan(self) -> LaunchPlan:
        number = self.host.number  # S of the launch has begun
        appends: list[tuple[int, int, int]] = []
        chunks, admissions = [], []
        for slot in range(MAX_ROWS):
            if slot not in self.lengths and self.dice.random() < 0.1:
                self.prompt_left[slot] = self.dice.choice([1, 9, 17, self.dice.randrange(2, 30)])
                self.blocks[slot] = self.dice.randrange(3)  # found in the prefix cache
                self.lengths[slot] = self.blocks[slot] * BLOCK_SIZE
                self.seen["cached prefixes"] += self.blocks[slot] > 0
                prefix = [self.dice.randrange(1, 1000) for _ in range(self.blocks[slot])]
                admissions.append(self.admission(slot, self.lengths[slot] + self.prompt_left[slot], prefix))
            elif slot in self.lengths and not self.prompt_left[slot] and self.dice.random() < 0.05:
                del self.lengths[slot]
                self.penalty_slots.pop(slot, None)
        decode = [slot for slot in self.lengths if not self.prompt_left[slot] and self.lengths[slot] < CONTEXT - 1]
        for slot in decode:
            self.lengths[slot] += 1
        for slot in [slot for slot in self.lengths if self.prompt_left[slot]]:
            count = min(self.prompt_left[slot], self.dice.choice(CHUNKS))
            start = self.lengths[slot]
            self.prompt_left[slot] -= count
            self.lengths[slot] += count
            tokens = np.array([self.dice.randrange(VOCAB) for _ in range(count)], np.int32)
            last = self.prompt_left[slot] == 0
            chunks.append(Chunk(slot, start, tokens, last, -1 if last else self.dice.randrange(VOCAB)))
        for slot, length in self.lengths.items():
            while self.blocks[slot] * BLOCK_SIZE < length:
                appends.append((slot, self.blocks[slot], self.dice.randrange(1, 1000)))
                self.blocks[slot] += 1
        rows = sorted(decode + [chunk.slot for chunk in chunks])
        skipped = {chunk.slot for chunk in chunks if not chunk.samples}
        samples = [slot not in skipped for slot in rows]
        changed = not (rows == self.last[0] and all(self.last[1]))
        self.last = (rows, samples)
        self.seen["skipped"] += len(skipped)
        return LaunchPlan(
            number=number,
            rows=np.array(rows, np.int32),
            samples=np.array(samples, np.bool_),
            row_list_changed=changed,
            appends=np.array(appends, np.int32).reshape(-1, 3),
            chunks=tuple(chunks),
            admissions=tuple(admissions),
            tokens=len(decode) + sum(chunk.tokens.size for chunk in chunks),
        )

    def admission(self, slot: int, prompt_len: int, blocks: list[int]) -> Admission:
        dice = self.dice
        free = sorted(set(range(PENALTY_SLOTS)) - set(self.penalty_slots.values()))
        sampling = SamplingParams(
            temperature=dice.random(),
            top_k=dice.randrange(10),
            top_p=dice.random(),
            min_p=dice.random(),
            seed=dice.getrandbits(64),
            bias_ids=tuple(range(dice.randrange(5))),
            bias_values=(0.5, -1.0, 2.0, 3.0)[: dice.randrange(5)],
            allowed_mask=token_mask(dice.sample(range(VOCAB), 5), VOCAB).tobytes() if dice.random() < 0.5 else b"",
            logprobs=dice.randrange(-1, 3),
            prompt_logprobs=dice.randrange(-1, 3),
            repetition_penalty=dice.choice([1.0, 1.5]) if free else 1.0,
            presence_penalty=dice.choice([0.0, 0.5]) if free else 0.0,
            frequency_penalty=dice.choice([0.0, -0.25]) if free else 0.0,
        )
        if sampling.has_penalty:
            self.penalty_slots[slot] = dice.choice(free)
            self.seen["penalties"] += 1
        tokens = np.array([dice.randrange(VOCAB) for _ in range(prompt_len + dice.randrange(9))], np.int32)
        bias = min(len(sampling.bias_ids), len(sampling.bias_values))
        fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
        fields |= {"bias_ids": sampling.bias_ids[:bias], "bias_values": sampling.bias_values[:bias]}
        stops = tuple(dice.sample(range(VOCAB), dice.randrange(4)))
        stopping = StoppingParams(max_tokens=30, min_tokens=dice.randrange(3), stop_token_ids=stops)
        max_len = min(CONTEXT, prompt_len + stopping.max_tokens)
        prompt_ids = np.unique(tokens[:prompt_len]) if sampling.repetition_penalty != 1 else tokens[:0]
        counts = penalty_list(prompt_ids, tokens[prompt_len:]) if sampling.has_penalty else NO_COUNTS
        record = admission_record(
            slot,
            SamplingParams(**fields),
            stopping,
            prompt_len,
            max_len,
            (3,),
            blocks=blocks,
            penalty_slot=self.penalty_slots.get(slot, -1),
            counts=counts,
            history=tokens[: len(blocks) * BLOCK_SIZE] if self.host.drafter is not None else NO_HISTORY,
        )
        return Admission(slot, record)

    # -------------------------------------------------- apply and F's inputs

    def apply(self, plan: LaunchPlan) -> None:
        ring = plan.number % LAYOUT.slots
        stage(plan, self.host.rings.plan[ring], self.host.rings.bulk[ring])
        read = self.host.apply()
        rows, mixed = plan.rows.size, bool(plan.chunks)
        asked = self.twin.apply(read, padding=self.dice.randrange(3), unowned=self.dice.choice((0, 1, 40)))
        self.seen["prompt log-probabilities"] += asked
        self.seen["steady"] += rows > 0 and read == 4 * HEADER_WORDS
        self.seen["mixed"] += mixed
        self.seen["single-token chunks"] += mixed and rows == plan.tokens
        self.seen["closing"] += not rows


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("seed", range(3))
def test_sixty_random_launches_leave_the_state_of_the_reference(seed: int) -> None:
    pair = Pair(seed)
    for _ in range(60):
        pair.sample()
        pair.apply(pair.plan())
    assert pair.seen["mixed"] and pair.seen["steady"] and pair.seen["skipped"], pair.seen


def test_a_drafter_knows_the_tokens_of_prefixes_chunks_and_steps() -> None:
    pair = Pair(3, drafter=NgramDrafter(MAX_ROWS, CONTEXT))
    for _ in range(60):
        pair.sample()
        pair.apply(pair.plan())
    assert pair.seen["mixed"] and pair.seen["steady"] and pair.seen["cached prefixes"] and pair.seen["penalties"]


@pytest.mark.parametrize("border", [1 << 31, 1 << 32])
def test_launches_across_a_border_of_their_number_leave_the_state_of_the_reference(border: int) -> None:
    pair = Pair(4, launched=border - 15)
    for _ in range(30):
        pair.sample()
        pair.apply(pair.plan())
    assert int(pair.device.counter) == pair.host.number == border + 15
    assert pair.seen["mixed"] and pair.seen["steady"], pair.seen


@pytest.mark.parametrize("number", [1, (1 << 31) + 1, (1 << 32) + 1])
def test_a_plan_whose_number_differs_in_its_upper_half_alone_masks_every_row(number: int) -> None:
    pair = Pair(9, launched=number - 1)
    pair.sample()
    ring = number % LAYOUT.slots
    for planned, fault in ((number + (1 << 32), FAULT_PLAN_NUMBER), (number, FAULT_NONE)):
        pair.device.reset(number - 1)
        stage(pair.plan()._replace(number=planned), pair.rings.plan[ring], pair.rings.bulk[ring])
        pair.device.apply(0, 0, False)
        synchronize()
        assert pair.rings.status[ring, STATUS_FAULT] == fault


def test_the_random_launches_hold_every_kind_of_end() -> None:
    total: Counter[str] = Counter()
    for seed in (5, 6):
        pair = Pair(seed)
        for _ in range(60):
            pair.sample()
            pair.apply(pair.plan())
        total += pair.seen
    wanted = ["stopped", "void", "non-finite", "single-token chunks", "penalties", "cached prefixes"]
    wanted.append("prompt log-probabilities")
    assert all(total[name] for name in wanted), total


def test_log_probabilities_go_to_the_cell_of_each_rows_first_token() -> None:
    """Rings with drafts have more of them; what belongs to those stays as it is."""
    pair = Pair(9)
    while len(pair.last[0]) < 3:
        pair.sample()
        pair.apply(pair.plan())
    rows, top = len(pair.last[0]), LAYOUT.max_top
    pair.device.state.logprobs[:MAX_ROWS] = top
    pair.rings.logprob[:] = pair.rings.top_logprobs[:] = STALE
    logprob = torch.arange(rows, dtype=torch.float32, device=DEVICE)
    top_ids = torch.arange(rows * top, dtype=torch.int32, device=DEVICE).reshape(rows, top)
    tokens = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    pair.device.state.alive[:MAX_ROWS] = True
    pair.device.advance(rows, Sampled(tokens, tokens == 0, logprob, top_ids, top_ids / 8))
    synchronize()
    asked = np.flatnonzero(pair.last[1])
    assert asked.size >= 2, "it takes two rows to see how far apart they are"
    ring, first = (pair.host.number + 1) % LAYOUT.slots, (np.arange(rows * top) / 8).reshape(rows, top)
    assert pair.rings.logprob[ring, asked, 0].tolist() == asked.tolist()
    assert pair.rings.top_ids[ring, asked, 0].tolist() == top_ids.cpu().numpy()[asked].tolist()
    assert pair.rings.top_logprobs[ring, asked, 0].tolist() == first[asked].tolist()
    assert (pair.rings.logprob[ring, :, 1:] == STALE).all() and (pair.rings.top_logprobs[ring, :, 1:] == STALE).all()


def test_a_plan_of_another_number_masks_every_row_and_says_so() -> None:
    pair = Pair(9)
    while not (pair.host.rows.size and pair.seen["steady"]):
        pair.sample()
        pair.apply(pair.plan())
    rows = pair.host.rows.size
    pair.sample()  # the next launch finds an old plan, or none, in its slot
    for is_decode, tokens in ((True, rows), (False, rows + 40)):
        pair.device.queries.slot_mapping.fill_(1 << 20)
        pair.device.apply(rows, tokens, is_decode)
        synchronize()
        assert pair.rings.status[int(pair.device.counter) % LAYOUT.slots, STATUS_FAULT] == FAULT_PLAN_NUMBER
        batch = pair.device.batch(rows, tokens, is_decode)
        assert not batch.seq_lens.any()
        assert bool((batch.slot_mapping < BLOCK_SIZE).all())


def test_reset_forgets_every_row_and_launch() -> None:
    pair = Pair(1)
    for _ in range(20):
        pair.sample()
        pair.apply(pair.plan())
    pair.device.reset(launched=(1 << 32) + 5)
    assert int(pair.device.counter) == (1 << 32) + 5
    assert not pair.device.state.alive.any()
    assert not pair.device.penalties.counts.any()
    assert bool((pair.device.rows.slots == MAX_ROWS).all())
