"""A plan read back from its staging slot is the plan that was staged."""

from __future__ import annotations

import numpy as np
import pytest

from runahead.runtime.plan import HEADER, HEADER_WORDS, Admission, Chunk, LaunchPlan, PlanHeader, read_plan, stage
from runahead.runtime.row_record import ADMIT_WORDS, NUMPY_TYPES, PROMPT_BIT, ROW_RECORD, read_admission, token_mask
from runahead.runtime.scheduler.new_row import (
    admission_record,
    largest_record_words,
    penalty_list,
    record_words,
)
from runahead.runtime.scheduler.plan_builder import PlanBuilder
from runahead.runtime.wire.parameters import MAX_BIAS, MAX_STOP_IDS, SamplingParams, StoppingParams

SAMPLING = SamplingParams(
    temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=(1 << 64) - 3, bias_ids=(4, 9), bias_values=(1.5, -2.0),
    allowed_mask=token_mask((0, 31, 32, 69), 70).tobytes(), logprobs=3,
)  # fmt: skip
STOPPING = StoppingParams(max_tokens=10, min_tokens=2, stop_token_ids=(8, 3))


def fields_of(head: np.ndarray) -> dict[str, np.generic]:
    """The head of a record by the names of its fields."""
    return {name: column[0] for name, column in ROW_RECORD.columns(head.reshape(1, -1).copy()).items()}


def empty() -> np.ndarray:
    return np.zeros((0, 3), np.int32)


