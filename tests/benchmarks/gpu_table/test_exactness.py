"""How answers alone and among others are compared, and that they are asked for as a live service is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.gpu_table.cells import Run
from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.exactness import FEW, Answer, Crowd, agreement, agreements, check_exact
from benchmarks.gpu_table.merge import merge
from benchmarks.gpu_table.parts import PARTS, run_part
from benchmarks.gpu_table.tables import tables
from runahead.v1 import EngineConfiguration, Exactness
from tests.benchmarks.gpu_table.sample_results import result

SCORED = [(-0.5, ((3, -0.5),)), (-1.0, ())]


def test_the_crowd_is_the_same_in_every_run_but_for_what_the_prefix_cache_finds() -> None:
    once, again = Crowd().wanted("a"), Crowd().wanted("b")
    assert [one.after_s for one in once] == [one.after_s for one in again]
    for one, other in zip(once, again, strict=True):
        assert one.request.cache_salt != other.request.cache_salt
        other.request.request_id, other.request.cache_salt = one.request.request_id, one.request.cache_salt
        assert one.request == other.request


def test_the_crowd_is_of_many_kinds_and_within_its_bounds() -> None:
    crowd = Crowd()
    asked = [one.request for one in crowd.wanted("a")]
    assert len(asked) == 48 and all(0 <= one.after_s <= 0.8 for one in crowd.wanted("a"))
    lengths, tokens = [len(one.token_ids.ids) for one in asked], [one.stopping.max_tokens for one in asked]
    assert 3 <= min(lengths) < 100 and 600 < max(lengths) <= 700
    assert any(length > 128 and length % 128 == 1 for length in lengths), "the last chunk of which has one token"
    assert 40 <= min(tokens) < 80 and 250 < max(tokens) <= 300
    for kinds in (
        {one.sampling.temperature == 0 for one in asked},
        {one.sampling.top_p < 1 for one in asked},
        {one.output.HasField("logprobs") for one in asked},
        {bool(one.stopping.stop_token_ids) for one in asked},
    ):
        assert kinds == {True, False}


def test_an_answer_differs_by_its_tokens_by_how_it_ended_or_by_any_bit_of_a_log_probability() -> None:
    expected = [
        Answer([1, 2], list(SCORED), "LENGTH"),
        Answer([1, 2], [], "LENGTH"),
        Answer([4, 5], list(SCORED), "STOP"),
    ]
    same = agreement(expected, list(map(replace, expected)), "on", 2, False)
    assert (same.requests, same.with_logprobs, same.other_tokens, same.other_logprobs) == (3, 2, 0, 0)
    found = [
        replace(expected[0], tokens=[1, 3]),
        replace(expected[1], reason="STOP"),
        replace(expected[2], logprobs=[SCORED[0], (-1.0000001, ())]),
    ]
    other = agreement(expected, found, "on", 2, False)
    assert (other.other_tokens, other.other_logprobs) == (2, 1)


def test_nothing_is_compared_where_no_log_probability_came() -> None:
    with pytest.raises(BenchmarkError, match="no answer brought log-probabilities"):
        agreement([Answer([1], [], "LENGTH")], [Answer([1], [], "LENGTH")], "on", 2, False)


def test_a_service_that_is_not_what_was_asked_for_is_no_measurement() -> None:
    for asked, exact in (("on", False), ("off", True)):
        engine = EngineConfiguration(device="cuda", exactness=Exactness(exact=exact, why="too dear"))
        with pytest.raises(BenchmarkError, match=f"started with exact {asked}, and says: (.|\n)*too dear"):
            check_exact(asked, engine)  # type: ignore[arg-type]
    check_exact("off", EngineConfiguration(device="cpu", exactness=Exactness(exact=True)))


@pytest.mark.timeout(300)
def test_on_the_cpu_no_answer_of_a_live_service_differs() -> None:
    found = list(agreements("on", {"device": "cpu"}, FEW, (2,), lambda: ""))
    assert [(one.alone, one.requests, one.other_tokens, one.other_logprobs) for one in found] == [
        (True, 6, 0, 0), (False, 6, 0, 0),
    ]  # fmt: skip
    text = tables(merge([result("exactness", agreements=tuple(found))]))
    assert "| on | together | 2 | 0 of 6 | 0 of 4 |" in text


def test_the_part_begins_no_service_when_its_time_is_up_and_says_so() -> None:
    found = run_part(PARTS["exactness-tiny"], Run("cpu", 1, 0.0, "0123456789ab"))
    assert found.agreements == ()
    assert found.failure == "exact on: the part had run for 0 s; exact off: the part had run for 0 s"
