"""Who is let in: a call says what it is going to hold, before anything of it is looked at, and is refused where there
is no room for that.

The limits are those of the service and not of a front end: see `runahead.service.shared_memory.held`. Nobody is asked
and nobody waits, so that of front ends that let somebody in at the same moment, each may let in one call too many.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Any, Final
from urllib.parse import unquote

import grpc

from runahead.service.calls.access import COMPLETIONS, HEALTH, WORK, Access, current_caller
from runahead.service.calls.pace import LOOK_S, Pace
from runahead.service.contract.errors import ServiceError, exhausted, shutting_down
from runahead.service.settings.admission_limits import Limit, limits_of
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.board import Board, Line
from runahead.service.shared_memory.held import Amounts, Holding, Resource

_HOST_BITS: Final = 64  # of an IPv6 address: whoever has one has all that differ in these


@dataclass(frozen=True, slots=True)
class Account:
    """Whose a call is, as limits see it. name: the caller's; empty where nobody asks for it. number: see `HeldLine`."""

    name: str
    number: int

    @property
    def subject(self) -> str:
        """As `QuotaFailure` calls the caller. No address stands in it: a proxy's is nothing for clients."""
        return f"caller:{self.name}" if self.name else "caller"


class Admission:
    """The limits of all front ends, as one of them keeps them.

    line: of this front end. clock: seconds, monotonic.
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
        """As the settings say."""
        return cls(limits_of(settings, callers_have_names=not access.is_open), board, line)

    def account(self, context: grpc.aio.ServicerContext[Any, Any]) -> Account:
        """Whose the call is that the context is of. Raises LookupError outside of calls that were let in."""
        name = current_caller().name
        return self.account_of(name, "" if name else _address(context.peer()))

    def account_of(self, name: str, address: str = "") -> Account:
        """address: of a caller without a name."""
        return Account(name, self.line.held.number_of(f"name {name}" if name else f"address {address}"))

    def close(self) -> None:
        """No completion is let in any more: each ends with UNAVAILABLE, reason SHUTDOWN."""
        self._closed = True

    @contextmanager
    def uploading(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[None]:
        """A call's headers are there: the body reads its request. Raises ServiceError.

        A completion for which there is no place is refused before a byte of it is read.
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
        """What the call holds while the body runs. Raises what `require` raises."""
        self.require(account, amounts)
        with self.line.held.holding(account.number, amounts) as holding:
            yield holding

    def hold_more(self, account: Account, holding: Holding, amounts: Amounts) -> None:
        """A call that goes on holds as much more. Raises what `require` raises, and it holds what it held."""
        self.require(account, amounts)
        holding.add(amounts)

    def require(self, account: Account, amounts: Amounts) -> None:
        """Raises ServiceError: RESOURCE_EXHAUSTED unless there is room for as much more, or UNAVAILABLE after `close`.

        A caller's limit keeps nobody out who holds nothing of a resource, nor does the service's while nobody does: a
        prompt that is longer than a limit is served alone. Nobody waits for a turn here, so that while others come and
        go one that is nearly as long as the service's limit may be refused again and again.
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
        own: list[int] | None = None  # looked for only where it decides something: that takes longest
        for resource, amount in amounts.items():
            limit, all_ = self._limits[resource], in_all[resource]
            is_counted = resource is Resource.STREAMS  # several of one call are no single long one
            # Whoever may have all is refused by the service's limit, which is the one to set. Nobody is over a caller's
            # limit while all together are not.
            if amount and limit.of_a_caller < limit.in_all and all_ + amount > limit.of_a_caller:
                own = own or self._table.of(account.number).tolist()
                if (own[resource] or is_counted) and own[resource] + amount > limit.of_a_caller:
                    raise self._refusal(resource, limit, own[resource], amount, account)
            if amount and (all_ or is_counted) and all_ + amount > limit.in_all:
                raise self._refusal(resource, limit, all_, amount, None)

    def _refusal(
        self, resource: Resource, limit: Limit, held: int, amount: int, account: Account | None
    ) -> ServiceError:
        """amount: that is asked for. account: whose limit it is; None: the service's."""
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
        """RESOURCE_EXHAUSTED where the engine has no room for a request. max_queue: of the engine."""
        retry_s = self.retry_s(Resource.QUEUED_TOKENS)
        return exhausted("QUEUE_FULL", sentence, retry_s, limit=("max_queue", max_queue))

    def retry_s(self, resource: Resource) -> float:
        """In how many seconds to come back for want of a resource: when what is ahead is gone, as fast as that was of
        late. For a place there has to go one only, and for a stream's the queue too."""
        held = self._table.in_all()
        match resource:
            case Resource.QUEUED_TOKENS | Resource.TOKENIZING_BYTES:
                return self._paces[resource].wait_s(int(held[resource]))
            case Resource.STREAMS if tokens := int(held[Resource.QUEUED_TOKENS]):
                return max(self._paces[resource].wait_s(1), self._paces[Resource.QUEUED_TOKENS].wait_s(tokens))
        return self._paces[resource].wait_s(1)

    def look(self) -> None:
        """Measures the pace at which room is made. To be called now and again."""
        now = self._clock()
        for pace, held, left in zip(
            self._paces.values(), self._table.in_all().tolist(), self._table.left().tolist(), strict=True
        ):
            pace.look(held, left, now)

    async def keep_looking(self) -> None:
        """Until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)


@lru_cache(maxsize=4096)
def _address(peer: str) -> str:
    """Of a peer as gRPC names it (`ipv4:10.0.0.1:4711`, `ipv6:%5B2001:db8::1%5D:4711`): without the port, which is
    another for each connection, and of IPv6 the part that is one site's."""
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
