"""Rules about tests."""

from __future__ import annotations

import ast

from hypothesis import HealthCheck, settings

from tests.project.repository import TESTS, TOOLS, calls, name_of, sources


def test_no_property_test_has_a_time_limit() -> None:
    """A slow machine must not fail one."""
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
    limits = {
        name_of(path): ast.unparse(keyword.value)
        for path in sources(*TESTS, *TOOLS)
        for call in calls(path)
        for keyword in call.keywords
        if keyword.arg == "deadline" and ast.unparse(keyword.value) != "None"
    }
    assert limits == {}
