"""Every setting in one table, from three sources, in one frozen result.

A setting is a flag (`--run-ahead 2`), an environment variable (`RUNAHEAD__RUN_AHEAD=2`) and a key of a TOML file
(`run_ahead = 2`; `--config` or `RUNAHEAD__CONFIG` names the file). Flags override the environment, which overrides the
file, which overrides defaults. Only this module reads the environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from runahead.runtime.checkpoint import BUNDLED, BUNDLED_FOLDER, BUNDLED_HEAD, model_name
from runahead.runtime.log_output import Format, Level, LogOutput
from runahead.runtime.wire.engine_config import EngineConfig, EngineSettings, check_config
from runahead.runtime.wire.setting import Setting, setting, settings_of, shown
from runahead.service.settings.bounded_files import FileError, read_text
from runahead.service.settings.cli_parser import did_you_mean
from runahead.service.settings.loopback import LOOPBACK

# Kubernetes gives pods variables such as `RUNAHEAD_PORT` for a Service `runahead`.
ENV_PREFIX: Final = "RUNAHEAD__"
CONFIG_VARIABLE: Final = f"{ENV_PREFIX}CONFIG"

AUTO_PORT: Final = -2
NO_PORT: Final = -1
_OFF: Final = {"off": NO_PORT}
_PORT_WORDS: Final = {"auto": AUTO_PORT, "off": NO_PORT}
_MOST_BYTES: Final = 1 << 20  # of a settings file
_LOG: Final = LogOutput()  # supplies the defaults of the log settings

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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


def _port_setting(description: str, words: Mapping[str, int]) -> msgspec.Meta:
    """Declare a side port. words: numbers written as words, the least of all."""
    return setting(description, ge=min(words.values()), le=65535, words=words)


class FrontEndSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the engine does not get. A field is a setting: see
    `runahead.runtime.wire.engine_config.EngineSettings`.

    `runahead.service.settings.server_config.check_security` checks whether the host may be listened on.
    """

    # The engine gets the model's path.
    model: Annotated[
        str,
        setting(
            "checkpoint folder, GGUF file, or 'bundled' for the model in the package",
            group="Model",
            main=True,
            metavar="PATH",
        ),
    ] = BUNDLED
    tokenizer: Annotated[
        Literal["auto", "none"],
        setting("auto: the checkpoint's, which random weights may lack; none: only token ids in and out"),
    ] = "auto"
    chat_template: Annotated[str, setting("chat template (Jinja); empty: the checkpoint's, if any", metavar="FILE")] = (
        ""
    )
    host: Annotated[str, setting("address to listen on", group="Addresses", main=True)] = LOOPBACK
    port: Annotated[int, setting("port to listen on; 0: any free one", ge=0, le=65535, main=True)] = 50051
    health_host: Annotated[str, setting("address of unauthenticated health probes")] = LOOPBACK
    health_port: Annotated[
        int,
        _port_setting(
            "plaintext port of health probes; auto: 50052, or 10, 20, ... higher if a side port is taken; "
            "0: any free one",
            _PORT_WORDS,
        ),
    ] = AUTO_PORT
    control_port: Annotated[
        int,
        _port_setting(
            "local port for Stats, Trace and Abort; auto: 50053, moved with the health port; 0: any free one",
            _PORT_WORDS,
        ),
    ] = AUTO_PORT
    metrics_host: Annotated[str, setting("address of unauthenticated Prometheus metrics")] = LOOPBACK
    metrics_port: Annotated[
        int,
        _port_setting("plain HTTP port of /metrics; auto: 9464, moved likewise; 0: any free one", _PORT_WORDS),
    ] = AUTO_PORT
    vllm_facade: Annotated[
        bool, setting("also serve vllm.grpc.engine.VllmEngine, for routers; needs the extra vllm-facade")
    ] = False
    reflection: Annotated[bool, setting("serve gRPC reflection")] = True
    insecure: Annotated[bool, setting("allow an address that other machines can reach", group="Callers", main=True)] = (
        False
    )
    callers: Annotated[
        str, setting("file of callers: a line for each token or certificate", main=True, metavar="FILE")
    ] = ""
    tls_cert: Annotated[str, setting("server certificate followed by its chain, PEM", metavar="FILE")] = ""
    tls_key: Annotated[str, setting("key of the certificate, PEM", metavar="FILE")] = ""
    tls_client_ca: Annotated[
        str, setting("require client certificates from these authorities, PEM", metavar="FILE")
    ] = ""
    plaintext_tokens: Annotated[
        bool, setting("allow tokens without TLS on an address that other machines can reach")
    ] = False
    share_prefix_cache: Annotated[
        bool, setting("callers share cached prefixes, so timing reveals which prefixes are cached")
    ] = False
    kv_events: Annotated[
        bool,
        setting(
            "let routers subscribe to KV cache events, which reveal prompts and answers; needs --vllm-facade",
            group="Events of the KV cache",
        ),
    ] = False
    kv_events_host: Annotated[str, setting("address of the unauthenticated ZMQ stream")] = LOOPBACK
    kv_events_port: Annotated[
        int,
        _port_setting("port of the ZMQ stream, for llm-d and Dynamo; needs the extra kv-events; 0: any free one", _OFF),
    ] = NO_PORT
    kv_events_replay_port: Annotated[int, _port_setting("port to replay the stream's past; 0: any free one", _OFF)] = (
        NO_PORT
    )
    kv_events_pod: Annotated[str, setting("name of this replica in the stream's topic; empty: the host name")] = ""
    max_connections: Annotated[
        int,
        setting(
            "maximum number of connections; further ones are closed",
            ge=1,
            le=1_000_000,
            group="Connections and calls",
        ),
    ] = 4096
    max_connection_streams: Annotated[
        int, setting("maximum number of open calls on a connection; further ones may fail", ge=1, le=1_000_000)
    ] = 1024
    max_connection_idle_s: Annotated[
        float, setting("seconds after which a connection without calls is closed", gt=0, le=1_000_000)
    ] = 900.0
    max_connection_age_s: Annotated[
        float, setting("seconds after which a connection takes no more calls", gt=0, le=1_000_000)
    ] = 3600.0
    max_connection_age_grace_s: Annotated[
        float, setting("seconds that its open calls still have", gt=0, le=1_000_000)
    ] = 3600.0
    handshake_timeout_s: Annotated[
        float, setting("seconds for the TLS handshake, and then for the first frame", ge=0.001, le=3600)
    ] = 10.0
    upload_timeout_s: Annotated[
        float, setting("seconds for a call's request to arrive completely", ge=0.001, le=3600)
    ] = 10.0
    keepalive_time_s: Annotated[float, setting("seconds of silence before a keepalive ping", ge=1, le=1_000_000)] = 40.0
    keepalive_timeout_s: Annotated[
        float, setting("seconds to answer it before the connection is closed", ge=1, le=1_000_000)
    ] = 20.0
    min_ping_interval_s: Annotated[float, setting("minimum seconds between a client's pings", ge=0.001, le=7200)] = 10.0
    max_ping_strikes: Annotated[
        int, setting("pings allowed to be too early; one more closes the connection", ge=1, le=1000)
    ] = 2
    max_request_bytes: Annotated[
        int, setting("maximum bytes of a request; larger ones are refused unread", ge=1024, le=256 << 20)
    ] = 4 << 20
    max_response_bytes: Annotated[
        int, setting("maximum bytes of a unary response; a longer one fails", ge=1 << 20, le=1 << 30)
    ] = 64 << 20
    max_completion_s: Annotated[
        float, setting("maximum seconds of a completion, whatever its deadline", ge=0.001, le=1_000_000)
    ] = 3600.0
    max_metadata_bytes: Annotated[
        int, setting("maximum bytes of a call's headers, as HTTP/2 counts them", ge=1024, le=1 << 20)
    ] = 16_384
    max_pending_calls: Annotated[
        int, setting("maximum number of calls that are not accepted yet", ge=1, le=1_000_000)
    ] = 16_384
    pending_timeout_s: Annotated[int, setting("whole seconds after which such a call is dropped", ge=1, le=3600)] = 60
    max_streams: Annotated[
        int, setting("completions open at once; more are refused", ge=1, le=100_000, group="Limits on what calls hold")
    ] = 1024
    max_caller_streams: Annotated[
        int, setting("of these, of one caller; 0: half where callers have names, else all", ge=0, le=100_000)
    ] = 0
    max_queued_tokens: Annotated[
        int, setting("prompt tokens of waiting requests; more are refused", ge=1, le=1 << 40)
    ] = 8_388_608
    max_caller_queued_tokens: Annotated[
        int, setting("of these, of one caller; 0: half where callers have names, else all", ge=0, le=1 << 40)
    ] = 0
    max_tokenizing_bytes: Annotated[
        int, setting("bytes of text waiting for the tokenizer; more are refused", ge=1, le=1 << 40)
    ] = 33_554_432
    max_caller_tokenizing_bytes: Annotated[
        int, setting("of these, of one caller; 0: half where callers have names, else all", ge=0, le=1 << 40)
    ] = 0
    max_uploads: Annotated[
        int, setting("calls whose request has not arrived completely; more are refused", ge=1, le=1_000_000)
    ] = 2048
    max_caller_uploads: Annotated[
        int, setting("of these, of one caller; 0: half where callers have names, else all", ge=0, le=1_000_000)
    ] = 0
    stalled_stream_s: Annotated[
        float, setting("seconds after which an unread completion is ended", ge=0.001, le=3600)
    ] = 60.0
    structure_compile_s: Annotated[
        float,
        setting("maximum CPU seconds to compile a structure", ge=0.01, le=60, group="Structures"),
    ] = 1.0
    structure_memory_mb: Annotated[int, setting("maximum MiB of memory to compile a structure", ge=8, le=4096)] = 64
    frontends: Annotated[
        int,
        setting(
            "processes that serve clients, sharing a port and the engine", ge=1, le=64, group="Processes", main=True
        ),
    ] = 1
    shutdown_grace_s: Annotated[float, setting("seconds that a shutdown waits for open completions", ge=0, le=3600)] = (
        10.0
    )
    log_level: Annotated[Level, setting("minimum level of logged events, the engine's too", group="Logs")] = _LOG.level
    request_log: Annotated[bool, setting("log a line for each completion, at level info")] = True
    otlp_endpoint: Annotated[str, setting("collector of OpenTelemetry spans; needs the extra otel", metavar="URL")] = ""
    log_format: Annotated[Format, setting("auto: console on a terminal, json elsewhere")] = _LOG.format

    @property
    def log(self) -> LogOutput:
        """Return the log settings of this process and the engine."""
        return LogOutput(level=self.log_level, format=self.log_format)


