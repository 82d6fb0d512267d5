"""What the health service lists, as a client asks for it."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from runahead.service.servicers.health import HealthListRequest, HealthListResponse
from tests.service.fake_engine import TIMEOUT_S


def health_statuses(channel: grpc.Channel) -> Mapping[str, int]:
    """By service."""
    method = channel.unary_unary(
        "/grpc.health.v1.Health/List",
        request_serializer=HealthListRequest.SerializeToString,
        response_deserializer=HealthListResponse.FromString,
    )
    statuses = method(HealthListRequest(), timeout=TIMEOUT_S).statuses
    return {name: status.status for name, status in statuses.items()}
