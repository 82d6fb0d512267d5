"""Random words, uniform and Gumbel numbers of the reference kernels."""

from __future__ import annotations

import numpy as np
import pytest

from runahead.runtime.kernels.reference import philox
from tests.runtime.kernels.sampling_oracle import noise_of, philox_of_integers

PINNED_GUMBEL = ["0xc033f049", "0x41851592", "0x3ebba79b", "0x3dadb63f", "0xbf2c3abb"]
ALL_UNIFORMS = np.arange(2**23, dtype=np.uint32) << np.uint32(9)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "digits_of_pi"],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (np.array([word], np.uint64) for word in counter)
    k0, k1 = (np.array([word], np.uint64) for word in key)
    assert tuple(int(word[0]) for word in philox.philox4x32((c0, c1, c2, c3), (k0, k1))) == words
    assert philox_of_integers(counter, key) == words


def test_the_word_of_a_token_is_philox_of_seed_position_and_block() -> None:
    seeds = [0, 1, 2**32, 2**63 + 12345, 2**64 - 1]
    positions = [0, 1, 77, 2**31 - 1, 123456]
    signed = np.array(seeds, np.uint64).view(np.int64)
    words = philox.row_words(signed, np.array(positions, np.int64), 37)
    assert words.shape == (5, 40)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for token in range(37):
            expected = philox_of_integers((position, token // 4, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
            assert int(words[row, token]) == expected[token % 4]


def test_single_tokens_have_the_words_of_the_whole_row() -> None:
    random = np.random.default_rng(1)
    seed = random.integers(-(2**63), 2**63, 9)
    position = random.integers(0, 10_000, 9)
    whole = philox.row_words(seed, position, 262_144)
    row = random.integers(0, 9, 500)
    token = random.integers(0, 262_144, 500)
    assert np.array_equal(philox.token_words(seed[row], position[row], token), whole[row, token])


def test_words_do_not_depend_on_the_other_rows() -> None:
    seed = np.arange(40, dtype=np.int64) * 7919
    position = np.arange(40, dtype=np.int64) + 5
    together = philox.row_words(seed, position, 1000)
    for row in range(40):
        assert np.array_equal(
            together[row : row + 1], philox.row_words(seed[row : row + 1], position[row : row + 1], 1000)
        )


def test_uniforms_are_exact_symmetric_and_never_zero_or_one() -> None:
    u = philox.uniform(ALL_UNIFORMS)
    assert u.dtype == np.float32
    assert np.array_equal(u.astype(np.float64), (np.arange(2**23) + 0.5) / 2**23)
    assert u.min() == 2.0**-24
    assert u.max() == 1 - 2.0**-24
    assert np.array_equal(philox.uniform(ALL_UNIFORMS | np.uint32(511)), u)


def test_every_gumbel_number_is_right_and_ordered_like_its_uniform() -> None:
    noise = philox.gumbel(ALL_UNIFORMS)
    truth = -np.log(-np.log((np.arange(2**23) + 0.5) / 2**23))
    assert np.abs(noise - truth).max() < 1e-6
    assert (np.diff(noise) >= 0).all()


def test_every_estimate_is_well_within_its_stated_error() -> None:
    difference = np.abs(philox.approximate_gumbel(ALL_UNIFORMS) - philox.gumbel(ALL_UNIFORMS))
    assert difference.max() < philox.APPROXIMATION_ERROR / 10


def test_gumbel_bits_are_pinned() -> None:
    """Changing these would change every sampled text: the numbers are part of what the service promises."""
    words = np.array([0, 0xFFFFFFFF, 0x80000000, 0x6627E8D5, 0x24126EA1], np.uint32)
    assert [hex(bits) for bits in philox.gumbel(words).view(np.uint32)] == PINNED_GUMBEL


def test_gumbel_does_not_depend_on_the_length_or_the_place_in_the_array() -> None:
    words = np.random.default_rng(2).integers(0, 2**32, 4099, dtype=np.uint32)
    whole = philox.gumbel(words)
    for start in range(40):
        for length in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 100):
            part = philox.gumbel(words[start : start + length].copy())
            assert np.array_equal(part.view(np.uint32), whole[start : start + length].view(np.uint32))


def test_the_oracle_agrees_on_the_noise() -> None:
    noise = philox.gumbel(philox.row_words(np.array([99], np.int64), np.array([4], np.int64), 64))[0]
    assert all(abs(noise_of(99, 4, token) - float(noise[token])) < 1e-6 for token in range(64))


def test_exp_and_log_are_close_to_the_truth_over_their_range() -> None:
    random = np.random.default_rng(3)
    x = -(random.random(200_000) * 87.0).astype(np.float32)
    truth = np.exp(x.astype(np.float64))
    assert (np.abs(philox.exp32(x) - truth) <= 3 * np.spacing(truth.astype(np.float32))).all()
    y = np.exp(random.uniform(-17, 4, 200_000)).astype(np.float32)
    truth = np.log(y.astype(np.float64))
    assert (np.abs(philox.log32(y) - truth) <= 3 * np.spacing(np.abs(truth).astype(np.float32))).all()


def test_exp_of_zero_is_one_and_of_minus_infinity_zero() -> None:
    values = philox.exp32(np.array([0.0, -0.0, -np.inf, -88.0], np.float32))
    assert values.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_exp_never_decreases() -> None:
    x = np.sort(-(np.random.default_rng(4).random(500_000) * 87.0).astype(np.float32))
    assert (np.diff(philox.exp32(x)) >= 0).all()
