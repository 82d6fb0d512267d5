"""How a process has ended, in words."""

from __future__ import annotations

import signal


def described(code: int) -> str:
    """code: as `subprocess` has it, below 0 for a signal."""
    return f"exit code {code}" if code >= 0 else f"signal {signal_name(code)}"


def signal_name(code: int) -> str:
    """Of the signal that has ended a process. Empty where it was none."""
    if code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:  # one without a name of its own, such as those for real-time use
        return str(-code)


def end_fields(code: int) -> dict[str, int | str]:
    """For a line of the log."""
    return {"exit_code": code} | ({"signal": signal_name(code)} if code < 0 else {})
