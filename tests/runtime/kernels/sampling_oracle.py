"""A second, independent statement of what the sampler does: one row, float64 and Python integers, no cleverness."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from runahead.runtime.kernels.row_state import PenaltyState, RowState, make_penalty_state, make_row_state
from runahead.runtime.wire.parameters import MAX_STOP_IDS

WORD = 0xFFFFFFFF


def philox_of_integers(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 as its paper writes it."""
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (b >> 32) ^ x1 ^ k0, b & WORD, (a >> 32) ^ x3 ^ k1, a & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return x0, x1, x2, x3


@dataclass(frozen=True, slots=True)
class RowSpec:
    """One row's request, in plain Python."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    min_position: int = 0
    logprobs: int = -1
    stop_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    alive: bool = True
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt: tuple[int, ...] = ()
    said: tuple[int, ...] = ()

    @property
    def has_penalty(self) -> bool:
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0


@dataclass(frozen=True, slots=True)
class Expected:
    token: int
    finite: bool
    kept: frozenset[int]  # what could have been drawn
    logprob: float
    top: list[tuple[int, float]]


def noise_of(seed: int, position: int, token: int) -> float:
    """Gumbel noise of one vocabulary entry, in float64."""
    words = philox_of_integers((position, token // 4, 0, 0), (seed & WORD, (seed >> 32) & WORD))
    u = ((words[token % 4] >> 9) + 0.5) / 2**23
    return -math.log(-math.log(u))


@np.errstate(over="ignore", invalid="ignore")
def penalized(raw: list[float], spec: RowSpec) -> list[float]:
    """The logits after a row's penalties, one token at a time, each step rounded to float32."""
    changed = []
    for token, value in enumerate(raw):
        x = np.float32(value)
        if spec.repetition != 1 and (token in spec.prompt or token in spec.said):
            x = x / np.float32(spec.repetition) if x > 0 else x * np.float32(spec.repetition)
        times = spec.said.count(token)
        x = x - np.float32(spec.frequency) * np.float32(times)
        if times:
            x = x - np.float32(spec.presence)
        changed.append(float(x))
    return changed


def expect(logits: np.ndarray, spec: RowSpec) -> Expected:
    """What the sampler must find for one row, logits [vocab]."""
    size = len(logits)
    raw = [float(value) for value in logits]
    if not all(math.isfinite(value) for value in raw):
        return Expected(0, False, frozenset(), 0.0, [])
    peak = max(raw)
    normalizer = peak + math.log(math.fsum(math.exp(value - peak) for value in raw))
    changed = penalized(raw, spec)
    masked = set(spec.stop_ids) if spec.position < spec.min_position else set()
    if spec.allowed is not None:
        masked |= set(range(size)) - set(spec.allowed)
    with np.errstate(over="ignore"):
        biased = {token: float(np.float32(changed[token]) + np.float32(value)) for token, value in spec.bias}
    if not all(math.isfinite(value) for value in (*changed, *(biased[t] for t in biased.keys() - masked))):
        return Expected(0, False, frozenset(), 0.0, [])
    changed = [-math.inf if token in masked else biased.get(token, value) for token, value in enumerate(changed)]
    peak = max(changed)
    order = sorted(range(size), key=lambda token: (-changed[token], token))
    if peak == -math.inf:
        kept = [min(spec.allowed)] if spec.allowed else [0]
        token = kept[0]
    elif np.float32(spec.temperature) == 0.0:
        kept = order[:1]
        token = kept[0]
    else:
        temperature = float(np.float32(spec.temperature))
        score = {token: (changed[token] - peak) / temperature for token in order if changed[token] != -math.inf}
        # Distances that float32 does not tell apart are equal: so small ones that a high temperature leaves nothing of.
        with np.errstate(over="ignore"):
            kept = sorted(score, key=lambda token: (-np.float32(score[token]), token))
        if spec.top_k:
            kept = kept[: spec.top_k]
        if spec.top_p < 1.0:
            mass = [math.exp(score[token]) for token in kept]
            target, reached, count = float(np.float32(spec.top_p)) * math.fsum(mass), 0.0, 0
            while count < len(kept) and (count == 0 or reached < target):
                reached += mass[count]
                count += 1
            kept = kept[:count]
        kept = [token for token in kept if math.exp(score[token]) >= float(np.float32(spec.min_p))]
        token = max(kept, key=lambda token: (score[token] + noise_of(spec.seed, spec.position, token), -token))
    by_raw = sorted(range(size), key=lambda token: (-raw[token], token))
    top = [(other, raw[other] - normalizer) for other in by_raw[: max(spec.logprobs, 0)]]
    return Expected(token, True, frozenset(kept), raw[token] - normalizer if spec.logprobs >= 0 else 0.0, top)


