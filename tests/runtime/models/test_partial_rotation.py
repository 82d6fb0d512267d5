"""Heads of which a part is rotated: an odd number of rotated dimensions is refused, whatever the architecture is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.ranks import WHOLE
from runahead.runtime.models.blocks.partial_rope import head_order
from runahead.runtime.models.read_config import parse_config
from runahead.runtime.models.registry import ARCHITECTURES
from runahead.runtime.models.rope import Rope, RopeScaling
from runahead.runtime.models.weights import described
from tests.runtime.models.checkpoints import BASE, CASES, Case
from tests.runtime.models.test_registry import NAMES

FIRST = {NAMES[case.written.get("model_type", case.config.model_type)]: case for case in reversed(CASES)}


def config_of(name: str, case: Case, share: float, head_dim: int) -> dict[str, Any]:
    """`config.json` of the case with heads of another size, of which a share is rotated."""
    raw: dict[str, Any] = json.loads(case.config(**{**BASE, **case.changes}).to_json_string())
    raw = {**raw, **case.written, "architectures": [name], "head_dim": head_dim, "partial_rotary_factor": share}
    rope = raw.get("rope_parameters")
    if rope is not None and not any(isinstance(value, dict) for value in rope.values()):
        raw["rope_parameters"] = {**rope, "partial_rotary_factor": share}
    return raw


def test_each_architecture_is_tried() -> None:
    assert FIRST.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(("head_dim", "share"), [(22, 0.5), (22, 0.25), (11, 1.0), (22, 0.01)])
def test_an_odd_number_of_rotated_dimensions_is_refused(name: str, head_dim: int, share: float) -> None:
    try:
        config = parse_config(config_of(name, FIRST[name], share, head_dim), ())
        ropes = described(config, WHOLE).ropes
    except CheckpointError as error:
        assert "partial_rotary_factor" in str(error) or "head_dim" in str(error), error
    else:
        assert all(rope.rotated == 0 for rope in ropes), "it is served, and it rotates nothing"


@pytest.mark.parametrize(("head_dim", "rotated"), [(22, 11), (22, 24), (11, 4), (22, -2)])
def test_an_odd_number_never_reaches_the_angles(head_dim: int, rotated: int) -> None:
    with pytest.raises(AssertionError):
        head_order(head_dim, rotated)
    with pytest.raises(AssertionError):
        Rope(head_dim, 1e4, RopeScaling(), rotated)
