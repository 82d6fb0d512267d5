"""Authentication and authorization of every method of every service except health, and whose request an id names.

The engine serves all front ends and names a request by caller and id, so callers can use equal ids, and another
caller's id does not exist for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

import grpc

from runahead.service.calls.call import current_call
from runahead.service.contract.errors import ServiceError
from runahead.service.contract.validation import CheckedRequest
from runahead.service.credentials.callers import RIGHTS, Caller, CallersFile, Right

ANYBODY: Final = Caller("", frozenset(RIGHTS))  # the caller on a server without authentication

_SERVICE: Final = "/runahead.v1.GenerationService/"
FACADE: Final = "/vllm.grpc.engine.VllmEngine/"  # served by `runahead.service.servicers.vllm_servicer`
_REFLECTION: Final = frozenset(
    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha")
)
HEALTH: Final = frozenset(f"/grpc.health.v1.Health/{method}" for method in ("Check", "List", "Watch"))
COMPLETIONS: Final = frozenset({_SERVICE + "Generate", _SERVICE + "GenerateOnce", FACADE + "Generate"})
WORK: Final = COMPLETIONS | {_SERVICE + method for method in ("RenderChat", "Tokenize", "Detokenize")}

# either right: methods for every caller that may do more than call health
_ANY_WORK: Final = frozenset[Right]({"generate", "control"})

# One of these rights is required. `generate` lets Abort end the caller's own requests, `control` any request.
RIGHTS_FOR: Final[Mapping[str, frozenset[Right]]] = MappingProxyType(
    {
        **{method: frozenset[Right]({"generate"}) for method in WORK},
        **{_SERVICE + method: frozenset[Right]({"control"}) for method in ("Stats", "Trace", "WatchStats")},
        **{_SERVICE + method: _ANY_WORK for method in ("Abort", "GetModelInfo")},
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


@dataclass(frozen=True, slots=True)
class Ownership:
    """A caller's request ids in the engine: unchanged without authentication."""

    caller: Caller

    @property
    def reaches_everybody(self) -> bool:
        """Whether the caller may end other callers' requests, written with the caller first: `alice/r1`."""
        return bool(self.caller.name) and "control" in self.caller.rights

    @property
    def reach(self) -> str:
        """Return the id prefix of all requests that the caller may end."""
        return "" if self.reaches_everybody else self._prefix

    def own(self, request: CheckedRequest, *, shares_prefixes: bool) -> CheckedRequest:
        """Return the request as the engine gets it. Unless prefixes are shared, it finds only its caller's blocks."""
        salt = request.cache_salt if shares_prefixes else self._prefix + request.cache_salt
        return replace(
            request,
            engine_id=self._prefix + request.request_id,
            cache_salt=salt,
            caller=self.caller.name,
            outranks="priority" in self.caller.rights,
        )

    def engine_id(self, request_id: str) -> str:
        """Return the engine's id for a caller's id."""
        return request_id if "/" in request_id else self._prefix + request_id

    def shown_id(self, engine_id: str) -> str:
        """Return the caller's id for an engine's id."""
        return engine_id.removeprefix(self._prefix)

    @property
    def _prefix(self) -> str:
        return f"{self.caller.name}/" if self.caller.name else ""
