"""Reads the rotary embedding's object of `config.json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.models.config.keys import ROPE_UNDERSTOOD, ROPE_UNREAD
from runahead.runtime.models.config.values import flag, number
from runahead.runtime.models.rope import RopeScaling

_ORIGINAL: Final = "original_max_position_embeddings"


def rope(raw: Mapping[str, Any], positions: int, theta: float = 10000.0) -> tuple[float, RopeScaling]:
    """Read theta and scaling from the older `rope_theta` and `rope_scaling` or from `rope_parameters`.

    positions: of the model. theta: the default. Raises CheckpointError.
    """
    refuse_partial(raw)
    refuse_partial(rope_object(raw)[1])
    return rope_of_a_part(raw, positions, theta)


def rope_of_a_part(raw: Mapping[str, Any], positions: int, theta: float = 10000.0) -> tuple[float, RopeScaling]:
    """Read theta and scaling, whatever part of a head is rotated; the caller reads that."""
    key, found = rope_object(raw)
    theta = number(found if found.get("rope_theta") is not None else raw, "rope_theta", float, theta)
    # It overrides the object, as in transformers.
    original = raw if raw.get(_ORIGINAL) is not None else found
    scaling = rope_scaling(key, {**found, _ORIGINAL: original.get(_ORIGINAL)}, positions)
    if scaling.kind == "yarn" and theta <= 1:
        raise CheckpointError(f"rope_theta is {theta}; with rope_type 'yarn' it must be above 1")
    return theta, scaling


def rope_object(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the rotary embedding's object for all layers, empty without one, and its key."""
    key = "rope_parameters" if raw.get("rope_scaling") in (None, {}) else "rope_scaling"
    found = raw.get(key)
    found = {} if found is None else found
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        raise CheckpointError(f"{key} is {found!r}; one flat object for all layers is supported")
    return key, found


def refuse_partial(found: Mapping[str, Any]) -> None:
    """Raise CheckpointError if only a part of a head is to be rotated."""
    if found.get("partial_rotary_factor", 1.0) not in (1, None):
        raise CheckpointError(f"partial_rotary_factor is {found['partial_rotary_factor']!r}; only 1 is supported")


def check_factors(scaling: RopeScaling, frequencies: int) -> None:
    """Raise CheckpointError unless longrope has a factor for each frequency."""
    if scaling.kind != "longrope":
        return
    for name, factors in (("short_factor", scaling.short_factors), ("long_factor", scaling.long_factors)):
        if len(factors) != frequencies:
            raise CheckpointError(f"{name} has {len(factors)} numbers; it must have {frequencies}, one a frequency")


def rope_scaling(key: str, found: Mapping[str, Any], positions: int) -> RopeScaling:
    """Read the scaling. key: the key of `found` in config.json. Raises CheckpointError."""
    kind = found.get("rope_type", found.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_UNDERSTOOD:
        raise CheckpointError(f"{key} has rope_type {kind!r}; supported are {', '.join(ROPE_UNDERSTOOD)}")
    if found.get("type", kind) != kind:
        raise CheckpointError(f"{key} has rope_type {kind!r} and type {found['type']!r}; the two must be the same")
    if unknown := sorted(found.keys() - ROPE_UNDERSTOOD[kind] - ROPE_UNREAD.keys):
        raise CheckpointError(f"{key} has keys that are not understood for rope_type {kind!r}: {', '.join(unknown)}")
    return _READERS[kind](found, positions)


def _default(found: Mapping[str, Any], positions: int) -> RopeScaling:
    return RopeScaling()


def _linear(found: Mapping[str, Any], positions: int) -> RopeScaling:
    return RopeScaling("linear", number(found, "factor", float))


def _llama3(found: Mapping[str, Any], positions: int) -> RopeScaling:
    low, high = number(found, "low_freq_factor", float), number(found, "high_freq_factor", float)
    if high <= low:
        raise CheckpointError(f"high_freq_factor ({high}) must be above low_freq_factor ({low})")
    return RopeScaling("llama3", number(found, "factor", float), low, high, number(found, _ORIGINAL, int, positions))


def _yarn(found: Mapping[str, Any], positions: int) -> RopeScaling:
    factor = number(found, "factor", float)
    mscale, of_all = found.get("mscale"), found.get("mscale_all_dim")
    magnitude = _yarn_magnitude(factor)
    if mscale is not None and of_all is not None:
        of_part = _yarn_magnitude(factor, number(found, "mscale", float))
        magnitude = of_part / _yarn_magnitude(factor, number(found, "mscale_all_dim", float))
    return RopeScaling(
        "yarn",
        factor,
        original_positions=number(found, _ORIGINAL, int, positions),
        magnitude=number(found, "attention_factor", float, magnitude),
        beta_fast=number(found, "beta_fast", float, 32.0),
        beta_slow=number(found, "beta_slow", float, 1.0),
        truncate=flag(found, "truncate", default=True),
    )


def _longrope(found: Mapping[str, Any], positions: int) -> RopeScaling:
    """Read longrope, with the magnitude by the lengths' logarithms. Source: Ding et al., 2024, "LongRoPE", as in
    Phi-3.
    """
    original = number(found, _ORIGINAL, int, positions, low=2)
    factor = number(found, "factor", float, positions / original)
    magnitude = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return RopeScaling(
        "longrope",
        factor,
        original_positions=original,
        magnitude=number(found, "attention_factor", float, magnitude),
        short_factors=_factors(found, "short_factor"),
        long_factors=_factors(found, "long_factor"),
    )


def _factors(found: Mapping[str, Any], key: str) -> tuple[float, ...]:
    given = found.get(key)
    if not isinstance(given, list):
        raise CheckpointError(f"{key} is {given!r}; it must be a list of numbers above 0")
    return tuple(number({key: one}, key, float) for one in given)


def _yarn_magnitude(factor: float, fraction: float = 1.0) -> float:
    """Return YaRN's magnitude. Source: see `runahead.runtime.models.rope._yarn`, section 3.4."""
    return 1.0 if factor <= 1.0 else 0.1 * fraction * math.log(factor) + 1.0


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any], int], RopeScaling]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