def test_a_steady_plan_is_its_header_of_64_bytes() -> None:
    rows = np.arange(256, dtype=np.int32)
    plan = LaunchPlan(5, rows, np.ones(256, np.bool_), False, empty(), tokens=256, sample_rows=255, is_decode=True)
    body = np.full(2048, -1, np.int32)
    stage(plan, body, np.zeros(8, np.int32))
    view = read_plan(body)
    assert view.rows is None
    assert (view.number, view.num_rows, view.tokens) == (5, 256, 256)
    assert view.bytes_read == 4 * HEADER_WORDS == 64
    assert PlanHeader(*HEADER.struct.unpack_from(body.data)) == (5, 255, 0, 256, 256, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    assert not body[HEADER.offset("guesses") + 1 : HEADER_WORDS].any()


def test_everything_in_a_mixed_plan_comes_back() -> None:
    record = admission_record(4, SAMPLING, STOPPING, 20, 30, (1,))
    plan = LaunchPlan(
        9,
        np.array([2, 4, 6], np.int32),
        np.array([True, False, True]),
        True,
        np.array([[4, 0, 17], [2, 3, 18]], np.int32),
        (Chunk(4, 0, np.arange(16, dtype=np.int32), False), Chunk(6, 16, np.arange(50, 54, dtype=np.int32), True)),
        (Admission(4, record),),
        tokens=21,
    )
    body, bulk = np.full(2048, -1, np.int32), np.full(512, -1, np.int32)
    stage(plan, body, bulk)
    view = read_plan(body)
    assert view.rows is not None
    assert view.rows.tolist() == [2, 4, 6]
    assert view.appends.tolist() == [[4, 0, 17], [2, 3, 18]]
    assert view.chunks.tolist() == [[1, 0, 16, 0, 0], [2, 16, 4, 16, 1]]
    assert bulk[16:20].tolist() == [50, 51, 52, 53]
    found = read_admission(bulk, int(view.admissions[0]))
    assert found.stop_ids.tolist() == [1, 8, 3]
    assert found.bias_ids.tolist() == [4, 9]
    assert found.bias_values.tolist() == [1.5, -2.0]
    allowed = np.unpackbits(found.allowed.view(np.uint8), bitorder="little").nonzero()[0]
    assert allowed.tolist() == [0, 31, 32, 69]
    assert fields_of(found.head)["seed"] == -3, "the same 64 bits"
    assert view.bulk_words == 20 + record.size


def test_a_record_ends_with_the_tokens_that_no_chunk_brings() -> None:
    history = np.arange(33, 40, dtype=np.int32)
    counts = penalty_list(np.array([3, 9], np.int32), np.array([7], np.int32))
    sampling, stopping = SamplingParams(presence_penalty=1.0), StoppingParams(max_tokens=10)
    record = admission_record(
        4, sampling, stopping, 20, 30, (1,), blocks=(7, 8), penalty_slot=1, counts=counts, history=history
    )
    assert record.size == record_words(sampling, stopping, (1,), blocks=2, counts=len(counts), history=history.size)
    found = read_admission(np.concatenate([np.full(5, -1, np.int32), record, np.full(9, -1, np.int32)]), 5)
    assert found.history.tolist() == history.tolist()
    assert found.counts.tolist() == counts.tolist()


def test_each_word_of_the_head_of_a_record_is_where_its_name_says() -> None:
    sampling = SamplingParams(
        temperature=0.7, top_k=11, top_p=0.9, min_p=0.05, seed=(5 << 32) + 6, bias_ids=(4,), bias_values=(1.5,),
        allowed_mask=token_mask((0,), 70).tobytes(), logprobs=3, repetition_penalty=1.1, presence_penalty=-0.25,
        frequency_penalty=0.75, prompt_logprobs=2,
    )  # fmt: skip
    stopping = StoppingParams(max_tokens=10, min_tokens=2, stop_token_ids=(8,))
    head = admission_record(
        4, sampling, stopping, 20, 30, (1,), blocks=(7, 8, 9, 10), penalty_slot=12, state_slot=13,
        counts=penalty_list(np.array([3, 9, 60, 61, 62], np.int32), np.array([7], np.int32)),
        history=np.arange(33, 40, dtype=np.int32), mask_epoch=(6 << 32) + 7, begins_as=14,
    )[:ADMIT_WORDS]  # fmt: skip
    expected = {
        "row_slot": 4, "temperature": 0.7, "top_k": 11, "top_p": 0.9, "min_p": 0.05, "logprobs": 3,
        "prompt_logprobs": 2, "repetition_penalty": 1.1, "presence_penalty": -0.25, "frequency_penalty": 0.75,
        "seed": (5 << 32) + 6, "mask_epoch": (6 << 32) + 7, "min_position": 22, "max_position": 29, "stop_count": 2,
        "bias_count": 1,
        "allowed_words": 3, "block_count": 4,
        "penalty_slot": 12, "penalty_entries": 6, "state_slot": 13,
        "history_count": 7, "begins_as": 14,
    }  # fmt: skip
    assert fields_of(head) == {
        name: NUMPY_TYPES[ROW_RECORD.fields[name].code](value) for name, value in expected.items()
    }
    assert not head[ROW_RECORD.offset("begins_as") + 1 :].any()


def test_record_words_is_the_size_of_the_record() -> None:
    for sampling in (SAMPLING, SamplingParams()):
        for blocks in ((), (7, 3)):
            record = admission_record(0, sampling, STOPPING, 20, 30, (1, 2), blocks=blocks)
            assert record.size == record_words(sampling, STOPPING, (1, 2), blocks=len(blocks))


PENALISED = SamplingParams(
    bias_ids=(4,), bias_values=(1.5,), allowed_mask=token_mask((0, 69), 70).tobytes(), prompt_logprobs=2,
    repetition_penalty=1.5, presence_penalty=-0.25, frequency_penalty=0.75,
)  # fmt: skip


def test_a_record_brings_cached_blocks_penalties_and_what_was_said_before_an_eviction() -> None:
    counts = penalty_list(np.array([3, 9, 60], np.int32), np.array([7, 3, 7], np.int32))
    record = admission_record(4, PENALISED, STOPPING, 4, 30, (1,), blocks=(17, 18, 5), penalty_slot=6, counts=counts)
    bulk = np.concatenate([np.full(11, -1, np.int32), record])
    found = read_admission(bulk, 11)
    fields = fields_of(found.head)
    assert found.head.size == ADMIT_WORDS
    assert fields["min_position"] == 4 + STOPPING.min_tokens, (
        "counted from the end of the prompt, whatever came after it"
    )
    assert fields["prompt_logprobs"] == 2
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    assert [fields[name] for name in penalties] == [1.5, -0.25, 0.75]
    assert fields["penalty_slot"] == 6
    assert found.allowed.size == 3
    assert found.blocks.tolist() == [17, 18, 5]
    assert found.counts.tolist() == [[3, PROMPT_BIT | 1], [7, 2], [9, PROMPT_BIT], [60, PROMPT_BIT]]
    assert record.size == record_words(PENALISED, STOPPING, (1,), blocks=3, counts=len(counts))


def test_no_record_is_larger_than_the_largest() -> None:
    stopping = StoppingParams(max_tokens=10, stop_token_ids=tuple(range(MAX_STOP_IDS)))
    for vocab_size, context in ((4096, 600), (1100, 5000)):
        sampling = SamplingParams(
            bias_ids=tuple(range(MAX_BIAS)),
            bias_values=(1.0,) * MAX_BIAS,
            allowed_mask=token_mask((0,), vocab_size).tobytes(),
            repetition_penalty=2.0,
        )
        said = (np.arange(context) % vocab_size).astype(np.int32)
        counts, blocks = penalty_list(np.unique(said[:9]), said[9:]), range(context // 8)
        record = admission_record(0, sampling, stopping, 9, context, (), blocks=blocks, penalty_slot=0, counts=counts)
        assert record.size == largest_record_words(vocab_size, context, context // 8)


def test_a_row_without_penalties_gets_no_penalty_slot() -> None:
    record = admission_record(0, SamplingParams(), STOPPING, 2, 30, (1,), penalty_slot=3)
    assert read_admission(record, 0).word("penalty_slot") == -1


def test_penalties_without_a_slot_are_refused() -> None:
    with pytest.raises(ValueError, match="penalty slot"):
        admission_record(0, PENALISED, STOPPING, 4, 30, (1,))


def test_a_target_follows_the_tokens_of_its_chunk() -> None:
    plan = LaunchPlan(
        9,
        np.array([4, 6], np.int32),
        np.array([False, True]),
        True,
        empty(),
        (Chunk(4, 0, np.array([30, 31], np.int32), False, target=32), Chunk(6, 8, np.array([50], np.int32), True)),
        tokens=3,
    )
    body, bulk = np.full(2048, -1, np.int32), np.full(16, -1, np.int32)
    stage(plan, body, bulk)
    view = read_plan(body)
    assert view.chunks.tolist() == [[0, 0, 2, 0, 0], [1, 8, 1, 3, 1]]
    assert bulk[:5].tolist() == [30, 31, 32, 50, -1]
    assert view.bulk_words == 4


def test_a_plan_larger_than_its_slot_is_refused() -> None:
    plan = LaunchPlan(1, np.arange(50, dtype=np.int32), np.ones(50, np.bool_), True, empty())
    with pytest.raises(OverflowError, match="plan 1"):
        stage(plan, np.zeros(64, np.int32), np.zeros(8, np.int32))


def test_whatever_the_builder_says_fits_can_be_staged() -> None:
    dice = np.random.default_rng(3)
    full = 0
    for _ in range(200):
        words, bulk_words = int(dice.integers(100, 400)), int(dice.integers(64, 256))
        builder = PlanBuilder(1, words, bulk_words, 64)
        decode = np.arange(int(dice.integers(0, 40)), dtype=np.int32)
        for slot in decode[: builder.appends_left(decode.size)].tolist():
            builder.append_blocks(slot, 0, [slot])
        builder.decode(decode)
        slot = 100
        while True:
            count, blocks = int(dice.integers(1, 20)), int(dice.integers(1, 4))
            record = admission_record(slot, SamplingParams(), STOPPING, count, 30, (1,))
            if not builder.fits(count, blocks, record.size):
                full += 1
                break
            builder.admit(Admission(slot, record))
            builder.append_blocks(slot, 0, list(range(blocks)))
            builder.chunk(Chunk(slot, 0, np.zeros(count, np.int32), True, target=int(dice.integers(-1, 2))))
            slot += 1
        plan = builder.build(np.zeros(0, np.int32), np.zeros(0, np.bool_))
        stage(plan, np.zeros(words, np.int32), np.zeros(bulk_words, np.int32))
    assert full == 200


@pytest.mark.parametrize(
    ("decoding", "chunks", "fits"),
    [
        (0, (30,), 34),  # no row decodes: up to max_prefill_tokens
        (2, (), 64),  # one chunk may be as long as any launch
        (2, (5,), 11),
        (2, (16,), 0),
    ],
)
def test_beside_rows_that_decode_several_chunks_are_shorter(decoding: int, chunks: tuple[int, ...], fits: int) -> None:
    builder = PlanBuilder(1, 256, 1024, 64, mixed_prefill_tokens=16)
    builder.decode(np.arange(decoding, dtype=np.int32))
    for slot, count in enumerate(chunks, 100):
        assert builder.fits(count, 1, 0)
        builder.chunk(Chunk(slot, 0, np.zeros(count, np.int32), True))
    assert builder.fits(fits, 1, 0) and not builder.fits(fits + 1, 1, 0)


@pytest.mark.parametrize(
    ("start", "end", "piece"),
    [
        (0, 40, 40),  # it fits
        (0, 41, 32),
        (0, 100, 40),
        (8, 100, 48),
        (4, 100, 40),
        (0, 47, 32),  # at least 8 tokens are left
        (36, 80, 72),
    ],
)
def test_a_chunk_is_cut_at_multiples_and_no_piece_is_short(start: int, end: int, piece: int) -> None:
    for unit in (0, 8):
        builder = PlanBuilder(1, 256, 1024, 64, mixed_prefill_tokens=40, piece_tokens=unit)
        builder.decode(np.arange(2, dtype=np.int32))
        assert builder.piece(start, end) == (piece if unit else end)


def test_a_chunk_without_room_for_a_piece_is_not_cut() -> None:
    builder = PlanBuilder(1, 256, 1024, 64, mixed_prefill_tokens=40, piece_tokens=8)
    builder.decode(np.arange(2, dtype=np.int32))
    builder.chunk(Chunk(7, 0, np.zeros(33, np.int32), True))
    assert builder.piece(0, 20) == 20 and not builder.fits(20, 1, 0)


@pytest.mark.parametrize(
    ("last_slots", "last_samples", "changed"),
    [([2, 4], [True, True], False), ([2, 4], [True, False], True), ([2, 5], [True, True], True), ([2], [True], True)],
    ids=["the same rows", "one was not sampled", "another row", "a row more"],
)
def test_the_row_list_is_left_out_only_where_the_device_holds_it_already(
    last_slots: list[int], last_samples: list[bool], changed: bool
) -> None:
    builder = PlanBuilder(1, 256, 256, 64)
    builder.decode(np.array([2, 4], np.int32))
    plan = builder.build(np.array(last_slots, np.int32), np.array(last_samples))
    assert plan.row_list_changed == changed
