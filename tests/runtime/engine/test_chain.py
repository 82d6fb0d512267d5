"""The chain on the simulated device: the same tokens at every depth, whatever happens around a row."""

from __future__ import annotations

import random

import pytest

from runahead.cuda_graphs.device import DeviceError
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from tests.cuda_graphs.simulated_device import seeded_schedule
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.programs.hash_model import EOS, VOCAB, completion

DEPTHS = [0, 1, 2, 3, 4]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_alone_gets_the_models_tokens(depth: int) -> None:
    chain = make_chain(depth)
    prompt = list(range(2, 45))
    chain.submit(1, prompt, seed=7, max_tokens=30)
    chain.run()
    assert chain.tokens()[1] == completion(prompt, 7, 30)
    assert len(chain.finished()[1]) == 1


def random_workload(chain: Chain, seed: int) -> dict[int, tuple[list[int], int, int]]:
    """16 to 40 requests arriving over time, some aborted; returns what each of them asked."""
    dice = random.Random(seed)
    asked: dict[int, tuple[list[int], int, int]] = {}
    for handle in range(1, dice.randint(16, 40)):
        prompt = [dice.randrange(2, VOCAB) for _ in range(dice.randint(1, 60))]
        asked[handle] = (prompt, dice.getrandbits(63), dice.randint(1, 40))
        chain.submit(handle, prompt, seed=asked[handle][1], max_tokens=asked[handle][2])
        if dice.random() < 0.2:
            chain.tell(m.Abort(handle, (f"r{dice.randint(1, handle)}",)))
        if dice.random() < 0.1:
            chain.tell(m.Cancel(dice.randint(1, handle)))
        for _ in range(dice.randint(0, 4)):
            chain.turn()
    chain.run()
    return asked


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("seed", range(12))
def test_every_depth_gives_the_models_tokens_under_a_random_workload(depth: int, seed: int) -> None:
    chain = make_chain(depth, schedule=seeded_schedule(seed), max_rows=5, num_blocks=41)
    asked = random_workload(chain, seed)
    tokens, finished = chain.tokens(), chain.finished()
    cut = 0
    for handle, (prompt, request_seed, max_tokens) in asked.items():
        expected, got = completion(prompt, request_seed, max_tokens), tokens.get(handle, [])
        ends = finished.get(handle, [])
        if ends and ends[0].reason != FinishReason.ABORTED:
            assert got == expected
            reason = FinishReason.END_OF_SEQUENCE if expected[-1] == EOS else FinishReason.LENGTH
            assert [end.reason for end in ends] == [reason]
        else:
            cut += 1
            assert got == expected[: len(got)]
            assert len(ends) <= 1
    assert cut > 0, "no request was aborted or cancelled: the workload lost its point"
    chain.check_nothing_is_left()


def test_run_ahead_overlaps_and_serial_does_not() -> None:
    ratios = {}
    for depth in DEPTHS:
        chain = make_chain(depth, schedule=no_step)
        chain.submit(1, [5, 6, 7], max_tokens=60, ignore_eos=True)
        chain.run()
        ratios[depth] = chain.engine.stats().overlap_ratio
    assert ratios[0] == 0.0
    assert all(ratios[depth] > 0.9 for depth in DEPTHS[1:])


def test_a_deliberate_drain_lowers_the_overlap_ratio() -> None:
    def ratio(drains: bool) -> float:
        chain = make_chain(2, schedule=no_step)
        chain.submit(1, [5, 6, 7], max_tokens=60, ignore_eos=True)
        while not chain.finished():
            chain.turn()
            if drains:
                chain.engine.drain("test")
        chain.run()
        return chain.engine.stats().overlap_ratio

    assert ratio(True) < 0.8 * ratio(False)


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_more_launches_are_uncommitted_than_the_depth_allows(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    for handle in range(1, 5):
        chain.submit(handle, [handle + 1] * 3, max_tokens=30, ignore_eos=True)
    chain.run()
    assert chain.engine.stats().ledger_depth_max == max(depth, 1)


def test_a_steady_decode_copies_at_most_64_bytes_a_launch_whatever_the_rows() -> None:
    chain = make_chain(2, max_rows=64, num_blocks=1025, block_size=256, context_length=2048, prefill_chunk=256,
                       max_prefill_tokens=512)  # fmt: skip
    for handle in range(1, 65):
        chain.submit(handle, [handle + 1] * 4, max_tokens=200, ignore_eos=True)
    while chain.engine.stats().running < 64 or chain.engine.stats().generated_tokens < 64 * 8:
        chain.turn()
    launches, copied = chain.engine.ledger.ended, chain.device.counters.bytes_to_device
    while chain.engine.ledger.ended < launches + 100:
        chain.turn()
    assert chain.device.counters.bytes_to_device - copied <= 64 * (chain.engine.ledger.ended - launches)


def test_an_id_aborted_before_it_arrives_ends_aborted_when_it_does() -> None:
    chain = make_chain()
    chain.tell(m.Abort(1, ("late",)))
    chain.turn()
    chain.submit(1, [3, 4], request_id="late", max_tokens=5)
    chain.run()
    assert [end.reason for end in chain.finished()[1]] == [FinishReason.ABORTED]
    assert chain.tokens() == {}
    chain.submit(2, [3, 4], request_id="late", max_tokens=5)
    chain.run()
    assert len(chain.tokens()[2]) > 0


def test_a_duplicate_id_is_refused_and_the_first_goes_on() -> None:
    chain = make_chain()
    chain.submit(1, [3, 4], request_id="same", max_tokens=5)
    chain.submit(2, [3, 4], request_id="same", max_tokens=5)
    chain.run()
    assert [(refused.handle, refused.code) for refused in chain.refused()] == [(2, "ALREADY_EXISTS")]
    assert chain.tokens().keys() == {1}


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "field"), [(20, 100, "stopping.max_tokens"), (40, 1, "prompt")]
)
def test_a_request_larger_than_the_pool_is_refused_and_told_what_to_change(
    prompt_tokens: int, max_tokens: int, field: str
) -> None:
    chain = make_chain(num_blocks=5)  # 32 tokens
    chain.submit(1, [3] * prompt_tokens, max_tokens=max_tokens)
    chain.run()
    (refused,) = chain.refused()
    assert (refused.code, refused.field) == ("INVALID_ARGUMENT", field)
    assert "KV cache" in refused.message


