"""Names of the settings' environment variables.

Kubernetes gives pods variables for each Service: `runahead` gives `RUNAHEAD_PORT=tcp://10.0.0.1:50051` and others. So
settings use the prefix `RUNAHEAD__`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ENV_PREFIX: Final = "RUNAHEAD__"
CONFIG_VARIABLE: Final = f"{ENV_PREFIX}CONFIG"


class SettingsError(ValueError):
    """An unknown or invalid setting. One sentence that names it."""


def variable_of(name: str) -> str:
    """Return a setting's variable."""
    return ENV_PREFIX + name.upper()


def own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with the settings' prefix."""
    return {
        variable: text
        for variable, text in environment.items()
        if variable.startswith(ENV_PREFIX) and variable != CONFIG_VARIABLE
    }
