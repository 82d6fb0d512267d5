"""Which row counts and numbers of query tokens get a captured graph, and which graph a launch takes."""

from __future__ import annotations

import dataclasses

import pytest

from runahead.cuda_graphs.buckets import (
    MOST_MIXED_TOKENS,
    Buckets,
    GraphKey,
    Piece,
    buckets_for,
    most_forward_tokens,
)
from runahead.cuda_graphs.device import Form, LaunchShape


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8, 9, 48, 64, 65, 100, 256, 257, 512, 1024])
def test_buckets_ascend_and_end_with_the_largest_launch(max_rows: int) -> None:
    buckets = buckets_for(max_rows)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == max_rows


def test_a_bucket_is_never_twice_as_large_as_what_it_holds() -> None:
    buckets = buckets_for(1024)
    for rows in range(1, 1025):
        bucket = next(bucket for bucket in buckets if bucket >= rows)
        assert bucket < 2 * rows or rows == bucket


@pytest.mark.parametrize("max_rows", [1, 8, 20, 64, 100, 1024])
@pytest.mark.parametrize("mixed_tokens", [9, 31, 32, 100, 320, 512, 513, 2112])
def test_every_launch_that_fits_has_a_graph_with_room_for_it_and_that_graph_is_captured(
    max_rows: int, mixed_tokens: int
) -> None:
    buckets = Buckets.up_to(max_rows, mixed_tokens)
    keys = buckets.every_key()
    assert len(set(keys)) == len(keys)
    captured, most = set(keys), min(mixed_tokens, MOST_MIXED_TOKENS)
    for rows in sorted({1, 7, 8, 9, 63, 64, 65, max_rows} & set(range(1, max_rows + 1))):
        for sampled in (0, 1, max_rows):
            decode = LaunchShape(1, sampled, Form.FULL, rows, rows, is_decode=True)
            for tokens in {*range(rows + 1, most + 1, 31), *range(max(rows + 1, most - 1), most + 1)}:
                mixed = LaunchShape(1, sampled, Form.PLAIN, rows, tokens, is_decode=False)
                for shape in (decode, mixed):
                    key = buckets.launch_key(shape)
                    assert key in captured
                    assert key is not None and key.rows >= max(rows, sampled) and key.form is shape.form
                    assert key.shape.tokens >= shape.tokens
                    assert key.shape.is_decode == shape.is_decode
                    assert buckets.launch_key(key.shape) == key, "what is captured is a launch of that graph"
            assert buckets.sample_key(decode) in captured


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(2, 32), (32, 32), (33, 64), (64, 64), (65, 96), (511, 512), (512, 512), (513, None)]
)
def test_the_query_tokens_of_a_mixed_launch_choose_the_next_larger_bucket(tokens: int, bucket: int | None) -> None:
    buckets = Buckets.up_to(64, 4096)
    key = buckets.launch_key(LaunchShape(1, 0, Form.PLAIN, rows=1, tokens=tokens, is_decode=False))
    assert (None if key is None else key.tokens) == bucket
    if key is not None:
        assert (key.piece, key.rows) == (Piece.MIXED, 8)


def test_few_graphs_are_captured_for_prompts_however_large_a_launch_may_be() -> None:
    mixed = [key for key in Buckets.up_to(512, 1 << 15).every_key() if key.piece is Piece.MIXED]
    assert len(mixed) == 3 * 16 * len(Form)
    assert mixed[0].shape.tokens == 512 and mixed[0].rows == 512, "the largest first"


def test_apply_and_f_of_larger_mixed_launches_are_graphs_up_to_the_tokens_that_are_asked_for() -> None:
    buckets = Buckets.up_to(100, 8292, forward_tokens=1300)
    assert buckets.forward_tokens == (*range(576, 1281, 64),) and buckets.forward_rows == (1, 64, 100)
    captured = set(buckets.every_key())
    assert captured >= set(Buckets.up_to(100, 8292).every_key())
    for tokens in range(2, 1400):
        for rows in (1, 2, 64, 65, 100):
            shape = LaunchShape(1, 100, Form.FULL, rows, max(tokens, rows + 1), is_decode=False, sample_drafts=0)
            key = buckets.forward_key(shape)
            assert (key is not None) == (512 < shape.tokens <= 1280), "below it is one graph, above it comes in pieces"
            if key is None:
                continue
            assert key in captured and key.piece is Piece.FORWARD and key.form is Form.PLAIN
            assert key.rows >= rows and (key.rows == 1) == (rows == 1) and 0 <= key.tokens - shape.tokens < 64
            assert (key.shape.rows, key.shape.tokens, key.shape.is_decode) == (key.rows, key.tokens, False)
            assert buckets.launch_key(shape) is None and buckets.why_none(shape) == "mixed"
            assert buckets.calls(shape, 270) == 2
            asking = shape._replace(prompt_logprobs=True)
            assert buckets.forward_key(asking) is None and buckets.calls(asking, 270) > 270
    assert GraphKey(Piece.FORWARD, 100, Form.PLAIN, tokens=1280) == buckets.largest_keys()[0]