def state_of(specs: list[RowSpec], vocab_size: int) -> RowState:
    """A row state with `specs` in slots 0, 1, ..."""
    state = make_row_state(len(specs), 1, vocab_size, torch.device("cpu"))
    for slot, (spec, penalty_slot) in enumerate(zip(specs, penalty_slots(specs), strict=True)):
        state.penalty_slot[slot] = penalty_slot
        state.repetition_penalty[slot] = spec.repetition
        state.presence_penalty[slot] = spec.presence
        state.frequency_penalty[slot] = spec.frequency
        state.alive[slot] = spec.alive
        state.temperature[slot] = spec.temperature
        state.top_k[slot] = spec.top_k
        state.top_p[slot] = spec.top_p
        state.min_p[slot] = spec.min_p
        state.seed[slot] = spec.seed if spec.seed < 2**63 else spec.seed - 2**64
        state.seq_len[slot] = spec.position
        state.min_position[slot] = spec.min_position
        state.logprobs[slot] = spec.logprobs
        padded = [*spec.stop_ids, *[-1] * (MAX_STOP_IDS - len(spec.stop_ids))]
        state.stop_ids[slot] = torch.tensor(padded, dtype=torch.int32)
        state.stop_count[slot] = len(spec.stop_ids)
        state.bias_count[slot] = len(spec.bias)
        for index, (token, value) in enumerate(spec.bias):
            state.bias_ids[slot, index] = token
            state.bias_values[slot, index] = value
        if spec.allowed is not None:
            state.allowed_words[slot] = state.allowed.shape[1]
            words = np.zeros(state.allowed.shape[1], np.uint32)
            for token in spec.allowed:
                words[token // 32] |= np.uint32(1) << np.uint32(token % 32)
            state.allowed[slot] = torch.from_numpy(words.view(np.int32))
    return state


def penalties_of(specs: list[RowSpec], vocab_size: int) -> PenaltyState:
    """What the rows of `state_of` have said, a penalty slot for each that has penalties."""
    slots = penalty_slots(specs)
    penalties = make_penalty_state(len(specs), vocab_size, torch.device("cpu"))
    penalties.counts[-1] = 1 << 20  # nobody's
    penalties.in_prompt[-1] = -1
    for spec, slot in zip(specs, slots, strict=True):
        if slot < 0:
            continue
        for token in spec.said:
            penalties.counts[slot, token] += 1
        words = [0] * penalties.in_prompt.shape[1]
        for token in spec.prompt:
            words[token // 32] |= 1 << (token % 32)
        penalties.in_prompt[slot] = torch.from_numpy(np.array(words, np.uint32).view(np.int32))
    return penalties


def penalty_slots(specs: list[RowSpec]) -> list[int]:
    """Given out from the end, so that they are not the row slots. -1: none."""
    return [len(specs) - 1 - place if spec.has_penalty else -1 for place, spec in enumerate(specs)]


def random_spec(random: np.random.Generator, vocab_size: int) -> RowSpec:
    """A row of any kind."""

    def some(count: int) -> tuple[int, ...]:
        return tuple(int(token) for token in random.choice(vocab_size, count, replace=False))

    spec = RowSpec(
        temperature=float(random.choice([0.0, 0.3, 0.7, 1.0, 2.5])),
        top_k=int(random.choice([0, 0, 1, 5, 40, vocab_size + 3])),
        top_p=float(random.choice([1.0, 1.0, 0.999, 0.9, 0.5, 0.01])),
        min_p=float(random.choice([0.0, 0.0, 0.02, 0.3, 1.0])),
        seed=int(random.integers(0, 2**64, dtype=np.uint64)),
        position=int(random.integers(1, 5000)),
        logprobs=int(random.choice([-1, -1, 0, 3, 20])),
        stop_ids=some(int(random.integers(0, 6))),
    )
    if random.random() < 0.3:
        spec = replace(spec, min_position=spec.position + int(random.integers(0, 2)))
    if random.random() < 0.3:
        ids = some(int(random.integers(1, 12)))
        spec = replace(spec, bias=tuple((token, float(random.normal() * 8)) for token in ids))
    if random.random() < 0.3:
        spec = replace(spec, allowed=some(int(random.integers(1, vocab_size))))
    if random.random() < 0.4:
        said = some(int(random.integers(0, 20)))
        spec = replace(
            spec,
            repetition=float(random.choice([1.0, 0.7, 1.3, 2.0])),
            presence=float(random.choice([0.0, 1.5, -0.4])),
            frequency=float(random.choice([0.0, 0.6, -0.3])),
            prompt=some(int(random.integers(1, 20))),
            said=said + said[:7] + said[:2],
        )
    return spec