def test_a_full_queue_refuses() -> None:
    chain = make_chain(max_queue=2, max_rows=1)
    chain.submit(1, [3, 4], max_tokens=20, ignore_eos=True)
    chain.turn_until(lambda: chain.is_running("r1"))
    for handle in range(2, 7):
        chain.submit(handle, [3, 4], max_tokens=5)
    chain.run()
    assert [(refused.handle, refused.code) for refused in chain.refused()] == [
        (handle, "RESOURCE_EXHAUSTED") for handle in (4, 5, 6)
    ]
    assert sorted(chain.finished()) == [1, 2, 3]


def test_requests_for_which_rows_are_free_do_not_count_as_waiting() -> None:
    chain = make_chain(max_queue=1, max_rows=4)
    for handle in range(1, 7):
        chain.submit(handle, [3, 4], max_tokens=5)
    chain.run()
    assert [refused.handle for refused in chain.refused()] == [6]


def test_the_context_ends_a_request_that_may_go_on() -> None:
    chain = make_chain(context_length=32, eos=())
    chain.submit(1, [3] * 20, max_tokens=100)
    chain.run()
    assert [end.reason for end in chain.finished()[1]] == [FinishReason.CONTEXT_LENGTH]
    assert len(chain.tokens()[1]) == 12


def test_a_lost_front_end_leaves_nothing_behind() -> None:
    chain = make_chain()
    for handle in range(1, 12):
        chain.submit(handle, [handle + 1] * 30, max_tokens=50, ignore_eos=True)
    for _ in range(5):
        chain.turn()
    chain.tell(None)
    chain.run()
    assert chain.engine.stats().front_ends_lost == 1
    chain.check_nothing_is_left()


def test_a_stale_plan_is_caught_by_the_device() -> None:
    chain = make_chain(2, schedule=no_step)
    chain.submit(1, [3, 4], max_tokens=40, ignore_eos=True)
    for _ in range(4):
        chain.turn()
    rings = chain.device.rings
    rings.plan[rings.slot(chain.engine.ledger.launched), 0] += 7
    with pytest.raises(DeviceError, match="another launch's plan"):
        chain.run()


def test_admission_is_by_priority_and_then_by_arrival() -> None:
    chain = make_chain(max_rows=1)
    chain.submit(1, [3] * 4, max_tokens=3)
    chain.turn()
    for handle, priority in ((2, 0), (3, 5), (4, 5)):
        chain.submit(handle, [handle] * 4, max_tokens=3, priority=priority)
    chain.run()
    assert list(chain.finished()) == [1, 3, 4, 2]


def test_min_tokens_keeps_stop_ids_away() -> None:
    stops = tuple(range(30))
    without = make_chain(eos=stops)
    without.submit(1, [95, 96], max_tokens=40)
    without.run()
    assert len(without.tokens()[1]) < 20, "the row must want to end early, or this test shows nothing"
    chain = make_chain(eos=stops)
    chain.submit(1, [95, 96], max_tokens=40, min_tokens=20)
    chain.run()
    assert len(chain.tokens()[1]) >= 20
    assert not set(chain.tokens()[1][:20]) & set(stops)


def test_handles_have_64_bits_and_tokens_32() -> None:
    chain = make_chain()
    chain.submit(1, [3, 4], max_tokens=1)
    chain.run()
    (output,) = chain.outputs()
    assert (len(output.handles), len(output.tokens)) == (8, 4)
