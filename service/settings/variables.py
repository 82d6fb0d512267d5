"""Names of environment variables, and which of them a container platform sets without being asked.

Kubernetes gives every pod of a namespace variables that describe each Service there. For a Service called `runahead`
they begin with `RUNAHEAD_`, such as `RUNAHEAD_PORT=tcp://10.0.0.1:50051`, and for `runahead-metrics` with
`RUNAHEAD_METRICS_`. So the variables of settings begin with `RUNAHEAD__`. Behind that, Kubernetes could only put the
variables of a Service called `runahead--` and more, and `is_injected` knows these by their names and values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

ENV_PREFIX: Final = "RUNAHEAD__"
OLD_PREFIX: Final = "RUNAHEAD_"  # of the settings' variables, before there were deployments beside a Service
CONFIG_VARIABLE: Final = f"{ENV_PREFIX}CONFIG"

_ADDRESS: Final = r"[0-9A-Fa-f.:\[\]]+"  # of a Service, which has one of its own: never a name
_SERVICE: Final = r"RUNAHEAD(?:_+[A-Z0-9]+)*"  # a Service's name begins and ends with a letter or a digit
_LISTENER: Final = r"PORT_[0-9]+_(?:TCP|UDP|SCTP)"
_INJECTED: Final = tuple(  # name and value; a name may be read in several ways, as that of several Services
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
    """A setting that is unknown or impossible. One sentence that names it."""


def variable_of(name: str) -> str:
    """The variable of a setting."""
    return ENV_PREFIX + name.upper()


def old_variable_of(name: str) -> str:
    """What the variable of a setting was called once."""
    return OLD_PREFIX + name.upper()


def is_injected(variable: str, value: str) -> bool:
    """Whether Kubernetes has set the variable, to describe a Service: its name and its value both say so."""
    return any(pattern.fullmatch(f"{variable}={value}") for pattern in _INJECTED)


def own_variables(environment: Mapping[str, str], settings: Iterable[str]) -> dict[str, str]:
    """Variables of settings, and others that begin as they do. settings: their names. Raises SettingsError for one
    under its old name."""
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
