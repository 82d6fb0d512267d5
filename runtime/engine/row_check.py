"""Compares the device's row state with the host's, field by field, while nothing is in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.row_record import NUMPY_TYPES, PENALTY_TENSORS, ROW_RECORD, ROW_TENSORS, signed_64, token_mask
from runahead.runtime.scheduler.ledger import LedgerError
from runahead.runtime.scheduler.new_row import SAMPLING_NUMBERS
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import RowPhase, Rows
from runahead.runtime.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class _Live:
    """The n rows with a request, as the host knows them."""

    rows: Rows
    vocab_size: int
    requests: list[Request]
    slots: NDArray[np.int64]  # [n]

    def those(self, wanted: Callable[[Request], object]) -> _Live:
        """Return the rows whose requests satisfy `wanted`."""
        chosen = [request for request in self.requests if wanted(request)]
        return _live(chosen, self.rows, self.vocab_size)


def _live(requests: list[Request], rows: Rows, vocab_size: int) -> _Live:
    return _Live(rows, vocab_size, requests, np.array([request.row_slot for request in requests], np.int64))


@dataclass(frozen=True, slots=True)
class _Expected:
    """The expected values of a field for m rows. Rows without a value are left out.

    indexes: the rows' indexes in the field, by row slot or by penalty slot. counts: how many values, from the first on,
    each row has; None: all.
    """

    row_slots: NDArray[np.int64]  # [m]
    indexes: NDArray[np.int64]  # [m]
    values: NDArray[np.generic]  # [m] or [m, width]
    counts: NDArray[np.int64] | None = None  # [m]


_Field = Callable[[_Live], _Expected]


def _column(values: Callable[[_Live], NDArray[np.generic]]) -> _Field:
    """Return a field with a value or an array for each row."""
    return lambda live: _Expected(live.slots, live.slots, values(live))


def _parameter(name: str, value: Callable[[Request], float]) -> _Field:
    """Return a field of `RowParameters`, in its type."""
    dtype = NUMPY_TYPES[ROW_RECORD.fields[name].code]
    return _column(lambda live: np.array([value(request) for request in live.requests], dtype))


def _of_rows_that_stay(field: _Field) -> _Field:
    """Return the field without leaving rows, which have given up its resource unknown to the device."""
    return lambda live: field(live.those(lambda request: live.rows.phase[request.row_slot] != RowPhase.LEAVING))


def _lists(values: Callable[[Request], Any], dtype: type[np.generic]) -> _Field:
    """Return a field with a list for each row. Values behind a list's end are ignored."""

    def expected(live: _Live) -> _Expected:
        lists = [values(request) for request in live.requests]
        counts = np.array([len(values) for values in lists], np.int64)
        table = np.zeros((len(lists), max(counts, default=0)), dtype)
        table[np.arange(table.shape[1]) < counts[:, None]] = np.fromiter(chain.from_iterable(lists), dtype)
        return _Expected(live.slots, live.slots, table, counts)

    return expected


def _seq_len(live: _Live) -> NDArray[np.generic]:
    """Return the planned length of rows in prefill and the committed length of others: nothing is in flight."""
    rows, slots = live.rows, live.slots
    is_prefilling = rows.phase[slots] == RowPhase.PREFILL
    return np.where(is_prefilling, rows.least_len[slots], rows.committed_len[slots])


def _last_token(live: _Live) -> _Expected:
    """Return the last token of rows that have generated one since their admission."""
    rows = live.rows
    live = live.those(lambda request: rows.committed_len[request.row_slot] > rows.known_len[request.row_slot])
    return _column(lambda live: rows.history[live.slots, rows.committed_len[live.slots] - 1])(live)


def _allowed(live: _Live) -> _Expected:
    """Return the masks of rows with allowed tokens. Other rows' masks are never read."""
    live = live.those(lambda request: request.sampling.allowed_mask)
    masks = [np.frombuffer(request.sampling.allowed_mask, np.int32) for request in live.requests]
    return _Expected(live.slots, live.slots, _stacked(masks))


def _by_penalty_slot(values: Callable[[Rows, Request, int], NDArray[np.generic]]) -> _Field:
    """Return a field with an array for each row with penalties."""

    def expected(live: _Live) -> _Expected:
        live = live.those(lambda request: request.sampling.has_penalty)
        indexes = np.array([request.penalty_slot for request in live.requests], np.int64)
        found = [values(live.rows, request, live.vocab_size) for request in live.requests]
        return _Expected(live.slots, indexes, _stacked(found))

    return expected


def _counts(rows: Rows, request: Request, vocab_size: int) -> NDArray[np.generic]:
    """Return how often the completion has each token. [vocab]"""
    said = rows.history[request.row_slot, request.prompt.size : rows.committed_len[request.row_slot]]
    return np.bincount(said, minlength=vocab_size)


def _in_prompt(rows: Rows, request: Request, vocab_size: int) -> NDArray[np.generic]:
    """Return the mask of the prompt's tokens, which only a repetition penalty reads."""
    return token_mask(request.prompt if request.sampling.repetition_penalty != 1 else (), vocab_size)


