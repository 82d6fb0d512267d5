"""`runahead models` prints a line for each architecture that is served: what its layers may be, models of it,
and whether a head comes with it."""

from __future__ import annotations

import re

import pytest

from runahead.runtime.models.registry import ARCHITECTURES
from runahead.service import cli

SERVED = ARCHITECTURES.values()
HEADED = {"MiMoForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}


def test_each_architecture_has_a_line_with_models_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    lines = capfd.readouterr().out.splitlines()
    heads = {one.name: "" if one.heads is None else "; a head comes with it (--drafter mtp)" for one in SERVED}
    assert {name for name, head in heads.items() if head} == HEADED
    expected = [[one.name, ", ".join(one.layers), one.models + heads[one.name]] for one in SERVED]
    assert [re.split("  +", line) for line in lines] == expected
