"""Channels of command-line clients: plain text or TLS, with or without a token."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from runahead.service.commands.ends import UsageError
from runahead.service.settings.bounded_files import FileError, read_file
from runahead.service.settings.loopback import is_loopback

_MOST_BYTES: Final = 16 << 20  # of a file

Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server, from the flags. credentials: None for plain text. metadata: of each call."""

    url: str
    credentials: grpc.ChannelCredentials | None
    options: Sequence[tuple[str, int]]
    metadata: Metadata

    def channel(self) -> grpc.Channel:
        """Make an unconnected channel."""
        if self.credentials is None:
            return grpc.insecure_channel(self.url, self.options)
        return grpc.secure_channel(self.url, self.credentials, self.options)

    def aio_channel(self) -> grpc.aio.Channel:
        """Make an asyncio channel with a connection that no other channel shares."""
        options = [*self.options, ("grpc.use_local_subchannel_pool", 1)]
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.url, options)
        return grpc.aio.secure_channel(self.url, self.credentials, options)


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of the server's address and of authentication."""
    parser.add_argument("--url", default="127.0.0.1:50051", metavar="HOST:PORT", help="the server (%(default)s)")
    parser.add_argument("--token-file", metavar="FILE", help="file with the token that says who calls")
    parser.add_argument("--tls", action="store_true", help="through TLS, with the authorities that this system trusts")
    parser.add_argument("--ca", metavar="FILE", help="through TLS, with these authorities, PEM")
    parser.add_argument(
        "--cert", metavar="FILE", help="certificate of this client, PEM, for a server that asks for one"
    )
    parser.add_argument("--key", metavar="FILE", help="the certificate's key, PEM")
    parser.add_argument(
        "--plaintext-tokens", action="store_true", help="send the token without TLS to another machine, too"
    )


def endpoint(arguments: argparse.Namespace) -> Endpoint:
    """Read the flags. Raises UsageError."""
    check_url(arguments.url)
    has_tls = arguments.tls or arguments.ca is not None or arguments.cert is not None
    if (arguments.cert is None) != (arguments.key is None):
        raise UsageError("--cert and --key go together: a certificate and its key")
    metadata: list[tuple[str, str]] = []
    to_this_machine = is_loopback(arguments.url.removeprefix("dns:").lstrip("/").rpartition(":")[0] or arguments.url)
    if arguments.token_file is not None:
        if not has_tls and not to_this_machine and not arguments.plaintext_tokens:
            raise UsageError(
                f"--token-file would send a token to {arguments.url} in plain text; add --tls or --ca FILE, or "
                "--plaintext-tokens if the network is trusted"
            )
        metadata.append(("authorization", f"Bearer {_token(arguments.token_file)}"))
    # gRPC would use a proxy of the environment even for localhost, and plain text would leave this machine.
    options = [("grpc.enable_http_proxy", 0)] if to_this_machine else []
    if not has_tls:
        return Endpoint(arguments.url, None, options, metadata)
    credentials = grpc.ssl_channel_credentials(
        *(None if path is None else _read(flag, path) for flag, path in _files(arguments))
    )
    return Endpoint(arguments.url, credentials, options, metadata)


def _files(arguments: argparse.Namespace) -> list[tuple[str, str | None]]:
    return [("--ca", arguments.ca), ("--key", arguments.key), ("--cert", arguments.cert)]


def check_url(url: str) -> None:
    """Check an address. Raises UsageError if gRPC can't parse it."""
    try:
        if url.encode("utf-8"):
            return
    except UnicodeError:
        pass
    raise UsageError.of("url", "HOST:PORT", url)


def _token(path: str) -> str:
    """Read the token file. Raises UsageError, which does not show its content."""
    token = _read("--token-file", path).decode("ascii", "replace").strip()
    if not token or not token.isprintable() or not token.isascii() or " " in token:
        raise UsageError(f"--token-file {path} must hold one token and nothing else")
    return token


def _read(flag: str, path: str) -> bytes:
    try:
        return read_file(path, _MOST_BYTES)
    except FileError as error:
        raise UsageError(f"{flag} {path} can't be read: {error}") from error