_FRONT_END: Final = settings_of(FrontEndSettings)
SETTINGS: Final[Mapping[str, Setting]] = _FRONT_END | settings_of(EngineSettings)


@dataclass(frozen=True, slots=True)
class Settings:
    """The chosen settings. spelled: where each given setting was set, as messages write it."""

    front_end: FrontEndSettings = field(default_factory=FrontEndSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    spelled: Mapping[str, str] = field(default_factory=dict, compare=False)

    def spelling(self, name: str) -> str:
        """Return a setting's name for messages: as it was given, or its flag."""
        return self.spelled.get(name) or flag_of(name)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def load_settings(
    flags: Mapping[str, object], environment: Mapping[str, str] | None = None, config_file: str | None = None
) -> Settings:
    """Load settings from flags by name (None: not given), the environment (None: this process's) and a TOML file.

    Raises SettingsError.
    """
    environment = os.environ if environment is None else environment
    config_file = config_file or environment.get(CONFIG_VARIABLE)
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}

    def take(name: str, written: object, source: str, *, strict: bool) -> None:
        try:
            values[name] = SETTINGS[name].read(written, strict=strict)
        except ValueError as error:
            raise SettingsError(f"{source} {error}") from error
        spelled[name] = source

    for name, value in (_read_file(config_file) if config_file else {}).items():
        _require_known(name, f"key {name!r} in {config_file}", SETTINGS)
        take(name, value, f"{name} in {config_file}", strict=True)
    for variable, text in own_variables(environment).items():
        name = variable.removeprefix(ENV_PREFIX).lower()
        _require_known(variable, f"environment variable {variable}", [variable_of(known) for known in SETTINGS])
        take(name, text, variable, strict=False)
    for name, given in flags.items():
        if given is not None and name in SETTINGS:
            take(name, given, flag_of(name), strict=False)
    front_end = {name: value for name, value in values.items() if name in _FRONT_END}
    engine = {name: value for name, value in values.items() if name not in _FRONT_END}
    return Settings(FrontEndSettings(**front_end), EngineSettings(**engine), spelled)


