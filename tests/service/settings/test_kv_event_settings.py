"""Settings of the KV cache's events that can't go together are refused, each by the name that somebody gave it."""

from __future__ import annotations

import pytest

from runahead.runtime.wire.engine_config import ConfigError, EngineConfig
from runahead.service.settings.server_config import check_kv_events
from runahead.service.settings.settings import FrontEndSettings


def engine(**changed: object) -> EngineConfig:
    return EngineConfig(model="m", spelled={"kv_events_port": "--kv-events-port"}, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "config", "sentence"),
    [
        ({"kv_events": True}, {}, "kv_events has no effect without vllm_facade"),
        ({"kv_events_port": 5557}, {"prefix_cache": False}, "--kv-events-port has no effect without prefix_cache"),
        ({"kv_events": True, "vllm_facade": True}, {"prefix_cache": False}, "kv_events has no effect without prefix"),
        (
            {"kv_events_port": 5557, "callers": "f"},
            {},
            "--kv-events-port would publish nothing: each caller's prefixes",
        ),
        ({"kv_events_port": 5557, "tls_client_ca": "f"}, {}, "add share_prefix_cache if callers may"),
        ({"kv_events_replay_port": 5558}, {}, "kv_events_replay_port has no effect without --kv-events-port"),
        ({"kv_events_port": 7, "kv_events_replay_port": 7}, {}, "must be another port than --kv-events-port"),
        ({"kv_events_port": 7, "kv_events_host": "0.0.0.0"}, {}, "'0.0.0.0' can be reached from other machines"),
        ({"kv_events_port": 7, "kv_events_pod": "a@b"}, {}, "kv_events_pod 'a@b' can't be in a topic"),
        ({"kv_events_port": 7, "kv_events_pod": "a" * 256}, {}, "at most 255 printable bytes"),
        ({"kv_events_port": 7}, {"served_name": "a\n"}, r"served_name 'a\\n' can't be in a topic"),
    ],
)
def test_what_cannot_go_together_is_refused(
    settings: dict[str, object], config: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_kv_events(FrontEndSettings(**settings), engine(**config))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_events": True, "vllm_facade": True},
        {"kv_events_port": 0, "kv_events_replay_port": 0},
        {"kv_events_port": 7, "kv_events_replay_port": 8, "kv_events_pod": "10.0.0.1:8000"},
        {"kv_events_port": 7, "kv_events_host": "0.0.0.0", "insecure": True},
        {"kv_events_port": 7, "callers": "f", "share_prefix_cache": True},
        {"kv_events_host": "0.0.0.0"},
    ],
)
def test_what_can_be_served_is_taken(settings: dict[str, object]) -> None:
    check_kv_events(FrontEndSettings(**settings), engine())  # type: ignore[arg-type]