@pytest.mark.parametrize(
    ("most", "asked", "found"),
    [
        (8292, 511, None),
        (8292, 575, None),
        (8292, 576, 576),
        (8292, 1 << 40, 3072),
        (700, 1 << 40, 700),
        (300, 900, None),
    ],
)
def test_the_largest_launch_whose_f_is_a_graph_is_one_that_there_may_be(
    most: int, asked: int, found: int | None
) -> None:
    buckets = Buckets.up_to(100, most, forward_tokens=asked)
    assert max(buckets.forward_tokens, default=None) == found
    assert set(buckets.forward_tokens) <= set(buckets.pieces_tokens), "a start lets products meet these sizes"


def test_many_rows_have_graphs_by_64_and_leave_room_for_2048_prompt_tokens() -> None:
    assert buckets_for(1024)[-13:] == (*range(256, 1024, 64), 1024)
    assert [most_forward_tokens(rows) for rows in (1, 256, 512, 1024)] == [2304, 2304, 2560, 3072]


def test_what_leaves_log_probabilities_of_prompts_or_has_no_rows_is_no_graph() -> None:
    buckets = Buckets.up_to(64, 4096)
    for shape in (
        LaunchShape(1, 3, Form.PLAIN, rows=0, tokens=0, is_decode=False),
        LaunchShape(1, 3, Form.PLAIN, rows=2, tokens=40, is_decode=False, prompt_logprobs=True),
        LaunchShape(1, 3, Form.PLAIN, rows=2, tokens=2, is_decode=True, prompt_logprobs=True),
    ):
        assert buckets.launch_key(shape) is None
        assert buckets.sample_key(shape).rows == 4


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (LaunchShape(1, 3, Form.FULL, rows=0, tokens=0, is_decode=False), "closing"),
        (LaunchShape(1, 3, Form.FULL, rows=2, tokens=513, is_decode=False), "mixed"),
        (LaunchShape(1, 3, Form.PLAIN, rows=2, tokens=513, is_decode=False, prompt_logprobs=True), "mixed"),
        (LaunchShape(1, 3, Form.PLAIN, rows=2, tokens=512, is_decode=False, prompt_logprobs=True), "prompt_logprobs"),
        (LaunchShape(1, 3, Form.PLAIN, rows=2, tokens=2, is_decode=True, prompt_logprobs=True), "prompt_logprobs"),
        (LaunchShape(1, 3, Form.PLAIN, rows=3, tokens=6, is_decode=True, drafts=1), "drafts"),
    ],
)
def test_why_a_launch_is_no_graph_is_what_would_have_to_be_otherwise(shape: LaunchShape, why: str) -> None:
    """Of a launch that is too large its log-probabilities are not the reason: without them it would be none either."""
    buckets = Buckets.up_to(64, 4096, draft_forms=(1,), draft_rows=8)
    assert buckets.launch_key(shape) is None
    assert buckets.why_none(shape) == why


def test_graphs_with_drafts_are_captured_in_their_forms_and_two_serve_a_launch_whose_halves_differ() -> None:
    buckets = Buckets.up_to(64, 320, draft_forms=(1, 3), draft_rows=16, masked=True)
    captured = set(buckets.every_key())
    for rows, drafts, masked in ((1, 1, False), (3, 3, False), (3, 3, True), (16, 3, True)):
        shape = LaunchShape(
            1, rows, Form.FULL, rows, rows * (1 + drafts), True, drafts=drafts, sample_drafts=drafts, masked=masked
        )
        key = buckets.launch_key(shape)
        assert key in captured and key is not None
        assert (key.drafts, key.shape.tokens, key.masked) == (drafts, key.rows * (1 + drafts), masked)
        for halves in (shape._replace(sample_drafts=0), shape._replace(drafts=0, tokens=rows)):
            assert buckets.launch_key(halves) is None
            assert {buckets.sample_key(halves), buckets.forward_key(halves)} <= captured
    wide = LaunchShape(1, 16, Form.PLAIN, 17, 17, True, sample_drafts=3)
    assert buckets.forward_key(wide) is None, "of so many rows there are no drafts"
    behind = LaunchShape(1, 3, Form.PLAIN, 4, 40, is_decode=False, sample_drafts=3)
    assert buckets.launch_key(behind) is None and buckets.forward_key(behind) is None
    assert buckets.sample_key(behind) in captured


