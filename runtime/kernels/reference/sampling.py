"""The sampler in plain arithmetic: the CPU's implementation, and the oracle of the CUDA sampler.

For each row, in this order:

1. If the raw logits have a NaN or an infinity: `finite` is False, the token is 0, and the row is done.
2. Requested log-probabilities are the log-softmax of the raw logits.
3. Penalties (`penalties`). Then tokens outside the allowed set, tokens that the grammar forbids, and stop ids below
   `min_position` are masked, and the bias is added to the others. If nothing is left, the token is the lowest allowed
   id: the allowed set holds, `min_position` does not. If a row with a grammar still has nothing, `nothing_left` is True
   and the token 0. If a penalty moves any logit, or the bias an unmasked one, out of float32, the row fails as in 1,
   since such tokens can't be compared.
4. Temperature 0 takes the highest logit. Otherwise the score is the distance to the highest logit divided by the
   temperature, filtered by top-k, top-p within top-k, and min-p within top-p (`kept_tokens`).
5. The token has the highest score + Gumbel noise (`philox.gumbel`), a function of seed, position and id.

Ties go to the lowest id everywhere. A row's result depends only on its logits and state, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Form
from runahead.runtime.kernels.reference import philox
from runahead.runtime.kernels.reference.masked_rows import Left, left_by_masks
from runahead.runtime.kernels.reference.penalties import penalize
from runahead.runtime.kernels.reference.sampling_filters import (
    MASS_ONE,
    Filters,
    add_bias,
    highest,
    kept_tokens,
    lowest_allowed,
    mask_disallowed,
    mask_ids,
    masses,
)
from runahead.runtime.kernels.row_state import PenaltyState, RowState

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

NO_MASKS: Final[Mapping[int, I32]] = MappingProxyType({})
_NARROW: Final = 512  # a row with more tokens left draws noise for its whole vocabulary, one block for four ids
_WIDE_BLOCKS: Final = 16384  # Philox blocks at a time: their words fit the cache


class Sampled(NamedTuple):
    """S's results for n rows. Log-probabilities are None in the form `plain`, and zero for rows that did not ask."""

    tokens: torch.Tensor  # int64 [n]
    finite: torch.Tensor  # bool [n] False: a raw or changed logit was a NaN or an infinity, and the token is 0
    logprob: torch.Tensor | None = None  # float32 [n] of the token
    top_ids: torch.Tensor | None = None  # int32 [n, max_top] the requested number, most likely first
    top_logprobs: torch.Tensor | None = None  # float32 [n, max_top]
    # bool [n] True: grammar and allowed tokens leave none, and the token is 0. None: no row has a grammar.
    nothing_left: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens of several rows that may still be drawn, as flat arrays."""

    row: I64
    token: I64
    score: F32


def sample_rows(
    logits: torch.Tensor,
    state: RowState,
    penalties: PenaltyState,
    slots: torch.Tensor,
    form: Form,
    max_top: int,
    *,
    ahead: torch.Tensor | None = None,
    masks: Mapping[int, I32] = NO_MASKS,
) -> Sampled:
    """Sample the token at position `seq_len` for each row of `logits`, without side effects.

    logits: float32 [n, vocab] on the CPU, row i belonging to slots[i], int64 [n]. A slot may occur more than once. The
        state's masks and counts may cover a larger vocabulary, whose rest is not sampled.
    form: `plain` ignores every parameter but temperature and seed.
    max_top: columns of the top log-probabilities.
    ahead: int64 [n], positions beyond `seq_len`, whose tokens penalties don't count; None: 0 for all.
    masks: by i, of rows with a grammar: the allowed tokens, int32 [ceil(vocab / 32)]; None in `plain`. A row that is
        not alive gets token 0 and counts as finite, at almost no cost. Bias values are finite, a row's bias ids
        distinct, temperatures not negative: the request was validated.
    """
    # A score may overflow to -inf; such a token is never drawn. A logit may overflow by its penalty or bias; `_edit`
    # checks that and fails the row. So NumPy need not warn of either.
    with np.errstate(over="ignore", invalid="ignore"):
        position = state.seq_len.numpy()[slots.numpy()].astype(np.int64)
        if ahead is not None:
            position += ahead.numpy()
        return _sample_rows(logits, state, penalties, slots, position, form, max_top, masks)


def _sample_rows(
    logits: torch.Tensor,
    state: RowState,
    penalties: PenaltyState,
    slots: torch.Tensor,
    position: I64,
    form: Form,
    max_top: int,
    masks: Mapping[int, I32],
) -> Sampled:
    raw: F32 = logits.numpy()
    rows, vocab_size = raw.shape
    where: I64 = slots.numpy()
    high: F32 = logits.amax(dim=1).numpy().copy()
    alive = state.alive.numpy()[where]
    finite = ~alive | (np.isfinite(high) & np.isfinite(logits.amin(dim=1).numpy()))
    live = finite & alive
    temperature: F32 = state.temperature.numpy()[where]
    draws = live & (temperature > 0.0)

    tokens = np.zeros(rows, np.int64)
    nothing_left = np.zeros(rows, np.bool_)
    edited: dict[int, F32] = {}
    left: Left | None = None
    known = np.zeros(rows, np.bool_)  # the most likely token after all changes is in `tokens`, or there is none
    if form is Form.FULL:
        needs_edit = _needs_edit(state, where, position)
        masked = np.array(sorted(masks), np.int64)
        alone = masked[live[masked] & ~needs_edit[masked]]
        needs_edit[masked], needs_edit[alone], known[alone] = True, False, True
        if alone.size:
            words = np.stack([masks[row] for row in alone.tolist()])
            left = left_by_masks(raw, words, alone, Filters.of(state, where[alone]).are_on(vocab_size))
            nothing_left[left.none] = True
            live, draws = live & ~nothing_left, draws & ~nothing_left
            tokens[left.few] = left.likeliest
            draws[left.few[left.count == 1]] = False  # with any noise
            tokens[left.many], high[left.many] = left.logits.argmax(axis=1), left.logits.max(axis=1)
        for row in np.flatnonzero(live & needs_edit).tolist():
            known[row] = True
            allowed = _allowed(state, int(where[row]), masks.get(row))
            if allowed is not None and not allowed.any():
                nothing_left[row], live[row], draws[row] = True, False, False
                continue
            logits_of_row = _edit(raw[row], state, penalties, int(where[row]), int(position[row]), allowed)
            if logits_of_row is None:
                finite[row] = live[row] = draws[row] = False
                continue
            edited[row] = logits_of_row
            high[row] = logits_of_row.max()
            if high[row] == -np.inf:
                draws[row] = False
                tokens[row] = 0 if allowed is None else lowest_allowed(allowed, vocab_size)
            elif not draws[row]:
                tokens[row] = logits_of_row.argmax()
    for row in np.flatnonzero(live & ~draws & ~known).tolist():
        tokens[row] = raw[row].argmax()

    if draws.any():
        few = _few_candidates(left, draws, temperature)
        whole = draws.copy()
        if few is not None:
            whole[few.row] = False
        drawn = np.flatnonzero(whole)
        scores = _scores(raw, drawn, left, edited, high[drawn], temperature[drawn])
        tokens[draws] = _draw(scores, drawn, state, where, position, form, few)
    result = Sampled(torch.from_numpy(tokens), torch.from_numpy(finite))
    if masks:
        result = result._replace(nothing_left=torch.from_numpy(nothing_left))
    return result if form is Form.PLAIN else _with_logprobs(result, raw, live, state, where, max_top)


def are_drawn(state: RowState, slots: I64) -> NDArray[np.bool_]:
    """Return which of these rows draw their tokens: those with a temperature. [n], [n]"""
    drawn: NDArray[np.bool_] = state.temperature.numpy()[slots] > 0.0
    return drawn


def scores_drawn(logits: F32, high: F32, state: RowState, slots: I64) -> F32:
    """Return scores before noise: the distance to the highest logit over the row's temperature. [r, vocab], [r], [r]"""
    scores: F32 = (logits - high[:, None]) / state.temperature.numpy()[slots][:, None]
    return scores


