"""Commits a launch's tokens to the host's state, row by row, and finds the requests that they end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import SampledTokens, read_cells
from runahead.runtime.scheduler.drafts import DraftPolicy
from runahead.runtime.scheduler.holdings import Holdings
from runahead.runtime.scheduler.ledger import Launch, LedgerError
from runahead.runtime.scheduler.outcomes import NOT_A_TOKEN, Commit, Ending
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.request import Tally
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.scheduler.steady_decode import KeptRows
from runahead.runtime.wire.parameters import FinishReason


class Commits:
    """Commits launches, in order."""

    def __init__(self, limits: SchedulerLimits, holdings: Holdings, tally: Tally, drafts: DraftPolicy) -> None:
        self._limits = limits
        self._holdings = holdings
        self._rows = holdings.rows
        self._tally = tally
        self._drafts = drafts
        self._kept: KeptRows | None = None  # what the next commits may have in common with the newest one

    def commit(self, launch: Launch, cells: NDArray[np.int64], drafted: NDArray[np.int8] | None = None) -> Commit:
        """Commit a launch's result cells, [sample_rows, 1 + K]. Returns the kept tokens and the requests that ended.

        K: drafts of the F before. drafted: verified drafts of each row, [sample_rows]; None where K is 0.

        Raises LedgerError if host and device disagree on which rows ended, or if the device holds a row without a
        grammar, and CellError (see `read_cells`).
        """
        commit = self._kept.commit(launch, cells) if self._kept is not None else None
        if commit is None:
            commit = self._commit_rows(launch, cells, drafted)
            # The same array object: the plan continued the previous one.
            goes_on = launch.row_slots is launch.sample_slots and commit.slots.size == launch.sample_slots.size
            self._kept = self._drafts.kept(launch, commit) if goes_on and not commit.endings else None
        self._settle_crossed(launch)
        self._tally.counters["generated_tokens"] += commit.tokens.size
        return commit

    def _commit_rows(self, launch: Launch, cells: NDArray[np.int64], drafted: NDArray[np.int8] | None) -> Commit:
        """Commit every row's tokens and end the rows that they end."""
        rows = self._rows
        sampled = launch.sample_slots.astype(np.intp)  # the type that NumPy indexes with without a conversion
        kept = (launch.samples & rows.still(sampled, launch.sample_epochs)).nonzero()[0]
        if kept.size < launch.samples.size:
            self._tally.counters["void_rows"] += int(np.count_nonzero(launch.samples)) - kept.size
        found = read_cells(cells[kept], launch.number)
        row_slots = sampled[kept]
        slots, tokens = row_slots[found.row], found.token
        positions = rows.committed_len[slots] + found.offset
        stops = rows.stop_ids[slots, : rows.stop_width] == tokens[:, None]
        if np.count_nonzero(stops):
            # A stop id is masked below the minimum; S draws it there only if a grammar allows nothing else.
            stops = stops.any(1) & ((positions >= rows.min_position[slots]) | rows.may_hold[slots])
        else:
            stops = np.zeros(tokens.size, np.bool_)
        ended = stops | (positions + 1 >= rows.max_len[slots]) | found.failed
        if np.count_nonzero(differs := ended != found.stopped):
            told = _disagreement(found, differs, rows, slots, positions)
            raise LedgerError(f"launch {launch.number}: host and device disagree on which rows ended: {told}")
        if np.count_nonzero(rows.may_hold[row_slots[found.held]]) < found.held.size:
            raise LedgerError(f"launch {launch.number}: the device holds a row that waits for nothing")
        self._tally.counters["held_rows"] += found.held.size
        self._drafts.tighten(launch, row_slots, found, None if drafted is None else drafted[kept])
        ends = ended.nonzero()[0]
        if ends.size:
            rows.end_states(slots[ends], (positions - found.offset)[ends])
        verdicts = [
            (int(slots[i]), int(tokens[i]), bool(stops[i]), bool(found.failed[i]), bool(found.nothing_left[i]))
            for i in ends.tolist()
        ]
        kept = kept[found.row] * self._drafts.cells + found.offset
        if np.count_nonzero(found.failed):
            good = ~found.failed
            kept, slots, tokens, positions = kept[good], slots[good], tokens[good], positions[good]
        rows.commit(slots, positions, tokens)
        owners, handles = rows.owner[slots], rows.handle[slots]
        endings = tuple(self._ending(*verdict) for verdict in verdicts)
        firsts = positions == rows.prompt_len[slots]
        return Commit(launch.number, kept, slots.astype(np.int32), tokens, owners, handles, firsts, endings)

    def _settle_crossed(self, launch: Launch) -> None:
        """Count reserved blocks: continuing rows have adopted theirs, and the fence returns the others."""
        if launch.crossed_slots.size:
            adopted = int(np.count_nonzero(self._rows.still(launch.crossed_slots, launch.crossed_epochs)))
            self._tally.counters["blocks_adopted"] += adopted
            self._tally.counters["blocks_returned"] += launch.crossed_slots.size - adopted

    def _ending(self, slot: int, token: int, stopped: bool, failed: bool, nothing_left: bool) -> Ending:
        """End the row and return its request's ending."""
        request, rows = self._holdings.request(slot), self._rows
        reason = FinishReason.CONTEXT_LENGTH if request.context_limited else FinishReason.LENGTH
        if nothing_left:
            reason = FinishReason.NOTHING_LEFT
        elif failed:
            reason = FinishReason.NON_FINITE
            self._holdings.forget_written(request)
        elif stopped:
            is_eos = token in self._limits.eos_token_ids and not request.stopping.ignore_eos
            reason = FinishReason.END_OF_SEQUENCE if is_eos else FinishReason.STOP
        rows.forget_last_token(slot)
        self._holdings.end_row(request)
        self._tally.finished[reason.name] += 1
        self._tally.event("finished")
        return Ending(request, reason, token if stopped and not failed else NOT_A_TOKEN)


def _disagreement(
    found: SampledTokens, differs: NDArray[np.bool_], rows: Rows, slots: NDArray[np.intp], positions: NDArray[np.int32]
) -> str:
    """Return a description of each token at which only one side ended its row, for the error message. differs, slots,
    positions: [n], as `found`."""
    told = []
    for i in differs.nonzero()[0]:
        slot, stops = slots[i], rows.stop_ids[slots[i]]
        told.append(
            f"row slot {slot}, epoch {rows.epoch[slot]}, with token {found.token[i]} at position {positions[i]}, of at "
            f"most {rows.max_len[slot]} tokens and with stop ids {stops[stops >= 0].tolist()} from position "
            f"{rows.min_position[slot]} on: the device {'ended it' if found.stopped[i] else 'did not end it'}"
            + ", without its token"
            * bool(found.failed[i])
        )
    return "; ".join(told)
