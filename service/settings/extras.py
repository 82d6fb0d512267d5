"""Checks the extras that some settings need, without loading their packages."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final
from urllib.parse import urlsplit

from runahead.runtime.wire.engine_config import ConfigError, Spelling
from runahead.service.settings.settings import NO_PORT, FrontEndSettings

# By setting: the extra and its packages.
_NEEDED: Final = {
    "vllm_facade": ("vllm-facade", ("smg_grpc_proto.generated.vllm_engine_pb2",)),
    "chat_template": ("chat", ("jinja2",)),
    "kv_events_port": ("kv-events", ("zmq",)),
    "otlp_endpoint": ("otel", ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc")),
}


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
