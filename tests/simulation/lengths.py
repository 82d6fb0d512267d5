"""What the host holds of rows against what the device does, while nothing is in flight."""

from __future__ import annotations

from runahead.runtime.scheduler.rows import RowPhase
from tests.simulation.assembly import SimulatedChain


def check_lengths(chain: SimulatedChain) -> None:
    """Every token is committed, so that a row's bounds meet at its true length in the last F that held it, and the
    device names the state slot that the host does.

    A row that was not in the last plan has been sampled since: the newest of its tokens has been in no F.
    """
    scheduler, device = chain.engine.scheduler, chain.device.read_rows()
    rows = scheduler.rows
    for request in scheduler.holdings.by_slot:
        if request is None:
            continue
        slot = request.row_slot
        true, least, most = int(device["seq_len"][slot]), int(rows.least_len[slot]), int(rows.most_len[slot])
        assert int(device["state_slot"][slot]) == request.state_slot, f"row {slot} has another state slot"
        if rows.phase[slot] != RowPhase.PREFILL and rows.last_launch[slot] < chain.ledger.launched:
            true -= 1
        assert least == true == most, f"row {slot} had {true} tokens in its last F, the host says {least} to {most}"
