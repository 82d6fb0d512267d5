"""Describes how a process ended."""

from __future__ import annotations

import signal


def described(code: int) -> str:
    """Describe an exit code in words. code: like `subprocess`, below 0 for a signal."""
    return f"exit code {code}" if code >= 0 else f"signal {signal_name(code)}"


def signal_name(code: int) -> str:
    """Return the name of the signal that ended a process, empty without one."""
    if code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:  # unnamed, such as real-time signals
        return str(-code)


def end_fields(code: int) -> dict[str, int | str]:
    """Return log fields for an exit code."""
    return {"exit_code": code} | ({"signal": signal_name(code)} if code < 0 else {})
