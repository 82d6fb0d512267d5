"""Compares the device's row state with the host's truth, while nothing is in flight."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from runtime.ledger import LedgerError
from runtime.scheduler import Scheduler


def check_rows(device: Mapping[str, NDArray[np.generic]], scheduler: Scheduler) -> None:
    """Raises LedgerError naming the first row and field that differ. `device` is empty if it keeps no row state."""
    if not device:
        return
    rows = scheduler.rows
    for slot, request in enumerate(scheduler.holdings.by_slot):
        if request is None:
            continue
        prefill = rows.least_len[slot] < rows.known_len[slot]
        count, stops = len(request.blocks), rows.stop_ids.shape[1]
        expected: dict[str, object] = {
            "alive": True,
            "seq_len": int(rows.least_len[slot] if prefill else rows.committed_len[slot]),
            "block_table": request.blocks,
            "min_position": int(rows.min_position[slot]),
            "max_position": int(rows.max_len[slot]) - 1,
            "stop_ids": rows.stop_ids[slot].tolist(),
        }
        found: dict[str, object] = {
            "alive": bool(device["alive"][slot]),
            "seq_len": int(device["seq_len"][slot]),
            "block_table": device["block_table"][slot][:count].tolist(),
            "min_position": int(device["min_position"][slot]),
            "max_position": int(device["max_position"][slot]),
            "stop_ids": device["stop_ids"][slot][:stops].tolist(),
        }
        if "penalty_slot" in device:
            expected["penalty_slot"] = request.penalty_slot
            found["penalty_slot"] = int(device["penalty_slot"][slot])
        if rows.committed_len[slot] > rows.known_len[slot]:
            expected["last_token"] = int(rows.history[slot, rows.committed_len[slot] - 1])
            found["last_token"] = int(device["last_token"][slot])
        for name, value in expected.items():
            if found[name] != value:
                raise LedgerError(f"row {slot}: {name} is {found[name]} on the device and {value} on the host")
