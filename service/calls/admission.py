"""Admits calls: who calls, which methods they may call, what calls hold and may hold.

The engine serves all front ends and names a request by caller and id: see `engine_prefix` in
`runahead.service.contract.validation`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from ipaddress import IPv6Address, ip_address
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote, unquote

import grpc

from runahead.service.calls.call import COMPLETIONS, FACADE, HEALTH, SERVICE, WORK, current_call
from runahead.service.contract.errors import ServiceError, exhausted, shutting_down
from runahead.service.contract.limits import LIMITS
from runahead.service.credentials.callers import RIGHTS, Caller, CallersFile, Right
from runahead.service.settings.server_config import Limit, limits_of
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.board import Board, Line
from runahead.service.shared_memory.call_tables import Amounts, Holding, Resource

ANYBODY: Final = Caller("", frozenset(RIGHTS))  # the caller on a server without authentication

_REFLECTION: Final = frozenset(
    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha")
)

# either right: methods for every caller that may do more than call health
_ANY_WORK: Final = frozenset[Right]({"generate", "control"})

# One of these rights is required. `generate` lets Abort end the caller's own requests, `control` any request.
RIGHTS_FOR: Final[Mapping[str, frozenset[Right]]] = MappingProxyType(
    {
        **{method: frozenset[Right]({"generate"}) for method in WORK},
        **{SERVICE + method: frozenset[Right]({"control"}) for method in ("Stats", "Trace", "WatchStats")},
        **{SERVICE + method: _ANY_WORK for method in ("Abort", "GetModelInfo")},
        **{
            FACADE + method: frozenset[Right]({"control"})
            for method in ("GetServerInfo", "GetLoads", "SubscribeKvEvents")
        },
        **{FACADE + method: _ANY_WORK for method in ("Abort", "HealthCheck", "GetModelInfo", "GetTokenizer")},
        **dict.fromkeys(_REFLECTION, _ANY_WORK),
    }
)

_MOST_NAME: Final = 100  # the engine puts the caller's name in front of a request's id

_caller: ContextVar[Caller] = ContextVar("caller")  # no default: a call that was not admitted has no rights

MEASURE_S: Final = 0.5  # between measurements, about
_HALF_LIFE_S: Final = 10.0  # after which a measurement counts half
_ENOUGH_S: Final = 0.25  # measured before an estimate is made

_HOST_BITS: Final = 64  # low bits of an IPv6 address: addresses that differ only in these are one caller's


def current_caller() -> Caller:
    """Return the caller of the current call. Raises LookupError outside calls that `Access` has admitted."""
    return _caller.get()


class Access:
    """Authenticates callers and checks their rights.

    callers: None disables tokens: a client with a certificate gets the right to generate where certificates are
        required, otherwise every client gets all rights.
    certificates: clients must have a certificate, which the transport has verified.
    """

    def __init__(self, callers: CallersFile | None = None, *, certificates: bool = False) -> None:
        self._callers = callers
        self._certificates = certificates

    @property
    def is_open(self) -> bool:
        """Whether the server has no authentication."""
        return self._callers is None and not self._certificates

    def admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any], *, exists: bool = True) -> None:
        """Authenticate and authorize the call of this context, and make its caller the current one.

        exists: the server has the method. Raises ServiceError: UNAUTHENTICATED, PERMISSION_DENIED without the method's
        right, or UNIMPLEMENTED for an unknown method.
        """
        if self.is_open:
            _caller.set(ANYBODY)
        elif method not in HEALTH:
            caller = self._caller_of(context)
            current_call().caller = caller.name
            rights = RIGHTS_FOR.get(method, frozenset())
            if exists and not rights & caller.rights:
                needed = " or ".join(sorted(rights)) or "to call this method"
                raise ServiceError("NO_RIGHT", f"caller {caller.name!r} lacks the right {needed}")
            _caller.set(caller)
        if not exists:
            raise ServiceError("NOT_SERVED", "this server has no such method")

    def _caller_of(self, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        """Find the caller by token or certificate. Raises ServiceError (UNAUTHENTICATED)."""
        names = _certificate_names(context) if self._certificates else []
        if self._callers is None:
            return Caller(_as_name(names[0]), frozenset({"generate"}))
        token = _bearer_token(context)
        caller = self._callers.by_certificate(names) if token is None else self._callers.by_token(token)
        if caller is not None:
            return caller
        if token is None and not names:
            raise ServiceError(
                "NO_CREDENTIALS", "this server requires a token: send the header authorization: Bearer TOKEN"
            )
        raise ServiceError("UNKNOWN_CREDENTIALS", "this server does not know the caller's token or certificate")


def _bearer_token(context: grpc.aio.ServicerContext[Any, Any]) -> bytes | None:
    """Read the bearer token from the only `authorization` header. Raises ServiceError if the header is malformed or
    repeated.
    """
    given = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
    if not given:
        return None
    scheme, _, token = str(given[0]).partition(" ")
    if len(given) > 1 or scheme.lower() != "bearer" or not token:
        raise ServiceError("UNKNOWN_CREDENTIALS", "the header authorization must be one: Bearer TOKEN")
    return token.encode()


def _certificate_names(context: grpc.aio.ServicerContext[Any, Any]) -> list[str]:
    """List the alternative names of the client's certificate in order, or its common name if it has none.

    Raises ServiceError for a certificate without a name.
    """
    properties = context.auth_context()
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        if names := [value.decode("utf-8", "backslashreplace") for value in properties.get(key, ()) if value]:
            return names
    raise ServiceError("UNKNOWN_CREDENTIALS", "the caller's certificate has no name")


def _as_name(name: str) -> str:
    """Turn a certificate's name into a caller's name: no slash, at most `_MOST_NAME` characters."""
    quoted = quote(name, safe="")
    return quoted if len(quoted) <= _MOST_NAME else "sha256-" + sha256(name.encode()).hexdigest()


class Watchers:
    """The open calls of a method that stays open, at most `most` of this process. method: its name."""

    def __init__(self, most: int, method: str) -> None:
        self._most = most
        self._method = method
        self._open = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count a call. Raises ServiceError (RESOURCE_EXHAUSTED) for too many."""
        if self._open >= self._most:
            sentence = f"{self._most} calls of {self._method} are open, which is this process's limit"
            raise exhausted("WATCHERS_LIMIT", sentence, LIMITS.retry_s)
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1


