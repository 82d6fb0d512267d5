"""What the figures are held against: other engines on the same machine, and the goals of this one.

The engines were measured on one NVIDIA H200 as this benchmark measures: greedy, prompts of 512 tokens, random weights,
no prefix cache, 288 tokens of the whole batch less 32, over 256, the median of three. Milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

Times: TypeAlias = Mapping[str, Mapping[int, float]]  # by shape, then by rows, or by tokens of a prompt

# A decode step of the whole batch.
PEERS_MS: Final[Mapping[str, Times]] = {
    "vLLM 0.26.0": {
        "0.6B": {1: 1.70, 8: 1.69, 64: 3.26},
        "1B": {1: 1.45, 8: 1.74, 64: 2.69},
        "8B": {1: 4.97, 8: 5.18, 64: 6.87, 256: 14.66},
    },
    "SGLang 0.5.17": {
        "0.6B": {1: 1.60, 8: 1.64, 64: 2.98},
        "1B": {1: 1.22, 64: 1.88},
        "8B": {1: 4.85, 64: 6.83, 256: 14.67},
    },
}
GOALS_MS: Final[Times] = {
    "0.6B": {1: 0.50, 8: 0.65, 64: 1.75},
    "1B": {1: 0.68, 8: 0.78, 64: 1.15},
    "8B": {1: 3.65, 8: 4.0, 64: 5.3, 256: 11.2},
}
# Models with experts or recurrent states: in which dtype the other engine kept the states of 7B-A1B is not known.
VLLM_MODELS_MS: Final[Times] = {
    "30B-A3B": {1: 4.13, 8: 9.03, 64: 18.5},
    "7B-A1B": {1: 3.29, 8: 5.00, 64: 8.28},
}
MODEL_GOALS_MS: Final[Times] = {
    "30B-A3B": {1: 2.0, 8: 7.0, 64: 16.0},
    "7B-A1B": {1: 1.3, 8: 3.0, 64: 6.0},
}
# To the first token of a prompt alone, by its tokens.
VLLM_FIRST_TOKEN_MS: Final[Times] = {"8B": {128: 14.6, 2048: 50.0, 8192: 211.0, 32768: 1195.0}}
FIRST_TOKEN_GOALS_MS: Final[Times] = {"8B": {128: 8.0, 2048: 48.0, 8192: 195.0, 32768: 1150.0}}

MIXED_IDLE: Final = 0.03  # of the device's time with launches that carry a prompt of so many tokens or more, at most
MIXED_IDLE_FROM: Final = 512
OVERLAP: Final = 0.98  # of launches of models with experts or states, at least


def known(times: Times, shape: str, number: int) -> float | None:
    """None where there is no figure."""
    return times.get(shape, {}).get(number)


def best_peer_ms(shape: str, rows: int) -> float | None:
    """The fastest of the other engines there; None where none was measured."""
    return min((ms for times in PEERS_MS.values() if (ms := known(times, shape, rows)) is not None), default=None)