def _needs_edit(state: RowState, slots: I64, position: I64) -> NDArray[np.bool_]:
    """Return which rows' logits change before sampling. [n]"""
    below_minimum = position < state.min_position.numpy()[slots]
    changed: NDArray[np.bool_] = (
        (state.bias_count.numpy()[slots] > 0)
        | (state.allowed_words.numpy()[slots] > 0)
        | below_minimum
        | (state.penalty_slot.numpy()[slots] >= 0)
    )
    return changed


def _allowed(state: RowState, slot: int, mask: I32 | None) -> I32 | None:
    """Return the tokens that a row may have now. mask: its grammar's, [ceil(vocab / 32)]; None: all."""
    if not int(state.allowed_words[slot]):
        return mask
    allowed: NDArray[np.int32] = state.allowed[slot].numpy()
    return allowed if mask is None else allowed & mask


def _edit(
    raw: F32, state: RowState, penalties: PenaltyState, slot: int, position: int, allowed: NDArray[np.int32] | None
) -> F32 | None:
    """Copy one row's logits, [vocab], and apply penalties, bias and masks; None if one overflows."""
    logits = raw.copy()
    penalty_slot = int(state.penalty_slot[slot])
    if penalty_slot >= 0:
        penalize(
            logits,
            penalties.counts[penalty_slot].numpy()[: logits.size],
            penalties.in_prompt[penalty_slot].numpy(),
            state.repetition_penalty.numpy()[slot],
            state.presence_penalty.numpy()[slot],
            state.frequency_penalty.numpy()[slot],
        )
        if not np.isfinite(logits).all():
            return None
    if allowed is not None:
        mask_disallowed(logits, allowed)
    if position < int(state.min_position[slot]):
        mask_ids(logits, state.stop_ids[slot, : int(state.stop_count[slot])].numpy())
    count = int(state.bias_count[slot])
    ids, values = state.bias_ids[slot, :count].numpy(), state.bias_values[slot, :count].numpy()
    return logits if add_bias(logits, ids, values) else None


