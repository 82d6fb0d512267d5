"""What the server makes of a container's command and variables."""

from __future__ import annotations

import msgspec

from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.settings.cli_parser import Parser
from runahead.service.settings.server_config import ServerConfig, check_server_config
from runahead.service.settings.setting_flags import add_flags
from runahead.service.settings.settings import FrontEndSettings, SettingsError, engine_config, load_settings
from tests.deploy.rendering import Manifests


class SettingsRefused(ValueError):
    """The sentence with which the command would end."""


def front_end_settings(manifests: Manifests) -> FrontEndSettings:
    """The settings of the rendered container, checked as `runahead serve` checks them; what is a file is not opened.

    Raises SettingsRefused.
    """
    command = [*manifests.container["command"], *manifests.container.get("args", ())]
    if command[:2] != ["runahead", "serve"]:
        raise SettingsRefused(f"the command is {command}")
    parser = Parser(prog="runahead serve", exit_on_error=False)
    add_flags(parser)
    flags, unknown = parser.parse_known_args(command[2:])
    if unknown:
        raise SettingsRefused(f"{unknown[0]} is not a flag")
    environment = manifests.settings
    given = {name: value for name, value in environment.items() if name != "RUNAHEAD__MODEL"}
    if strange := [name for name in environment if not name.startswith("RUNAHEAD__")]:
        raise SettingsRefused(f"{strange[0]} is not a setting's variable")
    try:
        settings = load_settings(vars(flags), given)
        check_server_config(ServerConfig(engine_config(settings), settings.front_end))
    except (SettingsError, ConfigError) as error:
        raise SettingsRefused(str(error)) from error
    model = environment.get("RUNAHEAD__MODEL", settings.front_end.model)
    return msgspec.structs.replace(settings.front_end, model=model)
