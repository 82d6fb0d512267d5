"""What the figures are held against: other engines on the same machine, and the goals of this one.

The engines were measured on one NVIDIA H200 as this benchmark measures: greedy, prompts of 512 tokens, random weights,
no prefix cache, 288 tokens of the whole batch less 32, over 256, the median of three. Milliseconds a decode step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from benchmarks.gpu_table.draft_results import ModelKind


class Place(NamedTuple):
    shape: str
    rows: int


VLLM: Final = "vLLM 0.26.0"
SGLANG: Final = "SGLang 0.5.17"

PEERS_MS: Final[Mapping[str, Mapping[Place, float]]] = {
    VLLM: {
        Place("0.6B", 1): 1.70,
        Place("0.6B", 8): 1.69,
        Place("0.6B", 64): 3.26,
        Place("1B", 1): 1.45,
        Place("1B", 8): 1.74,
        Place("1B", 64): 2.69,
        Place("8B", 1): 4.97,
        Place("8B", 8): 5.18,
        Place("8B", 64): 6.87,
        Place("8B", 256): 14.66,
    },
    SGLANG: {
        Place("0.6B", 1): 1.60,
        Place("0.6B", 8): 1.64,
        Place("0.6B", 64): 2.98,
        Place("1B", 1): 1.22,
        Place("1B", 64): 1.88,
        Place("8B", 1): 4.85,
        Place("8B", 64): 6.83,
        Place("8B", 256): 14.67,
    },
}


def best_peer_ms(place: Place) -> float | None:
    """The fastest of the other engines there; None where none was measured."""
    return min((times[place] for times in PEERS_MS.values() if place in times), default=None)


# Through the engine, greedy.
GOALS_MS: Final[Mapping[Place, float]] = {
    Place("0.6B", 1): 0.50,
    Place("0.6B", 8): 0.65,
    Place("0.6B", 64): 1.75,
    Place("1B", 1): 0.68,
    Place("1B", 8): 0.78,
    Place("1B", 64): 1.15,
    Place("8B", 1): 3.65,
    Place("8B", 8): 4.0,
    Place("8B", 64): 5.3,
    Place("8B", 256): 11.2,
}

# What a graph of kernels alone once reached, without an engine around it: no cell may be slower.
REACHED_BEFORE_MS: Final[Mapping[Place, float]] = {
    Place("0.6B", 1): 0.564,
    Place("0.6B", 8): 0.773,
    Place("0.6B", 64): 1.97,
    Place("1B", 1): 0.734,
    Place("1B", 8): 0.926,
    Place("1B", 64): 1.37,
    Place("8B", 1): 3.72,
    Place("8B", 8): 4.37,
    Place("8B", 64): 5.84,
    Place("8B", 256): 12.0,
}


# Models with experts or recurrent states, through the engine, greedy: the other engine, and the goals of this one. In
# which dtype the other engine kept the states of 7B-A1B is not known; here it is float32.
VLLM_MODELS_MS: Final[Mapping[Place, float]] = {
    Place("30B-A3B", 1): 4.13,
    Place("30B-A3B", 8): 9.03,
    Place("30B-A3B", 64): 18.5,
    Place("7B-A1B", 1): 3.29,
    Place("7B-A1B", 8): 5.00,
    Place("7B-A1B", 64): 8.28,
}
MODEL_GOALS_MS: Final[Mapping[Place, float]] = {
    Place("30B-A3B", 1): 2.0,
    Place("30B-A3B", 8): 7.0,
    Place("30B-A3B", 64): 16.0,
    Place("7B-A1B", 1): 1.3,
    Place("7B-A1B", 8): 3.0,
    Place("7B-A1B", 64): 6.0,
}

# What a launch that verifies three drafts of each row may take at most, by rows: of a plain launch; and of a model with
# experts, which four positions name more of, over its own floor, of what a plain launch takes over its own.
VERIFIED_GOALS: Final[Mapping[ModelKind, Mapping[int, float]]] = {
    "dense": {1: 1.10, 8: 1.15},
    "states": {1: 1.15},
    "experts": {1: 1.15},
}
DRAFTER_STEP: Final = 1.3  # of the time in which what it reads is read, that a drafter's step may take at most


class Prompt(NamedTuple):
    shape: str
    tokens: int


# To the first token of a prompt alone, milliseconds: the other engine, and the goals of this one.
VLLM_FIRST_TOKEN_MS: Final[Mapping[Prompt, float]] = {
    Prompt("8B", 128): 14.6,
    Prompt("8B", 2048): 50.0,
    Prompt("8B", 8192): 211.0,
    Prompt("8B", 32768): 1195.0,
}
FIRST_TOKEN_GOALS_MS: Final[Mapping[Prompt, float]] = {
    Prompt("8B", 128): 8.0,
    Prompt("8B", 2048): 48.0,
    Prompt("8B", 8192): 195.0,
    Prompt("8B", 32768): 1150.0,
}

# Through gRPC, over bare replays of the graphs.
GRPC_OVER_GRAPHS: Final[Mapping[Place, float]] = {
    Place("0.6B", 64): 1.10,
    Place("1B", 64): 1.10,
    Place("8B", 64): 1.10,
    Place("8B", 256): 1.05,
}
MIXED_IDLE: Final = 0.03  # of the device's time with launches that carry a prompt of so many tokens or more, at most
MIXED_IDLE_FROM: Final = 512
OVERLAP: Final = 0.98  # of launches, at least: while requests arrive, and of models with experts or states
IDLE_SHARE: Final = 0.02  # of a step, at most, between launches
ONE_SAMPLED_MS: Final = 0.02  # what one row that samples may add to a step of 64 rows


def engine_over_graphs(rows: int) -> float:
    """The most that the engine may take, over bare replays of the graphs."""
    return 1.05 if rows > 64 else 1.02


def sampling_adds_ms(rows: int) -> float | None:
    """The most that temperature and top-p of every row may add to a step; None where no goal is set."""
    return {1: 0.10, 64: 0.10, 256: 0.40}.get(rows)