def _scores(raw: F32, rows: I64, left: Left | None, edited: Mapping[int, F32], high: F32, temperature: F32) -> F32:
    """Return scores of these rows, [r], ascending: masked or edited logits minus the row's highest, over its
    temperature. [r, vocab]
    """
    logits = raw[rows]
    if left is not None:
        there = np.isin(left.many, rows)
        logits[np.searchsorted(rows, left.many[there])] = left.logits[there]
    for nth, row in enumerate(rows.tolist()) if edited else ():
        if row in edited:
            logits[nth] = edited[row]
    logits -= high[:, None]
    logits /= temperature[:, None]
    return logits


def _few_candidates(left: Left | None, draws: NDArray[np.bool_], temperature: F32) -> Candidates | None:
    """Return the candidates of drawing rows with few tokens left by masks. [n], [n]"""
    if left is None:
        return None
    drawn = draws[left.row]
    row = left.row[drawn]
    return Candidates(row, left.token[drawn], left.distance[drawn] / temperature[row])


def _draw(
    scores: F32, rows: I64, state: RowState, slots: I64, position: I64, form: Form, few: Candidates | None
) -> I64:
    """Draw tokens, [r], of the drawing rows, ascending: of `rows` and of `few`.

    scores: [rows, vocab], each row's highest is 0; overwritten. few: all candidates of other rows.
    slots, position: of all rows, [n].
    """
    seed: I64 = state.seed.numpy()[slots]
    wide = np.ones(rows.shape[0], np.bool_)
    parts: list[Candidates] = [] if few is None else [few]
    if form is Form.FULL:
        vocab_size = scores.shape[1]
        filters = Filters.of(state, slots[rows])
        for nth in np.flatnonzero(filters.are_on(vocab_size)).tolist():
            kept = kept_tokens(scores[nth], *filters.of_row(nth))
            if kept.shape[0] <= _NARROW:
                wide[nth] = False
                parts.append(Candidates(np.full(kept.shape, rows[nth], np.int64), kept, scores[nth, kept]))
            else:
                rest = np.ones(vocab_size, np.bool_)
                rest[kept] = False
                scores[nth, rest] = -np.inf
    parts += wide_candidates(scores, np.flatnonzero(wide), rows, seed, position)
    best, _ = best_of(parts, seed, position)
    wanted = rows.shape[0] + (0 if few is None else np.unique(few.row).shape[0])
    if best.shape[0] != wanted:  # otherwise NumPy could assign one row's token to another
        raise RuntimeError(f"the sampler found a token for {best.shape[0]} of {wanted} rows that draw one")
    return best


