"""Names of environment variables, and detection of those that Kubernetes sets.

Kubernetes gives pods variables for each Service: `runahead` gives `RUNAHEAD_PORT=tcp://10.0.0.1:50051` and others,
`runahead-metrics` gives `RUNAHEAD_METRICS_...`. So settings use the prefix `RUNAHEAD__`. Only a Service named like
`runahead--x` could collide, and `is_injected` recognizes its variables by name and value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

ENV_PREFIX: Final = "RUNAHEAD__"
OLD_PREFIX: Final = "RUNAHEAD_"  # the former prefix, from before there were deployments with a Service
CONFIG_VARIABLE: Final = f"{ENV_PREFIX}CONFIG"

_ADDRESS: Final = r"[0-9A-Fa-f.:\[\]]+"  # a Service's IP address: never a name
_SERVICE: Final = r"RUNAHEAD(?:_+[A-Z0-9]+)*"  # a Service's name begins and ends with a letter or a digit
_LISTENER: Final = r"PORT_[0-9]+_(?:TCP|UDP|SCTP)"
_INJECTED: Final = tuple(  # name and value; a name may fit several Services
    re.compile(f"{_SERVICE}_{name}={value}")
    for name, value in (
        ("SERVICE_HOST", _ADDRESS),
        ("SERVICE_PORT(?:_[A-Z0-9_]+)?", "[0-9]+"),
        (f"(?:PORT|{_LISTENER})", f"(?:tcp|udp|sctp)://{_ADDRESS}"),
        (f"{_LISTENER}_PROTO", "(?:tcp|udp|sctp)"),
        (f"{_LISTENER}_PORT", "[0-9]+"),
        (f"{_LISTENER}_ADDR", _ADDRESS),
    )
)


class SettingsError(ValueError):
    """An unknown or invalid setting. One sentence that names it."""


def variable_of(name: str) -> str:
    """Return a setting's variable."""
    return ENV_PREFIX + name.upper()


def old_variable_of(name: str) -> str:
    """Return the former name of a setting's variable."""
    return OLD_PREFIX + name.upper()


def is_injected(variable: str, value: str) -> bool:
    """Whether Kubernetes set the variable for a Service, by name and value."""
    return any(pattern.fullmatch(f"{variable}={value}") for pattern in _INJECTED)


def own_variables(environment: Mapping[str, str], settings: Iterable[str]) -> dict[str, str]:
    """Return the variables with the settings' prefix. settings: their names. Raises SettingsError for a former name."""
    given = {variable: text for variable, text in environment.items() if not is_injected(variable, text)}
    for name in ("config", *settings):
        if (old := old_variable_of(name)) in given:
            raise SettingsError(
                f"environment variable {old} is not read any more; set {variable_of(name)}, with two underscores, and "
                f"unset {old}"
            )
    return {
        variable: text
        for variable, text in given.items()
        if variable.startswith(ENV_PREFIX) and variable != CONFIG_VARIABLE
    }
