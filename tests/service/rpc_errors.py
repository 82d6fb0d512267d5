"""Statuses as a client reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status


def failure(call: Callable[[], object]) -> grpc.RpcError:
    """The error that a call ends with."""
    with pytest.raises(grpc.RpcError) as failed:
        call()
    return failed.value


def code(error: grpc.RpcError) -> grpc.StatusCode:
    return error.code()


def words(error: grpc.RpcError) -> str:
    """The message beside the code."""
    return error.details() or ""


def detail(error: grpc.RpcError, kind: type[Any]) -> Any:
    """The `google.rpc` detail of a kind, or None."""
    status = rpc_status.from_call(error)
    assert status is not None
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):
            found = kind()
            packed.Unpack(found)
            return found
    return None


def fields(error: grpc.RpcError) -> list[str]:
    """Paths of the fields that the server objects to."""
    bad_request = detail(error, error_details_pb2.BadRequest)
    return [violation.field for violation in bad_request.field_violations]