def wide_candidates(
    scores: F32, wanted: I64, rows: I64, seed: I64, position: I64, first: int = 0
) -> Iterator[Candidates]:
    """Yield every token that the exact noise could still choose: those within twice the error of the best estimate.

    scores: [r, vocab] of `rows`, [r], of which the `wanted` ones count. seed, position: of all rows, [n]. first: the id
    of the first score. The estimate's sums are rounded by less than 2**-18, because scores that could win are at least
    -20.
    """
    vocab_size, before = scores.shape[1], first % 4
    step = max(1, _WIDE_BLOCKS * 4 // vocab_size)
    for start in range(0, wanted.shape[0], step):
        some = wanted[start : start + step]
        these, there = scores if some.shape[0] == scores.shape[0] else scores[some], rows[some]
        words = philox.row_words(seed[there], position[there], before + vocab_size, first // 4)
        estimate = philox.approximate_gumbel(words[:, before : before + vocab_size])
        estimate += these
        bound = estimate.max(axis=1, keepdims=True) - np.float32(4 * philox.APPROXIMATION_ERROR)
        index, token = np.divmod(np.flatnonzero(estimate >= bound), vocab_size)
        yield Candidates(there[index], first + token, these[index, token])


def best_of(parts: Sequence[Candidates], seed: I64, position: I64) -> tuple[I64, F32]:
    """Return each row's token with the highest score plus noise, ties by lowest id, and that sum."""
    row = np.concatenate([part.row for part in parts])
    token = np.concatenate([part.token for part in parts])
    score = np.concatenate([part.score for part in parts])
    noisy = score + philox.gumbel(philox.token_words(seed[row], position[row], token))
    order = np.lexsort((token, -noisy, row))
    _, first = np.unique(row[order], return_index=True)
    best: I64 = token[order][first]
    return best, noisy[order][first]


def _with_logprobs(
    sampled: Sampled, raw: F32, live: NDArray[np.bool_], state: RowState, slots: I64, max_top: int
) -> Sampled:
    """Add the log-probabilities of the rows that asked for them."""
    asked = np.where(live, state.logprobs.numpy()[slots], np.int32(-1))
    found = log_probabilities(raw, sampled.tokens.numpy(), asked, max_top)
    return sampled._replace(
        logprob=torch.from_numpy(found.chosen),
        top_ids=torch.from_numpy(found.top_ids),
        top_logprobs=torch.from_numpy(found.top),
    )


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """Log-probabilities of n rows; zeros for rows that did not ask and beyond the requested number."""

    chosen: F32  # [n]
    top_ids: I32  # [n, max_top] most likely first
    top: F32  # [n, max_top]


def log_probabilities(logits: F32, chosen: I64, asked: I32, max_top: int) -> LogProbabilities:
    """Compute the log-softmax of raw logits [n, vocab] at `chosen` [n] and at the top `asked` [n] tokens, for S's
    sampled tokens and F's prompt tokens.

    Rows are computed one at a time with integer sums of probability mass: no neighbor, order or number of threads
    changes a bit. asked: -1 skips the row; others' logits must be finite. A token too unlikely for float32 has a
    log-probability of -inf.
    """
    rows, vocab_size = logits.shape
    found = LogProbabilities(
        np.zeros(rows, np.float32), np.zeros((rows, max_top), np.int32), np.zeros((rows, max_top), np.float32)
    )
    with np.errstate(over="ignore"):
        for row in np.flatnonzero(asked >= 0).tolist():
            shifted = logits[row] - logits[row].max()
            normalizer = math.log(int(masses(philox.exp32(shifted)).sum()) / MASS_ONE)  # log(sum(e**x))
            found.chosen[row] = float(shifted[chosen[row]]) - normalizer
            count = min(int(asked[row]), max_top, vocab_size)
            if count > 0:
                found.top_ids[row, :count] = ids = highest(logits[row], count)
                found.top[row, :count] = shifted[ids].astype(np.float64) - normalizer
    return found
