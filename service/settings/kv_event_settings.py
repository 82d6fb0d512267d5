"""Checks the settings of KV cache events. Imports neither gRPC nor ZMQ."""

from __future__ import annotations

from typing import Final

from runahead.runtime.wire.engine_config import ConfigError, EngineConfig
from runahead.service.settings.loopback import is_loopback
from runahead.service.settings.settings import NO_PORT, FrontEndSettings

_MOST_POD: Final = 255  # bytes, like a host name


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
