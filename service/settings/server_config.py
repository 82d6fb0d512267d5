"""A server's configuration and exit codes. Imports neither gRPC nor torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from runahead.runtime.wire.engine_config import ConfigError, EngineConfig, check_config
from runahead.runtime.wire.setting import settings_of
from runahead.service.settings.admission_limits import check_limits
from runahead.service.settings.exposure import check_security
from runahead.service.settings.extras import check_extras
from runahead.service.settings.kv_event_settings import check_kv_events
from runahead.service.settings.settings import FrontEndSettings

EXIT_OK: Final = 0
EXIT_ENGINE_LOST: Final = 1
EXIT_SERVER_ENDED: Final = 1
EXIT_NO_FRONT_END: Final = 1
EXIT_FORCED: Final = 1
EXIT_SUPERVISOR_FAILED: Final = 1
EXIT_CANNOT_START: Final = 2


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """A server's configuration.

    engine: the engine's settings; the tokenizer is in its checkpoint.
    front_end: the front ends' settings and number; `model` is the engine's path.
    linger_s: how long NOT_SERVING is shown after the engine was lost.
    """

    engine: EngineConfig
    front_end: FrontEndSettings = field(default_factory=FrontEndSettings)
    linger_s: float = 1.0


def check_server_config(config: ServerConfig) -> None:
    """Check the configuration. Raises ConfigError."""
    spelling = config.engine.spelling
    check_config(config.engine, spelling)
    for name, setting in settings_of(FrontEndSettings).items():
        try:
            setting.check(getattr(config.front_end, name))
        except ValueError as error:
            raise ConfigError(f"{spelling(name)} {error}") from error
    check_security(config.front_end, spelling)
    check_kv_events(config.front_end, config.engine)
    check_extras(config.front_end, spelling)
    check_limits(config.front_end, spelling)