def test_launches_of_which_nobody_guesses_a_draft_are_graphs_of_their_own_where_that_counts() -> None:
    others = Buckets.up_to(64, 320, draft_forms=(1, 3), draft_rows=16, masked=True)
    buckets = Buckets.up_to(64, 320, draft_forms=(1, 3), draft_rows=16, masked=True, forced_rows=8)
    captured, more = set(buckets.every_key()), set(buckets.every_key()) - set(others.every_key())
    assert set(others.every_key()) < captured
    assert {(key.piece, key.rows) for key in more} == {
        (piece, rows) for piece in (Piece.LAUNCH, Piece.FORWARD) for rows in (1, 2, 4, 8)
    }
    assert all(key.forced and key.shape.forced and key.drafts == 3 for key in more)
    shape = LaunchShape(
        1, 5, Form.FULL, 5, 20, True, drafts=3, sample_drafts=3, masked=True, forced=True
    )  # fmt: skip
    began = shape._replace(form=Form.PLAIN, sample_drafts=0, masked=False)
    assert buckets.launch_key(shape) in more and buckets.forward_key(began) in more
    for same in (
        shape._replace(forced=False),  # somebody guesses
        shape._replace(form=Form.PLAIN, masked=False),  # no graph of its own: what guesses serves it as well
        shape._replace(rows=9, tokens=36),
        shape._replace(drafts=1, sample_drafts=1, tokens=10),
    ):
        key, as_if = buckets.launch_key(same), others.launch_key(same)
        assert key == as_if and key in captured
        assert buckets.forward_key(same._replace(forced=False)) == others.forward_key(same)
    assert others.launch_key(shape) == others.launch_key(shape._replace(forced=False))


@pytest.mark.parametrize(
    ("shape", "calls"),
    [
        (LaunchShape(1, 3, Form.PLAIN, 3, 3, is_decode=True), 1),
        (LaunchShape(1, 3, Form.PLAIN, 3, 512, is_decode=False), 1),
        (LaunchShape(1, 3, Form.PLAIN, 3, 513, is_decode=False), 270),
        (LaunchShape(1, 3, Form.PLAIN, 3, 64, is_decode=False, prompt_logprobs=True), 270 + 32),
        (LaunchShape(1, 3, Form.PLAIN, 0, 0, is_decode=False), 5),
        (LaunchShape(1, 3, Form.PLAIN, 3, 6, is_decode=True, drafts=1), 2),
    ],
)
def test_a_launch_takes_a_call_for_each_graph_and_one_in_pieces_as_many_as_it_has(
    shape: LaunchShape, calls: int
) -> None:
    assert Buckets.up_to(64, 4096, draft_forms=(1,), draft_rows=8).calls(shape, 270) == calls


@pytest.mark.parametrize("forms", [(), (1, 3)])
def test_a_trial_captures_the_largest_graphs_that_look_for_masks_too(forms: tuple[int, ...]) -> None:
    plain = Buckets.up_to(96, 300, forms, 32).largest_keys()
    found = Buckets.up_to(96, 300, forms, 32, masked=True).largest_keys()
    sampling = [key for key in plain if key.piece is not Piece.FORWARD]
    assert set(found) == {*plain, *(dataclasses.replace(key, masked=True) for key in sampling)}
    assert len(found) == len(plain) + len(sampling)