class Pace:
    """The pace at which held amounts are given back. now: monotonic, seconds.

    Time in which nothing was held does not count.
    """

    def __init__(self) -> None:
        self._checked_at: float | None = None
        self._left = self._held = 0
        self._busy_s = self._given_back = 0.0  # both decay with the half-life

    def measure(self, held: int, left: int, now: float) -> None:
        """Record a measurement. held: now. left: the total given back so far."""
        if self._checked_at is not None and (self._held or left > self._left):
            since_s = now - self._checked_at
            older = 0.5 ** (since_s / _HALF_LIFE_S)
            self._busy_s = self._busy_s * older + since_s
            self._given_back = self._given_back * older + (left - self._left)
        self._checked_at, self._held, self._left = now, held, left

    def wait_s(self, ahead: int) -> float:
        """Return the seconds until `ahead` more is given back, within the bounds of `Limits`."""
        if self._busy_s < _ENOUGH_S:
            wait_s = LIMITS.retry_s
        elif not self._given_back:
            wait_s = max(LIMITS.retry_s, self._busy_s)  # at least as long again
        else:
            wait_s = ahead * self._busy_s / self._given_back
        return min(LIMITS.retry_most_s, max(LIMITS.retry_least_s, wait_s))


@dataclass(frozen=True, slots=True)
class Account:
    """The caller as limits count it. name: empty without authentication. number: see `HeldLine`."""

    name: str
    number: int

    @property
    def subject(self) -> str:
        """The subject in `QuotaFailure`: the caller's name, never an address, which may be a proxy's."""
        return f"caller:{self.name}" if self.name else "caller"


