"""The file that says who may call: a line for each credential, read again when it changes.

    # name   rights             credential
    alice    generate           token 0pvFqiMtzE7WmAKZkWpHq2LmyYVx3dyd
    ops      generate,control   token 4qZpnGxZ0dmyvDqLrKjQ0dm8yS1uOqjC
    batch    generate           certificate batch.example.org

A name may stand on several lines, so that a token can be replaced without a gap.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal, get_args

import structlog

from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.credentials.watched_files import UnreadableError, WatchedFiles, read_regular

Right = Literal["generate", "control", "priority"]
RIGHTS: Final[tuple[Right, ...]] = get_args(Right)

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]{16,512}=*")  # valid after `authorization: Bearer` (RFC 6750)
_SPACE: Final = re.compile(r"[ \t]+")
_MOST_BYTES: Final = 1 << 20

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller and its rights. name: empty without authentication."""

    name: str
    rights: frozenset[Right]


@dataclass(frozen=True, slots=True)
class _Entry:
    caller: Caller
    digest: bytes  # SHA-256 of the token
    certificate: str  # name in a certificate; empty for a token


class CallersFile:
    """The current callers of a file.

    Raises ConfigError if the file can't be read at first. A later invalid version is logged once, and the previous one
    stays in force.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = WatchedFiles((path,), lambda: _read(path), "callers_not_read")

    @property
    def has_certificates(self) -> bool:
        """Whether any caller has a certificate."""
        return any(entry.certificate for entry in self._file.contents)

    def by_token(self, token: bytes) -> Caller | None:
        """Find a token's caller, in time that does not depend on the token."""
        digest, found = sha256(token).digest(), None
        for entry in self._newest():
            if hmac.compare_digest(entry.digest, digest):
                found = entry.caller
        return found

    def by_certificate(self, names: Sequence[str]) -> Caller | None:
        """Find the caller of a certificate with these names: the first name that the file has decides."""
        callers = {entry.certificate: entry.caller for entry in self._newest() if entry.certificate}
        return next((callers[name] for name in names if name in callers), None)

    def _newest(self) -> list[_Entry]:
        if self._file.refresh():
            log.info("callers_read", path=str(self._path), credentials=len(self._file.contents))
        return self._file.contents


def _read(path: Path) -> list[_Entry]:
    """Read the file's entries. Raises UnreadableError, or ConfigError, which names a line and never a token."""
    try:
        data = read_regular(path, _MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"callers file {path} has more than {_MOST_BYTES} bytes")
        # Not `splitlines`: one line of a comment in an editor must not become two.
        lines = data.decode().replace("\r\n", "\n").split("\n")
    except UnreadableError as error:
        raise UnreadableError(f"callers file {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"callers file {path} is not UTF-8") from error
    entries: list[_Entry] = []
    for number, line in enumerate(lines, 1):
        if (words := _SPACE.split(line.strip(" \t"))) != [""] and not words[0].startswith("#"):
            entries.append(_entry(words, f"line {number} of callers file {path}"))
    tokens = [entry.digest for entry in entries if not entry.certificate]
    certificates = [entry.certificate for entry in entries if entry.certificate]
    for credentials, kind in ((tokens, "token"), (certificates, "certificate name")):
        if len(set(credentials)) < len(credentials):
            raise ConfigError(f"callers file {path} has the same {kind} on two lines")
    if not entries:
        raise ConfigError(f"callers file {path} has no callers")
    return entries


def _entry(words: list[str], where: str) -> _Entry:
    if len(words) != 4 or words[2] not in ("token", "certificate"):
        raise ConfigError(f"{where} must be: NAME RIGHTS token TOKEN, or: NAME RIGHTS certificate NAME-IN-IT")
    name, rights, kind, credential = words
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where} must begin with a name of 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    granted = frozenset(right for right in RIGHTS if right in rights.split(","))
    if len(granted) != len(rights.split(",")):
        raise ConfigError(f"{where} must give its rights as {' or '.join(RIGHTS)}, or as several of them with commas")
    if kind == "certificate":
        if not credential.isprintable():
            raise ConfigError(f"{where} has a name in a certificate with characters that can't be printed")
        return _Entry(Caller(name, granted), b"", credential)
    if not _TOKEN.fullmatch(credential):
        raise ConfigError(
            f"{where} has a token that must be 16 to 512 of the characters A-Z a-z 0-9 . _ ~ + / -, and = behind them"
        )
    return _Entry(Caller(name, granted), sha256(credential.encode()).digest(), "")