def engine_config(settings: Settings) -> EngineConfig:
    """Return the engine's configuration.

    Raises ConfigError for an invalid combination, SettingsError for a missing model.
    """
    engine = _with_bundled_head(settings)
    check_config(engine, settings.spelling)
    path = model_path(settings.front_end.model)
    chosen = msgspec.structs.asdict(engine) | {"draft_model": head_path(engine.draft_model)}
    served_name = settings.engine.served_name or model_name(path)
    return EngineConfig(**{**chosen, "model": str(path), "served_name": served_name, "spelled": _spelled(settings)})


def _with_bundled_head(settings: Settings) -> EngineSettings:
    """Add the bundled draft head if the model is the bundled one and a head is requested."""
    engine, model = settings.engine, settings.front_end.model
    if engine.drafter != "eagle" or engine.draft_model:
        return engine
    with contextlib.suppress(OSError, RuntimeError):  # too long a path, or an unknown user's home
        if model == BUNDLED or Path(model).expanduser().resolve() == BUNDLED_FOLDER.resolve():
            return msgspec.structs.replace(engine, draft_model=str(BUNDLED_HEAD))
    return engine


def _spelled(settings: Settings) -> dict[str, str]:
    """Return names of settings for the engine's messages, as valid text: a file's name may hold any bytes."""
    called = {name: settings.spelling(name) for name in SETTINGS}
    return {name: text.encode("utf-8", "backslashreplace").decode("utf-8") for name, text in called.items()}


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path, _MOST_BYTES))
    except FileError as error:
        raise SettingsError(f"config file {path} can't be read: {error}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsError(f"config file {path} can't be read as TOML: {error}") from error


def _require_known(name: str, what: str, known: Iterable[str]) -> None:
    if name in known:
        return
    raise SettingsError(f"{what} is not a setting" + did_you_mean(name, known))


def head_path(folder: str) -> str:
    """Return the path of a draft head or model, empty without one."""
    with contextlib.suppress(RuntimeError):  # an unknown user's home
        return str(Path(folder).expanduser().absolute()) if folder else ""
    return folder


def model_path(model: str) -> Path:
    """Return the path of a model's folder or file."""
    if model == BUNDLED:
        return BUNDLED_FOLDER
    if not model:  # an empty path would mean the current folder
        raise SettingsError("model is empty: give 'bundled', a folder with config.json, or a GGUF file")
    with contextlib.suppress(OSError, RuntimeError):  # too long a path, or an unknown user's home
        path = Path(model).expanduser()
        if path.is_dir():
            return path.resolve()
        if path.exists():
            return path.absolute()  # keeps a link's name: a download cache names link targets by hash
    if not model.endswith(".gguf") and _HUB_ID.fullmatch(model):
        name = model.split("/")[1]
        raise SettingsError(
            f"model {model!r} is not a folder here and looks like a hub id; the service downloads nothing, so fetch "
            f"it first with `hf download {model} --local-dir {name}` and then give `--model {name}`"
        )
    raise SettingsError(
        f"model {shown(model)} is neither a folder nor a file; give a folder with config.json, safetensors and "
        "tokenizer.json, or a GGUF file"
    )