def test_the_largest_graph_of_each_piece_is_what_a_trial_captures() -> None:
    buckets = Buckets.up_to(96, 300, (1, 3), 32)
    found = buckets.largest_keys()
    assert {(key.piece, key.drafts, key.rows, key.tokens) for key in found} == {
        (Piece.LAUNCH, 0, 96, 0), (Piece.SAMPLE, 0, 96, 0), (Piece.MIXED, 0, 96, 300),
        (Piece.LAUNCH, 1, 32, 0), (Piece.SAMPLE, 1, 32, 0), (Piece.LAUNCH, 3, 32, 0), (Piece.SAMPLE, 3, 32, 0),
        *((Piece.FORWARD, drafts, 32, 0) for drafts in (0, 1, 3)),
    }  # fmt: skip
    assert all(key.form is Form.FULL for key in found if key.piece is not Piece.FORWARD)
    assert set(found) < set(buckets.every_key())
    assert found[0].shape.tokens == max(key.shape.tokens for key in buckets.every_key())


def test_launches_that_look_for_masks_are_graphs_of_their_own_and_nobody_elses_change() -> None:
    plain, masked = Buckets.up_to(64, 320), Buckets.up_to(64, 320, masked=True)
    others = set(masked.every_key()) - set(plain.every_key())
    assert set(plain.every_key()) < set(masked.every_key()) and all(key.masked for key in others)
    for is_decode, tokens in ((True, 17), (False, 100)):
        shape = LaunchShape(1, 17, Form.FULL, 17, tokens, is_decode)
        assert masked.launch_key(shape) == plain.launch_key(shape)
        key = masked.launch_key(shape._replace(masked=True))
        assert key in others and key is not None and key.shape.masked
    assert masked.sample_key(LaunchShape(1, 3, Form.FULL, 0, 0, False, masked=True)) in others


@pytest.mark.parametrize("max_rows", [1, 5, 64, 100, 256])
@pytest.mark.parametrize("most", [20, 300, 512, 1100, 8448])
def test_launches_in_pieces_have_few_sizes_which_a_start_can_meet_all(max_rows: int, most: int) -> None:
    buckets = Buckets.up_to(max_rows, most, draft_forms=(3,), draft_rows=min(max_rows, 4))
    assert buckets.pieces_tokens[-1] == most and set(buckets.mixed_tokens) <= set(buckets.pieces_tokens)
    assert len(buckets.pieces_tokens) <= 16 + (most - MOST_MIXED_TOKENS) // 64 + 1 or most <= MOST_MIXED_TOKENS
    shapes = [LaunchShape(7, 3, Form.FULL, rows, rows, True, prompt_logprobs=True) for rows in range(1, max_rows + 1)]
    for tokens in range(2, most + 1):
        rows = 1 + tokens % min(max_rows, tokens)
        shapes.append(LaunchShape(7, 3, Form.PLAIN, rows, tokens, is_decode=False, sample_drafts=tokens % 2 * 3))
    for shape in shapes:
        padded = buckets.padded(shape)
        assert padded.rows in buckets.rows, "for whose logits the product of decode launches has warmed up"
        assert padded.rows >= shape.rows and padded.tokens >= shape.tokens
        assert padded == shape._replace(rows=padded.rows, tokens=padded.tokens), "nothing else is another"
        assert padded.tokens == padded.rows if shape.is_decode else padded.tokens in buckets.pieces_tokens
        if shape.tokens > MOST_MIXED_TOKENS:
            assert padded.tokens - shape.tokens < 64, "no more than the tiles of products have anyway"
    alone = LaunchShape(7, 1, Form.PLAIN, 1, most, is_decode=False)
    assert buckets.padded(alone) == alone, "a chunk that is alone may have kernels of its own"


def test_a_closing_launch_and_the_lines_of_drafts_are_padded_as_what_they_are() -> None:
    buckets = Buckets.up_to(64, 4096, draft_forms=(3,), draft_rows=16)
    closing = LaunchShape(1, 3, Form.PLAIN, rows=0, tokens=0, is_decode=False)
    assert buckets.padded(closing) == closing
    asking = LaunchShape(1, 3, Form.PLAIN, 3, 12, is_decode=True, prompt_logprobs=True, drafts=3)
    assert buckets.padded(asking) == asking._replace(rows=4, tokens=16)


def test_log_probabilities_of_padding_are_counted_among_the_calls_too() -> None:
    buckets = Buckets.up_to(64, 4096)
    shapes = [LaunchShape(1, 3, Form.PLAIN, 3, tokens, False, prompt_logprobs=True) for tokens in (513, 576)]
    assert [buckets.calls(shape, 270) for shape in shapes] == [270 + 288, 270 + 288]
