"""The rings have the sizes that their layout says."""

from __future__ import annotations

from dataclasses import fields

from runahead.cuda_graphs.rings import RingLayout, allocate_rings, ring_bytes


def test_every_array_of_the_rings_has_a_slot_for_each_launch() -> None:
    rings = allocate_rings(
        RingLayout(slots=4, plan_words=64, bulk_words=128, rows=5, max_top=3, drafts=2, prompt_tokens=7)
    )
    assert rings.cells.shape == (4, 5, 3)
    assert rings.finite.shape == (4, 5)
    assert rings.prompt_logprob.shape == (4, 7)
    assert rings.prompt_top_ids.shape == rings.prompt_top_logprobs.shape == (4, 7, 3)
    assert rings.logprob.shape == (4, 5, 3)
    assert rings.top_ids.shape == rings.top_logprobs.shape == (4, 5, 3, 3)
    assert {len(getattr(rings, name)) for name in ("plan", "bulk", "status", "start_ns", "end_ns", "idle_ns")} == {4}


def test_without_drafts_and_prompts_there_is_one_cell_a_row_and_nothing_for_prompts() -> None:
    rings = allocate_rings(RingLayout(3, 64, 128, 5, 1))
    assert rings.cells.shape == (3, 5, 1)
    assert rings.prompt_logprob.size == rings.prompt_top_ids.size == 0


def test_what_rings_take_is_known_before_they_are_made() -> None:
    layout = RingLayout(slots=4, plan_words=64, bulk_words=128, rows=5, max_top=3, drafts=2, prompt_tokens=7)
    rings = allocate_rings(layout)
    arrays = (getattr(rings, each.name) for each in fields(rings) if each.name != "layout")
    assert ring_bytes(layout) == sum(array.nbytes for array in arrays)
