"""A server's configuration, its checks and its exit codes. Imports no gRPC, no torch and no package of an extra."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Final
from urllib.parse import urlsplit

from runahead.runtime.wire.engine_config import ConfigError, EngineConfig, Spelling, check_config
from runahead.runtime.wire.setting import settings_of
from runahead.service.settings.loopback import is_loopback
from runahead.service.settings.settings import NO_PORT, FrontEndSettings
from runahead.service.shared_memory.call_tables import Resource

# By setting: the extra and its packages.
_NEEDED: Final = {
    "vllm_facade": ("vllm-facade", ("smg_grpc_proto.generated.vllm_engine_pb2",)),
    "chat_template": ("chat", ("jinja2",)),
    "kv_events_port": ("kv-events", ("zmq",)),
    "otlp_endpoint": ("otel", ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc")),
}

# Reasons of `errors.STATUS_OF`, parts of the settings' names, and the resources' names in sentences.
_KINDS: Final = {
    Resource.STREAMS: ("STREAMS_LIMIT", "streams", "completions are open"),
    Resource.QUEUED_TOKENS: ("QUEUED_TOKENS_LIMIT", "queued_tokens", "tokens of prompts wait"),
    Resource.TOKENIZING_BYTES: ("TOKENIZING_LIMIT", "tokenizing_bytes", "bytes of text wait for the tokenizer"),
    Resource.UPLOADS: ("UPLOADS_LIMIT", "uploads", "calls have not sent their whole request"),
    Resource.CONTROL_UPLOADS: ("UPLOADS_LIMIT", "uploads", "calls have not sent their whole request"),
}

_MOST_POD: Final = 255  # bytes, like a host name

EXIT_OK: Final = 0
EXIT_BROKEN: Final = 1  # the engine or its front ends are lost, or a shutdown was forced
EXIT_CANNOT_START: Final = 2


def check_extras(settings: FrontEndSettings, spelling: Spelling) -> None:
    """Check extras and endpoints. Raises ConfigError for a missing extra or an invalid endpoint."""
    for name, (extra, packages) in _NEEDED.items():
        if getattr(settings, name) not in (False, "", NO_PORT) and not all(_is_there(package) for package in packages):
            raise ConfigError(
                f"{spelling(name)} needs the extra {extra}, which is not installed: "
                f"pip install 'runahead-server[{extra}]'"
            )
    if settings.otlp_endpoint and not _is_endpoint(settings.otlp_endpoint):
        raise ConfigError(
            f"{spelling('otlp_endpoint')} must be http://HOST:PORT or https://HOST:PORT, of a collector that takes "
            "OTLP over gRPC"
        )


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _is_endpoint(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port is not None
            and parts.path in ("", "/")
            and not (parts.query or parts.fragment or parts.username)
        )
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Limit:
    """A resource's limit.

    setting: the setting's name after `max_`, and after `max_caller_` for a caller's. what: the resource's name in
    sentences.
    """

    reason: str
    setting: str
    what: str
    in_all: int
    of_a_caller: int


def limits_of(settings: FrontEndSettings, *, callers_have_names: bool) -> dict[Resource, Limit]:
    """Return the limits. A caller's default is half of the total, so that one caller can't keep others out; without
    names it is the total, because many clients may share an address.
    """
    limits: dict[Resource, Limit] = {}
    for resource, (reason, name, what) in _KINDS.items():
        in_all = getattr(settings, f"max_{name}")
        unset = max(1, in_all // 2) if callers_have_names else in_all
        limits[resource] = Limit(reason, name, what, in_all, getattr(settings, f"max_caller_{name}") or unset)
    return limits


def check_limits(settings: FrontEndSettings, spelling: Spelling) -> None:
    """Check that no caller's limit exceeds the total. Raises ConfigError."""
    for limit in limits_of(settings, callers_have_names=False).values():
        if limit.of_a_caller > limit.in_all:
            one, other = f"max_caller_{limit.setting}", f"max_{limit.setting}"
            raise ConfigError(
                f"{spelling(one)} {limit.of_a_caller} is more than all callers may have together, which is "
                f"{spelling(other)} {limit.in_all}"
            )


