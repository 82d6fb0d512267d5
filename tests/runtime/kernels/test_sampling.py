"""The reference sampler against an independent oracle, its ties, its masks, its statistics and its row invariance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from runahead.cuda_graphs.device import Form
from runahead.runtime.kernels.reference import philox, sampling
from runahead.runtime.kernels.reference.sampling import Sampled, sample_rows
from runahead.runtime.kernels.reference.sampling_filters import highest, kept_tokens
from runahead.runtime.row_record import ROW_TENSORS
from tests.runtime.kernels.sampling_oracle import RowSpec, expect, penalties_of, random_spec, state_of

MAX_TOP = 20


def sample(logits: torch.Tensor, specs: list[RowSpec], form: Form = Form.FULL) -> Sampled:
    state = state_of(specs, logits.shape[1])
    return sample_rows(logits, state, penalties_of(specs, logits.shape[1]), torch.arange(len(specs)), form, MAX_TOP)


def tokens_of(logits: torch.Tensor, specs: list[RowSpec], form: Form = Form.FULL) -> list[int]:
    return sample(logits, specs, form).tokens.tolist()


def random_logits(rows: int, vocab_size: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def mixed_specs(count: int, vocab_size: int, seed: int) -> list[RowSpec]:
    random = np.random.default_rng(seed)
    return [random_spec(random, vocab_size) for _ in range(count)]


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    assert one is not None
    assert other is not None
    return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()


# ---------------------------------------------------------------- against the oracle


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 64, 333, 1030])
def test_rows_of_every_kind_get_what_the_oracle_finds(vocab_size: int) -> None:
    count = 60
    random = np.random.default_rng(vocab_size)
    specs = [random_spec(random, vocab_size) for _ in range(count)] if vocab_size > 30 else []
    specs = specs or [RowSpec(temperature=0.5 * (i % 3), seed=i, top_k=i % 3, top_p=0.9) for i in range(count)]
    logits = random_logits(count, vocab_size, seed=vocab_size)
    found = sample(logits, specs)
    assert found.logprob is not None
    assert found.top_ids is not None
    assert found.top_logprobs is not None
    for row, spec in enumerate(specs):
        expected = expect(logits[row].numpy(), spec)
        assert int(found.tokens[row]) == expected.token, spec
        assert bool(found.finite[row])
        assert float(found.logprob[row]) == pytest.approx(expected.logprob, abs=2e-6, rel=2e-6)
        asked = len(expected.top)
        assert found.top_ids[row, :asked].tolist() == [token for token, _ in expected.top]
        assert found.top_logprobs[row, :asked].tolist() == pytest.approx(
            [value for _, value in expected.top], abs=2e-6, rel=2e-6
        )
        assert not found.top_ids[row, asked:].any()
        assert not found.top_logprobs[row, asked:].any()


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
def test_filters_leave_the_tokens_that_the_oracle_leaves(scale: float) -> None:
    random = np.random.default_rng(int(scale * 100))
    for _ in range(60):
        size = int(random.choice([5, 100, 1500]))
        logits = (random.normal(size=size) * scale).astype(np.float32)
        spec = RowSpec(
            temperature=1.0,
            top_k=int(random.choice([0, 0, 3, 600])),
            top_p=float(random.choice([1.0, 0.999, 0.9, 0.3])),
            min_p=float(random.choice([0.0, 0.01, 0.5])),
        )
        kept = kept_tokens(logits - logits.max(), spec.top_k, np.float32(spec.top_p), np.float32(spec.min_p))
        assert len(set(kept.tolist())) == len(kept)
        assert frozenset(kept.tolist()) == expect(logits, spec).kept


def test_top_p_works_on_what_top_k_left_and_min_p_on_what_top_p_left() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    scores = logits - logits.max()

    def kept(top_k: int, top_p: float, min_p: float) -> list[int]:
        return sorted(kept_tokens(scores, top_k, np.float32(top_p), np.float32(min_p)).tolist())

    assert kept(0, 0.75, 0.0) == [0, 1, 2]  # 0.4 + 0.3 < 0.75
    assert kept(2, 0.75, 0.0) == [0, 1]  # of 0.7: 0.57 alone does not reach it
    assert kept(2, 0.55, 0.0) == [0]  # of 0.7: 0.57 does; of the whole, 0.4 would not
    assert kept(0, 0.95, 0.6) == [0, 1]  # 0.3 / 0.4 = 0.75, 0.2 / 0.4 = 0.5
    assert kept(0, 1e-30, 0.0) == [0]  # never empty
    assert kept(0, 1.0, 1.0) == [0]


@pytest.mark.parametrize("top_k", [0, 2])
def test_a_share_that_rounds_to_0_leaves_the_most_likely_token(top_k: int) -> None:
    scores = np.array([-1.0, 0.0, 0.0, -2.0], np.float32)
    assert kept_tokens(scores, top_k, np.float32(5e-324), np.float32(0.0)).tolist() == [1]


@pytest.mark.parametrize("share", [1e-45, 1e-50, 0.0])
def test_a_row_with_a_tiny_top_p_has_its_own_token_and_leaves_its_neighbour_alone(share: float) -> None:
    logits = random_logits(2, 64, seed=3)
    specs = [RowSpec(temperature=1.0, top_p=share, seed=1), RowSpec(temperature=1.0, seed=2)]
    alone = [tokens_of(logits[[row]], [spec])[0] for row, spec in enumerate(specs)]
    assert tokens_of(logits, specs) == alone
    assert alone[0] == int(logits[0].argmax())


def test_a_row_of_which_nothing_is_left_gets_no_neighbours_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "kept_tokens", lambda scores, *_: np.zeros(0, np.int64))
    specs = [RowSpec(temperature=1.0, top_p=0.5, seed=1), RowSpec(temperature=1.0, seed=2)]
    with pytest.raises(RuntimeError, match="1 of 2 rows"):
        tokens_of(random_logits(2, 64, seed=3), specs)


def test_pruned_noise_chooses_exactly_what_noise_for_every_token_chooses() -> None:
    vocab_size, rows = 2000, 48
    for scale in (0.0, 0.1, 1.0, 10.0):
        logits = random_logits(rows, vocab_size, seed=5, scale=scale)
        specs = [RowSpec(temperature=0.9, seed=row * 77, position=row) for row in range(rows)]
        scores = (logits - logits.amax(dim=1, keepdim=True)).numpy() / np.float32(0.9)
        words = philox.row_words(np.arange(rows) * 77, np.arange(rows), vocab_size)[:, :vocab_size]
        naive = (scores + philox.gumbel(words)).argmax(axis=1)
        assert tokens_of(logits, specs, Form.PLAIN) == naive.tolist()


def test_few_and_many_kept_tokens_take_different_ways_to_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(30, 1500, seed=6, scale=1.0)
    specs = [RowSpec(temperature=1.2, top_p=0.95, seed=row, position=9) for row in range(30)]
    by_default = tokens_of(logits, specs)
    monkeypatch.setattr(sampling, "_NARROW", 0)
    assert tokens_of(logits, specs) == by_default
    monkeypatch.setattr(sampling, "_NARROW", 10_000)
    assert tokens_of(logits, specs) == by_default


# ---------------------------------------------------------------- ties


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(3, 500)
    logits[1, [77, 78, 400]] = 2.0
    logits[2] = -0.0
    logits[2, 3] = 0.0
    assert tokens_of(logits, [RowSpec()] * 3) == [0, 77, 0]
    assert tokens_of(logits, [RowSpec()] * 3, Form.PLAIN) == [0, 77, 0]


@pytest.mark.parametrize("form", list(Form))
def test_equal_scores_after_the_noise_go_to_the_lowest_id(form: Form) -> None:
    """Logits made so that two tokens end exactly level; the estimates of their noise are not always level too."""
    size, ties = 64, 0
    rows, specs, expected = [], [], []
    for seed in range(400):
        noise = philox.gumbel(philox.row_words(np.array([seed]), np.array([1]), size))[0]
        low, high = np.sort(np.argsort(-noise)[[0, 9]])
        logits = np.full(size, -1000.0, np.float32)
        logits[low], logits[high] = min(0.0, noise[high] - noise[low]), min(0.0, noise[low] - noise[high])
        if logits[low] + noise[low] == logits[high] + noise[high]:
            ties += 1
            rows.append(torch.from_numpy(logits))
            top_p = 0.999999 if seed % 2 and form is Form.FULL else 1.0
            specs.append(RowSpec(temperature=1.0, top_p=top_p, seed=seed, position=1))
            expected.append(int(low))
    assert ties > 100
    assert tokens_of(torch.stack(rows), specs, form) == expected


def test_the_highest_are_ordered_by_score_then_by_id() -> None:
    scores = np.array([1.0, 3.0, -0.0, 3.0, 0.0, -5.0, -np.inf, 1.0], np.float32)
    assert highest(scores, 8).tolist() == [1, 3, 0, 7, 2, 4, 5, 6]
    assert highest(scores, 3).tolist() == [1, 3, 0]


def test_top_k_keeps_exactly_k_and_the_lowest_ids_at_the_border() -> None:
    scores = np.full(600, -1.0, np.float32)
    scores[[10, 20]] = 0.0
    for top_k in (1, 2, 3, 7):
        kept = kept_tokens(scores, top_k, np.float32(1.0), np.float32(0.0))
        assert sorted(kept.tolist()) == sorted([10, 20, 0, 1, 2, 3, 4][:top_k])


def test_top_p_keeps_the_lowest_ids_at_the_border() -> None:
    scores = np.zeros(1000, np.float32)
    kept = kept_tokens(scores, 0, np.float32(0.25), np.float32(0.0))
    assert sorted(kept.tolist()) == list(range(250))
    assert len(kept_tokens(scores, 0, np.float32(0.75), np.float32(0.0))) == 750


def test_top_logprobs_put_the_lowest_id_first_among_equals() -> None:
    logits = torch.zeros(1, 50)
    logits[0, 30] = 1.0
    found = sample(logits, [RowSpec(logprobs=4)])
    assert found.top_ids is not None
    assert found.top_ids[0].tolist()[:5] == [30, 0, 1, 2, 0]


# ---------------------------------------------------------------- masks, bias, conflicts


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    logits = random_logits(2, 100, seed=8)
    chosen = 17
    specs = [
        RowSpec(temperature=0.3, top_k=1, bias=((chosen, 1000.0),), logprobs=2),
        RowSpec(allowed=(chosen,), logprobs=2),
    ]
    found = sample(logits, specs)
    assert found.tokens.tolist() == [chosen, chosen]
    assert found.logprob is not None
    assert found.logprob.tolist() == pytest.approx(torch.log_softmax(logits, 1)[:, chosen].tolist(), abs=1e-5)


def test_only_one_token_left_is_always_drawn() -> None:
    logits = random_logits(40, 70, seed=9)
    specs = [RowSpec(temperature=5.0, seed=row, allowed=(69,), top_p=0.5 if row % 2 else 1.0) for row in range(40)]
    assert tokens_of(logits, specs) == [69] * 40


def test_stop_ids_are_masked_below_the_minimum_position_only() -> None:
    logits = torch.zeros(3, 40)
    logits[:, 4], logits[:, 5] = 9.0, 8.0
    base = RowSpec(position=10, stop_ids=(4,))
    specs = [replace(base, min_position=11), replace(base, min_position=10), replace(base, min_position=0)]
    assert tokens_of(logits, specs) == [5, 4, 4]


def test_where_every_token_is_masked_the_lowest_allowed_id_is_taken() -> None:
    logits = random_logits(4, 100, seed=10)
    base = RowSpec(position=3, min_position=8, stop_ids=(60, 50, 70), logprobs=0)
    specs = [
        replace(base, allowed=(70, 60)),
        replace(base, allowed=(70, 60), temperature=1.0, top_p=0.5),
        replace(base, allowed=()),
        replace(base, allowed=(70, 60, 99), temperature=1.0),
    ]
    found = sample(logits, specs)
    assert found.tokens.tolist() == [60, 60, 0, 99]
    assert found.finite.all()
    assert found.logprob is not None
    assert found.logprob.isfinite().all()


def test_plain_ignores_everything_but_temperature_and_seed() -> None:
    logits = random_logits(30, 300, seed=11)
    specs = mixed_specs(30, 300, seed=11)
    bare = [RowSpec(temperature=s.temperature, seed=s.seed, position=s.position) for s in specs]
    found = sample(logits, specs, Form.PLAIN)
    assert found.tokens.tolist() == tokens_of(logits, bare, Form.PLAIN) == tokens_of(logits, bare, Form.FULL)
    assert found.logprob is None
    assert found.top_ids is None
    assert found.top_logprobs is None


def test_filters_that_are_off_change_nothing() -> None:
    logits = random_logits(20, 200, seed=12)
    off = [RowSpec(temperature=1.0, seed=row) for row in range(20)]
    wide = [replace(spec, top_k=200, top_p=1.0, min_p=1e-38) for spec in off]
    assert tokens_of(logits, off) == tokens_of(logits, wide)


def test_extreme_logits_and_temperatures_stay_defined() -> None:
    logits = torch.tensor([[3e38, -3e38, 3e38, 0.0], [1.0, 1.0 + 1e-6, 0.0, -1.0], [0.0, 0.0, 0.0, 3e38]])
    specs = [RowSpec(temperature=1e-30, seed=3, top_p=0.9, logprobs=4) for _ in range(3)]
    found = sample(logits, specs)
    assert found.finite.all()
    assert int(found.tokens[0]) in (0, 2)
    assert found.tokens[1:].tolist() == [1, 3]


# ---------------------------------------------------------------- rows that are broken, dead or padding


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("form", list(Form))
def test_a_row_with_non_finite_logits_is_named_and_disturbs_no_other(poison: float, form: Form) -> None:
    specs = mixed_specs(24, 257, seed=13)
    logits = random_logits(24, 257, seed=13)
    clean = sample(logits, specs, form)
    broken = logits.clone()
    for row, column in ((0, 0), (7, 256), (8, 100), (23, 255)):
        broken[row, column] = poison
    found = sample(broken, specs, form)
    hit = torch.tensor([row in (0, 7, 8, 23) for row in range(24)])
    assert torch.equal(found.finite, ~hit)
    assert not found.tokens[hit].any()
    assert same_bits(found.tokens[~hit], clean.tokens[~hit])
    if form is Form.FULL:
        assert found.logprob is not None
        assert clean.logprob is not None
        assert same_bits(found.logprob[~hit], clean.logprob[~hit])
        assert not found.logprob[hit].any()


def test_a_dead_row_disturbs_no_other_whatever_it_holds() -> None:
    specs = mixed_specs(12, 100, seed=14)
    logits = random_logits(12, 100, seed=14)
    clean = sample(logits, specs)
    dead = [replace(spec, alive=row != 5) for row, spec in enumerate(specs)]
    logits[5] = float("nan")
    found = sample(logits, dead)
    others = torch.arange(12) != 5
    assert int(found.tokens[5]) == 0
    assert found.finite.all()
    assert same_bits(found.tokens[others], clean.tokens[others])


def test_slots_name_the_rows_in_any_order_and_more_than_once() -> None:
    specs = mixed_specs(10, 120, seed=15)
    state = state_of(specs, 120)
    slots = torch.tensor([9, 3, 3, 10, 0, 10])  # slot 10 is the null row of padding
    logits = random_logits(6, 120, seed=15)
    found = sample_rows(logits, state, penalties_of(specs, 120), slots, Form.FULL, MAX_TOP)
    for row in (0, 1, 2, 4):
        assert int(found.tokens[row]) == expect(logits[row].numpy(), specs[int(slots[row])]).token


def test_no_rows_give_no_tokens() -> None:
    state, penalties = state_of([RowSpec()], 50), penalties_of([RowSpec()], 50)
    for form in Form:
        found = sample_rows(torch.zeros(0, 50), state, penalties, torch.zeros(0, dtype=torch.int64), form, 3)
        assert found.tokens.shape == (0,)
        assert found.finite.shape == (0,)


def test_neither_the_logits_nor_the_row_state_are_written() -> None:
    specs = mixed_specs(30, 100, seed=16)
    state = state_of(specs, 100)
    logits = random_logits(30, 100, seed=16)
    before = {name: getattr(state, name).clone() for name in ROW_TENSORS}
    penalties = penalties_of(specs, 100)
    kept, counts, in_prompt = logits.clone(), penalties.counts.clone(), penalties.in_prompt.clone()
    sample_rows(logits, state, penalties, torch.arange(30), Form.FULL, MAX_TOP)
    assert torch.equal(logits, kept)
    assert all(torch.equal(getattr(state, name), value) for name, value in before.items())
    assert torch.equal(penalties.counts, counts)
    assert torch.equal(penalties.in_prompt, in_prompt)


# ---------------------------------------------------------------- a row's result is its own


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_gets_the_same_bits_alone_and_at_every_place_among_others(threads: int) -> None:
    count, vocab_size = 40, 1003
    specs = mixed_specs(count, vocab_size, seed=17)
    logits = random_logits(count, vocab_size, seed=17)
    state, penalties = state_of(specs, vocab_size), penalties_of(specs, vocab_size)

    def result(rows: list[int]) -> list[tuple[bytes, ...]]:
        found = sample_rows(logits[rows], state, penalties, torch.tensor(rows), Form.FULL, MAX_TOP)
        columns = (found.tokens, found.finite, found.logprob, found.top_ids, found.top_logprobs)
        return [tuple(c[i].numpy().tobytes() for c in columns if c is not None) for i in range(len(rows))]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = [result([row])[0] for row in range(count)]
        random = np.random.default_rng(18)
        for size in (2, 3, 5, 8, 17, 31, 40):
            rows = [int(row) for row in random.permutation(count)[:size]]
            for _ in range(size if size < 9 else 4):
                rows = [*rows[1:], rows[0]]
                assert result(rows) == [alone[row] for row in rows]
    finally:
        torch.set_num_threads(before)


def test_randomness_is_a_function_of_seed_and_position() -> None:
    logits = torch.zeros(1, 4096)

    def token(seed: int, position: int) -> int:
        return tokens_of(logits, [RowSpec(temperature=1.0, seed=seed, position=position)], Form.PLAIN)[0]

    assert token(5, 7) == token(5, 7)
    drawn = {token(seed, position) for seed in (5, 6, 5 + 2**32, 5 + 2**63) for position in (7, 8)}
    assert len(drawn) == 8
