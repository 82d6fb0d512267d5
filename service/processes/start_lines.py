"""What `runahead serve` prints at a terminal beside its log: what it serves, and how to call it."""

from __future__ import annotations

import sys
from typing import Final

from runahead.runtime.log_output import draws_on_a_terminal, printable
from runahead.service.settings.server_config import ServerConfig
from runahead.service.settings.settings import FrontEndSettings

_EVERY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # wildcard addresses and the loopback address to call


def say_serving(config: ServerConfig, port: int, device: str) -> None:
    """Print the address, the model, the device and a command that calls this service."""
    settings, host = config.front_end, config.front_end.host.strip("[]")
    prompt = "--token-ids 1,2,3" if settings.tokenizer == "none" else "'def fibonacci(n):'"
    call = f"runahead generate {prompt} {_flags(settings, _address(_EVERY.get(host, host), port))}"
    if draws_on_a_terminal(settings.log):
        line = f"{_address(host, port)} serves {config.engine.served_name} on {device}; call it: {call}"
        print(printable(line), file=sys.stderr, flush=True)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _flags(settings: FrontEndSettings, url: str) -> str:
    """Return flags of a client on this machine, with placeholders in capitals."""
    flags = [f"--url {url}"]
    if settings.tls_cert:
        flags.append("--ca FILE")
    if settings.tls_client_ca:
        flags.append("--cert FILE --key FILE")
    if settings.callers:
        flags.append("--token-file FILE")
    return " ".join(flags)