def check_security(settings: FrontEndSettings, spelling: Spelling) -> None:
    """Check the settings. Raises ConfigError for contradictions and for an address that is too open."""
    host, tls = settings.host, bool(settings.tls_cert)
    asks = bool(settings.callers or settings.tls_client_ca)
    for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
        if getattr(settings, one) and not getattr(settings, other):
            raise ConfigError(f"{spelling(one)} needs {spelling(other)} beside it")
    if settings.plaintext_tokens and (tls or not settings.callers):
        raise ConfigError(
            f"{spelling('plaintext_tokens')} has no effect: it is for a server with {spelling('callers')} and without "
            f"{spelling('tls_cert')}"
        )
    if is_loopback(host):
        return
    if not asks and not settings.insecure:
        raise ConfigError(
            f"{spelling('host')} {host!r} can be reached from other machines, and this server asks nobody who they "
            "are; listen on 127.0.0.1, or say with --callers or --tls-client-ca who may call, or add --insecure if the "
            "network is trusted"
        )
    if settings.callers and not tls and not settings.plaintext_tokens:
        raise ConfigError(
            f"{spelling('host')} {host!r} can be reached from other machines, and without TLS anybody on the way can "
            "read the callers' tokens; give --tls-cert and --tls-key, or add --plaintext-tokens if something in front "
            "of the server encrypts"
        )


def check_kv_events(settings: FrontEndSettings, engine: EngineConfig) -> None:
    """Check the settings. Raises ConfigError for contradictions, settings without effect, and an address that is too
    open.
    """
    spelling, publishes = engine.spelling, settings.kv_events_port != NO_PORT
    if settings.kv_events and not settings.vllm_facade:
        raise ConfigError(
            f"{spelling('kv_events')} has no effect without {spelling('vllm_facade')}, to which routers subscribe"
        )
    for name, is_on in (("kv_events", settings.kv_events), ("kv_events_port", publishes)):
        if not is_on:
            continue
        if not engine.prefix_cache:
            raise ConfigError(
                f"{spelling(name)} has no effect without {spelling('prefix_cache')}: no KV block is kept for others"
            )
        if (settings.callers or settings.tls_client_ca) and not settings.share_prefix_cache:
            raise ConfigError(
                f"{spelling(name)} would publish nothing: each caller's prefixes are private and not published to "
                f"others; add {spelling('share_prefix_cache')} if callers may share prefixes"
            )
    if settings.kv_events_replay_port != NO_PORT and not publishes:
        raise ConfigError(f"{spelling('kv_events_replay_port')} has no effect without {spelling('kv_events_port')}")
    if publishes:
        _check_stream(settings, engine)


def _check_stream(settings: FrontEndSettings, engine: EngineConfig) -> None:
    spelling, host = engine.spelling, settings.kv_events_host
    if not is_loopback(host) and not settings.insecure:
        raise ConfigError(
            f"{spelling('kv_events_host')} {host!r} can be reached from other machines, and the stream tells prompts "
            "to everybody who connects; publish on 127.0.0.1, or add --insecure if the network lets routers alone in"
        )
    if 0 < settings.kv_events_port == settings.kv_events_replay_port:
        raise ConfigError(f"{spelling('kv_events_replay_port')} must be another port than {spelling('kv_events_port')}")
    for name, text in (("kv_events_pod", settings.kv_events_pod), ("served_name", engine.served_name)):
        if "@" in text or not text.isprintable() or len(text.encode()) > _MOST_POD:
            raise ConfigError(
                f"{spelling(name)} {text!r} can't be in a topic, kv@POD@MODEL: give a name of at most {_MOST_POD} "
                "printable bytes without @"
            )


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
