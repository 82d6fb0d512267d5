"""Norms whose weight is the checkpoint's plus one."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from runahead.runtime.kernels.layers import Attention, Dense, Experts, Norm

_Part = TypeVar("_Part", Attention, Dense, Experts)


def with_one_added(part: _Part) -> _Part:
    """Return the block with 1 added to its norms' weights, in float32: a sum near one would lose digits of weights near
    zero.
    """
    parts = {one.name: getattr(part, one.name) for one in fields(part)}
    norms: dict[str, Any] = {name: one_added(norm) for name, norm in parts.items() if isinstance(norm, Norm)}
    return replace(part, **norms)


def one_added(norm: Norm) -> Norm:
    return Norm(norm.weight.float() + 1.0, norm.eps)