class Admission:
    """Enforces the limits of all front ends, in one of them.

    line: this front end's. clock: monotonic, in seconds.
    """

    def __init__(
        self,
        limits: Mapping[Resource, Limit],
        board: Board,
        line: Line,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.line = line
        self._limits = limits
        self._table = board.held
        self._clock = clock
        self._paces = {resource: Pace() for resource in Resource}
        self._closed = False

    @classmethod
    def of(cls, settings: FrontEndSettings, access: Access, board: Board, line: Line) -> Admission:
        """Make the admission with the limits of the settings."""
        return cls(limits_of(settings, callers_have_names=not access.is_open), board, line)

    def account(self, context: grpc.aio.ServicerContext[Any, Any]) -> Account:
        """Return the account of the context's call. Raises LookupError outside admitted calls."""
        name = current_caller().name
        return self.account_of(name, "" if name else _address(context.peer()))

    def account_of(self, name: str, address: str = "") -> Account:
        """Return the account of a named caller, or of the address of a caller without a name."""
        return Account(name, self.line.held.number_of(f"name {name}" if name else f"address {address}"))

    def close(self) -> None:
        """Refuse all further completions with UNAVAILABLE, reason SHUTDOWN."""
        self._closed = True

    @contextmanager
    def uploading(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[None]:
        """Admit a call by its headers; the body reads its request. Raises ServiceError.

        Refuses a completion without room before reading a byte of it.
        """
        if method in HEALTH:
            yield
            return
        account = self.account(context)
        if method in COMPLETIONS:
            self.require(account, {Resource.STREAMS: 1})
        with self.holding(account, {Resource.UPLOADS if method in WORK else Resource.CONTROL_UPLOADS: 1}):
            yield

    @contextmanager
    def holding(self, account: Account, amounts: Amounts) -> Iterator[Holding]:
        """Hold these amounts while the body runs. Raises the errors of `require`."""
        self.require(account, amounts)
        with self.line.held.holding(account.number, amounts) as holding:
            yield holding

    def hold_more(self, account: Account, holding: Holding, amounts: Amounts) -> None:
        """Add these amounts to a call's holding. Raises the errors of `require` and leaves the holding unchanged
        then.
        """
        self.require(account, amounts)
        holding.add(amounts)

    def require(self, account: Account, amounts: Amounts) -> None:
        """Check that these amounts fit. Raises ServiceError: RESOURCE_EXHAUSTED without room, UNAVAILABLE after
        `close`.

        A caller that holds nothing of a resource passes its own limit, and any call passes the service's limit while
        nobody holds any: a prompt longer than a limit is served alone. There is no queue here, so a prompt almost as
        long as the service's limit may be refused repeatedly while others come and go.
        """
        if self._closed and Resource.STREAMS in amounts:
            raise shutting_down()
        try:
            self._require(account, amounts)
        except ServiceError:
            self.line.refused += Resource.STREAMS in amounts
            raise

    def _require(self, account: Account, amounts: Amounts) -> None:
        in_all = self._table.in_all().tolist()
        own: list[int] | None = None  # computed only if it decides: it is the slowest part
        for resource, amount in amounts.items():
            limit, all_ = self._limits[resource], in_all[resource]
            is_counted = resource is Resource.STREAMS  # several streams of one call are no single long one
            # A caller whose limit equals the service's is refused by the service's, which is the setting to change.
            # Callers' limits apply only once the sum passes the smaller one.
            if amount and limit.of_a_caller < limit.in_all and all_ + amount > limit.of_a_caller:
                own = own or self._table.of(account.number).tolist()
                if (own[resource] or is_counted) and own[resource] + amount > limit.of_a_caller:
                    raise self._refusal(resource, limit, own[resource], amount, account)
            if amount and (all_ or is_counted) and all_ + amount > limit.in_all:
                raise self._refusal(resource, limit, all_, amount, None)

    def _refusal(
        self, resource: Resource, limit: Limit, held: int, amount: int, account: Account | None
    ) -> ServiceError:
        """Make the refusal. amount: requested. account: whose limit was reached; None for the service's."""
        retry_s = self.retry_s(resource)
        if account is None:
            reason, setting, most = limit.reason, f"max_{limit.setting}", limit.in_all
            whose, subject = "this server's", "server"
        else:
            reason, setting, most = f"CALLER_{limit.reason}", f"max_caller_{limit.setting}", limit.of_a_caller
            whose, subject = "the caller's", account.subject
        more = f", the call asks for {amount} more" if amount > most else ""
        sentence = f"{held} {limit.what}{more}, and {whose} limit is {most} ({setting})"
        return exhausted(reason, sentence, retry_s, subject=subject, limit=(setting, most))

    def queue_full(self, sentence: str, max_queue: int) -> ServiceError:
        """Make RESOURCE_EXHAUSTED for a full engine queue. max_queue: the engine's bound."""
        retry_s = self.retry_s(Resource.QUEUED_TOKENS)
        return exhausted("QUEUE_FULL", sentence, retry_s, limit=("max_queue", max_queue))

    def retry_s(self, resource: Resource) -> float:
        """Estimate the seconds until room is made, from the recent pace at which the amounts ahead were given back. One
        stream must end to make room for another, and the queue too.
        """
        held = self._table.in_all()
        match resource:
            case Resource.QUEUED_TOKENS | Resource.TOKENIZING_BYTES:
                return self._paces[resource].wait_s(int(held[resource]))
            case Resource.STREAMS if tokens := int(held[Resource.QUEUED_TOKENS]):
                return max(self._paces[resource].wait_s(1), self._paces[Resource.QUEUED_TOKENS].wait_s(tokens))
        return self._paces[resource].wait_s(1)

    def measure(self) -> None:
        """Measure the pace at which room is made. Call it regularly."""
        now = self._clock()
        for pace, held, left in zip(
            self._paces.values(), self._table.in_all().tolist(), self._table.left().tolist(), strict=True
        ):
            pace.measure(held, left, now)

    async def keep_measuring(self) -> None:
        """Measure until cancelled."""
        while True:
            self.measure()
            await asyncio.sleep(MEASURE_S)


@lru_cache(maxsize=4096)
def _address(peer: str) -> str:
    """Reduce a gRPC peer (`ipv4:10.0.0.1:4711`, `ipv6:%5B2001:db8::1%5D:4711`) to its address without the port, and an
    IPv6 address to its site prefix.
    """
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind
    host = unquote(rest).rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ip_address(host)
    except ValueError:
        return kind
    if not isinstance(address, IPv6Address):
        return str(address)
    return str(address.ipv4_mapped or IPv6Address(int(address) >> _HOST_BITS << _HOST_BITS))