def _stacked(found: Sequence[NDArray[np.generic]]) -> NDArray[np.generic]:
    return np.stack(found) if found else np.zeros((0, 0), np.int32)


def _history(live: _Live) -> _Expected:
    """Return the row's tokens by position, as far as planned or committed."""
    return _Expected(live.slots, live.slots, live.rows.history[live.slots], _seq_len(live).astype(np.int64))


# Fields of devices with a drafter.
OF_A_DRAFTER: Final[Mapping[str, _Field]] = {"history": _history}
# Fields of devices with snapshots: each row's by boundary, used or not.
OF_SNAPSHOTS: Final[Mapping[str, _Field]] = {"snapshots": _lists(lambda request: request.snapshots, np.int32)}
# The host's values of the device's fields: every tensor of `runahead.runtime.kernels.row_state.RowState` and
# `PenaltyState`, with the fields of `parameters` in its place.
FIELDS: Final[Mapping[str, _Field]] = {
    "alive": _column(lambda live: np.ones(live.slots.size, np.bool_)),
    "seq_len": _column(_seq_len),
    "last_token": _last_token,
    "block_table": _lists(lambda request: request.blocks, np.int32),
    **{name: _parameter(name, attrgetter(f"sampling.{name}")) for name in SAMPLING_NUMBERS},
    "row_slot": _parameter("row_slot", lambda request: request.row_slot),
    "seed": _parameter("seed", lambda request: signed_64(request.sampling.seed)),
    "mask_epoch": _column(lambda live: np.where(live.rows.may_hold[live.slots], live.rows.epoch[live.slots], 0)),
    "logprobs": _column(lambda live: live.rows.logprobs[live.slots]),
    "prompt_logprobs": _column(lambda live: live.rows.prompt_logprobs[live.slots]),
    "min_position": _column(lambda live: live.rows.min_position[live.slots]),
    "max_position": _column(lambda live: live.rows.max_len[live.slots] - 1),
    "stop_count": _column(lambda live: np.count_nonzero(live.rows.stop_ids[live.slots] >= 0, axis=1)),
    "stop_ids": _column(lambda live: live.rows.stop_ids[live.slots]),
    "bias_count": _parameter("bias_count", lambda request: len(request.sampling.bias_ids)),
    "bias_ids": _lists(lambda request: request.sampling.bias_ids, np.int32),
    "bias_values": _lists(lambda request: request.sampling.bias_values, np.float32),
    "allowed_words": _parameter("allowed_words", lambda request: len(request.sampling.allowed_mask) // 4),
    "allowed": _allowed,
    "penalty_slot": _parameter("penalty_slot", lambda request: request.penalty_slot),
    "state_slot": _of_rows_that_stay(_parameter("state_slot", lambda request: request.state_slot)),
    "begins_as": _of_rows_that_stay(_parameter("begins_as", lambda request: request.begins_as)),
    "counts": _by_penalty_slot(_counts),
    "in_prompt": _by_penalty_slot(_in_prompt),
}
_TENSORS: Final = frozenset((*ROW_TENSORS, *PENALTY_TENSORS))
# The index of a difference in these would reveal a prompt's token, and logs have no prompts.
_UNSPOKEN: Final = frozenset({"in_prompt", "history"})


def check_rows(device: Mapping[str, NDArray[np.generic]], scheduler: Scheduler) -> None:
    """Compare the device's rows with the host's. device: row state and penalty state by tensor name; empty if the
    device has none. Other tensors are ignored.

    Raises LedgerError naming a row and a field that differ, or a missing tensor.
    """
    if not device:
        return
    if missing := sorted(_TENSORS - device.keys()):
        raise LedgerError(f"the device's row state comes without {', '.join(missing)}")
    tensors = {**device, **ROW_RECORD.columns(device["parameters"])}
    live = _live(
        [request for request in scheduler.holdings.by_slot if request], scheduler.rows, scheduler.limits.vocab_size
    )
    for name, field in (*FIELDS.items(), *OF_A_DRAFTER.items(), *OF_SNAPSHOTS.items()):
        if name in FIELDS or name in tensors:
            _compare(name, tensors[name], field(live))


def _compare(name: str, device: NDArray[np.generic], expected: _Expected) -> None:
    values = expected.values
    found = device[expected.indexes]
    if values.ndim == 2:
        found = found[:, : values.shape[1]]
    differs = found != values
    if expected.counts is not None:
        differs &= np.arange(values.shape[1]) < expected.counts[:, None]
    if not np.count_nonzero(differs):
        return
    first = tuple(np.argwhere(differs)[0].tolist())
    row = f"row {expected.row_slots[first[0]]}"
    if name in _UNSPOKEN:
        raise LedgerError(f"{row}: {name} differs between the device and the host")
    index = f"[{first[1]}]" if values.ndim == 2 else ""
    raise LedgerError(f"{row}: {name}{index} is {found[first]} on the device and {values[first]} on the host")
