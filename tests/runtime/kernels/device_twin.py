"""Row state on the device beside the reference, `HostRows`: fed the same, it must hold the same."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import FAULT_NONE, STATUS_BYTES, STATUS_FAULT, RingLayout, RingMemory, allocate_rings
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.reference.sampling import Sampled
from runahead.runtime.kernels.triton.row_state.drafts import DraftState, make_draft_state
from runahead.runtime.kernels.triton.row_state.grammar_masks import make_mask_state
from runahead.runtime.kernels.triton.row_updates.prompt_logprobs import find_targets, make_prompt_buffers
from runahead.runtime.kernels.triton.row_updates.rows import DeviceRows
from runahead.runtime.plan import read_plan
from runahead.runtime.programs.cpu.inputs import NOWHERE, Queries, StateSlots, state_slots_of
from runahead.runtime.programs.cpu.rows import HostRows
from runahead.runtime.row_record import PENALTY_TENSORS, ROW_TENSORS


def mapped_rings(layout: RingLayout, device: torch.device) -> RingMemory:
    """Rings that kernels on `device` reach."""

    def allocate(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[np.generic]:
        tensor = torch.from_numpy(np.zeros(shape, dtype))
        return (tensor.pin_memory() if device.type == "cuda" else tensor).numpy()

    return allocate_rings(layout, allocate)


class DeviceTwin:
    """S and apply by the kernels, after the same of `host` by the reference. Everything is compared after each.

    It has rings of its own, of the layout of the host's. max_tokens: query tokens of a launch, at most. keeps_states:
    the rows have recurrent states. replays: the kernels count what each state stands for, as where rows have drafts.
    """

    def __init__(
        self, host: HostRows, device: torch.device, *, max_tokens: int, context_length: int, launched: int = 0,
        keeps_states: bool = False, replays: bool = False,
    ) -> None:  # fmt: skip
        self.host = host
        self._max_rows = host.alive.size - 1
        self.rings = mapped_rings(host.rings.layout, device)
        self.device = DeviceRows(
            self.rings,
            max_rows=self._max_rows,
            max_tokens=max_tokens,
            block_size=host.block_size,
            context_length=context_length,
            vocab_size=host.vocab_size,
            device=device,
            penalty_slots=len(host.counts) - 1,
            drafts=self._drafts(context_length, device),
            masks=None if host.masks is None else make_mask_state(host.masks, device),
            keeps_states=keeps_states,
            snapshot_tokens=host.snapshot_tokens,
        )
        self.device.row_states = self.device.row_states._replace(replays=replays)
        self._keeps_states = keeps_states
        self.seen = Counter[str]()  # of places of states
        self.device.reset(launched)
        self._prompt = make_prompt_buffers(max_tokens, host.vocab_size, host.rings.layout.max_top, device)

    def _drafts(self, context_length: int, device: torch.device) -> DraftState | None:
        """Where the reference's drafter knows the tokens of rows, the kernels do too. Where there are masks behind
        drafts, launches verify some."""
        host, masks = self.host, self.host.masks
        most = masks.drafts if masks is not None else int(host.drafter is not None)
        if not most:
            return None
        slots, blocks = host.alive.size, host.max_blocks
        known = context_length if host.drafter is not None else 0
        return make_draft_state(
            slots, known, blocks, self._max_rows, most, device, kept_slots=0 if masks is None else slots
        )

    # ------------------------------------------------------------ S

    def judge(self, drafts: int = 0, *, padding: int = 0) -> None:
        """Whose masks are there, of the rows that the reference has judged already. drafts: of a row, at most."""
        self.device.judge(min(self.host.rows.size + padding, self._max_rows), drafts)
        self._synchronize()
        assert self.device.masks is not None
        slots = self.host.rows[self.host.samples]
        assert self.device.masks.held.cpu().numpy()[slots].tolist() == self.host.held[slots].tolist(), "who is held"
        if self.device.drafts is not None:
            compare_drafts(self.host, self.device, slots)

    def advance_verified(
        self, tokens: NDArray[np.int32], finite: NDArray[np.bool_], nothing_left: NDArray[np.bool_] | None, *,
        padding: int = 0,
    ) -> NDArray[np.int64]:  # fmt: skip
        """Runs of the rows of the list, [rows, 1 + K], by which the reference has advanced them already; what it did
        not sample may be anything. Returns the cells. nothing_left: of these, after `judge`."""
        places, width = np.flatnonzero(self.host.samples), tokens.shape[1]
        count = min(self.host.rows.size + padding, self._max_rows)

        def padded(found: NDArray[np.generic]) -> torch.Tensor:
            more = np.zeros((count - found.shape[0], width), found.dtype)
            return torch.from_numpy(np.concatenate([found, more]).reshape(-1)).to(self.device.counter.device)

        empty = None if nothing_left is None else padded(nothing_left)
        sampled = Sampled(padded(tokens.astype(np.int64)), padded(finite), nothing_left=empty)
        self.device.advance(count, sampled, width - 1)
        self._synchronize()
        ring = self.host.rings.slot(self.host.number)
        expected: NDArray[np.int64] = self.host.rings.cells[ring, places, :width]
        assert self.rings.cells[ring, places, :width].tolist() == expected.tolist(), "the cells"
        looked_at = self.host.rings.drafted[ring, places]
        assert self.rings.drafted[ring, places].tolist() == looked_at.tolist(), "how many drafts were looked at"
        self._compare_state()
        return expected

    def advance(
        self, places: NDArray[np.intp], tokens: NDArray[np.int32], finite: NDArray[np.bool_], *, padding: int = 0,
        nothing_left: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.int64]:  # fmt: skip
        """`tokens` [n] of the rows at these places of the list, which the reference has advanced by them already.
        Returns the cells. padding: places beyond the list that a captured bucket looks at, if it is as large.
        nothing_left: [n], after `judge`."""
        count = min(self.host.rows.size + padding, self._max_rows)
        padded, all_finite = np.full(count, 7, np.int64), np.zeros(count, np.bool_)
        padded[places], all_finite[places] = tokens, finite
        where = self.device.counter.device
        empty = None
        if nothing_left is not None:
            empty = torch.zeros(count, dtype=torch.bool)
            empty[places] = torch.from_numpy(nothing_left)
            empty = empty.to(where)
        found = Sampled(torch.from_numpy(padded).to(where), torch.from_numpy(all_finite).to(where), nothing_left=empty)
        self.device.advance(count, found)
        self._synchronize()
        ring = self.host.rings.slot(self.host.number)
        places = np.flatnonzero(self.host.samples)  # those that are held, too
        expected: NDArray[np.int64] = self.host.rings.cells[ring, places, 0]
        assert self.rings.cells[ring, places, 0].tolist() == expected.tolist(), "the cells"
        self._compare_state()
        return expected

    # ------------------------------------------------------------ apply

    def apply(self, read: int, *, padding: int = 0, unowned: int = 0) -> int:
        """The plan that the reference has just taken from its staging slot, which was `read` bytes long. Returns how
        many query tokens leave prompt log-probabilities. padding, unowned: rows and query tokens beyond the list, of a
        captured bucket; a launch of decode rows alone has as many query tokens as rows."""
        host = self.host
        if self.device.row_states.replays:
            assert self.device.row_states.lengths.tolist() == host.state_len.tolist(), "what the states stand for"
        ring = host.rings.slot(host.number)
        for mine, theirs in ((self.rings.plan, host.rings.plan), (self.rings.bulk, host.rings.bulk)):
            mine[ring] = theirs[ring]
        plan = read_plan(host.rings.plan[ring])
        rows, tokens = plan.num_rows, plan.tokens
        padding = min(padding, self._max_rows - rows) if rows else 0
        if plan.drafts:
            self._spoil_runs()
            self.device.apply(rows + padding, (rows + padding) * (1 + plan.drafts), True, plan.drafts)
            self._compare_applied(read)
            compare_lines(host, self.device, plan.drafts, padding)
            return 0
        queries, is_decode = self.device.queries, tokens == rows
        unowned = padding if is_decode else min(unowned, queries.token_ids.numel() - tokens)
        made = rows + padding, tokens + unowned, is_decode
        for left in (queries.token_ids, queries.positions, queries.slot_mapping, queries.seq_lens, queries.last_query):
            left.fill_(1 << 20)  # of an earlier launch
        self.device.apply(*made)
        self._compare_applied(read)
        if not rows:
            return 0
        expected = HostRows.queries(host)
        self._compare_queries(expected, *made)
        if self._keeps_states:
            self._compare_places(expected, *made)
        return self._compare_prompts(expected)

    def forget(self, *, slot: int = -1, penalty_slot: int = -1) -> None:
        """Somebody has changed a row slot or a penalty slot of the reference by hand: the device's is made the same."""
        for names, place in ((ROW_TENSORS, slot), (PENALTY_TENSORS, penalty_slot)):
            for name in names if place >= 0 else ():
                held = self.device.state if names == ROW_TENSORS else self.device.penalties
                getattr(held, name)[place] = torch.from_numpy(np.array(getattr(self.host, name)[place]))

    def _spoil_runs(self) -> None:
        """What an earlier launch has left of its lines."""
        drafts = self.device.drafts
        assert drafts is not None, "a launch with drafts"
        for left in (drafts.token_ids, drafts.positions, drafts.slot_mapping, drafts.token_lens, drafts.seq_lens):
            left.fill_(1 << 20)
        for left in (drafts.verify_slots, drafts.verify_logits, drafts.logits_slots):
            left.fill_(1 << 20)

    # ------------------------------------------------------------ what is compared

    def _compare_applied(self, read: int) -> None:
        """The plan of `read` bytes, which was applied."""
        self._synchronize()
        ring = self.host.rings.slot(self.host.number)
        assert self.rings.status[ring, STATUS_FAULT] == FAULT_NONE
        assert self.rings.status[ring, STATUS_BYTES] == read
        assert int(self.device.counter) == self.host.number
        self._compare_state()

    def _compare_state(self) -> None:
        read = dict(self.device.read())
        known = {} if self.host.drafter is None else self.host.drafter.memory()
        if "history" in known:
            history, told = read.pop("history"), known["history"]
            for slot in np.flatnonzero(self.host.alive).tolist():
                here = slice(int(self.host.seq_len[slot]))
                assert history[slot, here].tolist() == told[slot, here].tolist(), f"what is known of row {slot}"
        read.pop("history", None)  # of a drafter that keeps none here
        for name, found in read.items():
            held = self.host.block_table[:, self.host.max_blocks :] if name == "snapshots" else getattr(self.host, name)
            expected = np.asarray(held)
            if not np.array_equal(found, expected):
                lines = np.unique(np.argwhere(found != expected)[:, 0]).tolist()
                raise AssertionError(f"launch {self.host.number}: {name} of {lines}: {found[lines]}, {expected[lines]}")

    def _compare_queries(self, expected: Queries, num_rows: int, num_tokens: int, is_decode: bool) -> None:
        rows, tokens = expected.slots.size, expected.token_ids.size
        batch = self.device.batch(num_rows, num_tokens, is_decode)
        assert not batch.seq_lens[rows:].any(), "padding is masked"
        assert (batch.slot_mapping[tokens:] < self.host.block_size).all(), "padding writes to the null block"
        if not is_decode:
            assert (batch.query_start_loc[rows:] == tokens).all(), "padding rows have no query tokens"
            assert not batch.token_ids[tokens:].any() and not batch.positions[tokens:].any(), "of an earlier launch"
            assert int(self.device.queries.last_query[:num_rows].min()) >= 0
            assert int(self.device.queries.last_query[:num_rows].max()) < tokens
        batch = self.device.batch(rows, tokens, is_decode)
        for name in ("token_ids", "seq_lens", "query_start_loc"):
            assert getattr(batch, name).tolist() == getattr(expected, name).tolist(), name
        alive = np.repeat(expected.seq_lens > 0, np.diff(expected.query_start_loc))
        mapping = batch.slot_mapping.cpu().numpy()
        assert batch.positions.cpu().numpy()[alive].tolist() == expected.positions[alive].tolist(), "positions"
        assert mapping[alive].tolist() == expected.slot_mapping[alive].tolist(), "slot_mapping"
        assert bool((mapping[~alive] < self.host.block_size).all()), "masked tokens go to the null block"
        tables = batch.block_tables.cpu().numpy()
        for row, length in enumerate(expected.seq_lens.tolist()):
            used = -(-length // self.host.block_size)
            assert tables[row, :used].tolist() == self.host.block_table[expected.slots[row], :used].tolist(), "tables"
        last = self.device.queries.last_query[:rows].cpu().numpy()
        held = self.host.held[expected.slots] & self.host.alive[expected.slots]
        sampled = self.host.samples & ~held
        assert last[sampled].tolist() == expected.sample_queries.tolist(), "last_query"
        left = np.where(sampled, expected.slots, self._max_rows)
        assert self.device.logit_slots[:rows].tolist() == left.tolist(), "where logits are left"
        assert bool((self.device.logit_slots[rows:num_rows] == self._max_rows).all()), "padding leaves none"

    def _compare_places(self, queries: Queries, num_rows: int, num_tokens: int, is_decode: bool) -> None:
        """Which states live rows go on with, and where they leave them."""
        expected, live = state_slots_of(self.host, queries), queries.seq_lens > 0
        batch = self.device.batch(num_rows, num_tokens, is_decode)
        self._compare_places_of(batch, expected, live)

    def _compare_places_of(self, batch: ForwardBatch, expected: StateSlots, live: NDArray[np.bool_]) -> None:
        """live: rows of F that are not masked, [B]. Of others nothing is read."""
        pairs = {"state_slots": expected.slots}
        if self.host.snapshot_tokens:
            pairs |= {"states_read_from": expected.read_from, "states_copied_to": expected.copied_to}
        if self.device.row_states.replays:
            pairs["replayed"] = expected.replayed
        for name, column in pairs.items():
            assert getattr(batch, name).cpu().numpy()[: live.size][live].tolist() == column[live].tolist(), name
        copied = live & (expected.copied_to != NOWHERE)
        if batch.copied_after is not None:
            after = batch.copied_after.cpu().numpy()[: live.size]
            assert after[copied].tolist() == expected.copied_after[copied].tolist(), "copied_after"
        self.seen["state left in a snapshot"] += int(np.count_nonzero(copied))
        self.seen["state from a snapshot"] += int(np.count_nonzero(live & (expected.read_from != expected.slots)))

    def _compare_prompts(self, queries: Queries) -> int:
        wanted = self.host.prompt_queries(queries)
        if not self.host.chunks.size:
            assert not wanted.index.size
            return 0
        device, prompt, tokens = self.device, self._prompt, queries.token_ids.size
        find_targets(
            queries.slots.size, tokens, device.counter, device._bulk, device.rows, device.state, prompt, device.sizes
        )
        asked = prompt.asked[:tokens].cpu().numpy()
        assert np.flatnonzero(asked >= 0).tolist() == np.sort(wanted.index).tolist(), "who asked"
        assert asked[wanted.index].tolist() == wanted.asked.tolist(), "how many were asked for"
        assert prompt.wanted[:tokens].tolist() == (asked >= 0).tolist()
        assert prompt.target.cpu().numpy()[wanted.index].tolist() == wanted.target.tolist(), "targets"
        return int(wanted.index.size)

    def _synchronize(self) -> None:
        if self.device.counter.device.type == "cuda":
            torch.cuda.synchronize()


def compare_drafts(host: HostRows, device: DeviceRows, slots: NDArray[np.int64]) -> None:
    """What was drafted of these rows, [n]."""
    drafts = device.drafts
    assert drafts is not None
    expected, found = host.drafted[slots], drafts.drafted.cpu().numpy()[slots]
    assert found.tolist() == expected.tolist(), "how many drafts"
    there = np.arange(drafts.most) < expected[:, None]
    proposed = drafts.proposed.cpu().numpy()[slots]
    assert proposed[there].tolist() == host.proposed[slots][there].tolist(), "which drafts"
    has_some = slots[expected > 0]
    assert drafts.forced.cpu().numpy()[has_some].tolist() == host.forced[has_some].tolist(), "who says them"


def compare_lines(host: HostRows, device: DeviceRows, count: int, padding: int) -> None:
    """The lines of an F with `count` drafts of a row whose rows may be held, and where the next S finds the logits;
    after the reference has drafted, too. padding: rows of a captured bucket beyond the list."""
    drafts, listed = device.drafts, host.rows
    assert drafts is not None and drafts.holds
    compare_drafts(host, device, listed)
    expected, slots, rows = HostRows.queries(host), host.alive.size, listed.size + padding
    batch, counts = device.verify_batch(rows, count), np.diff(expected.query_start_loc)
    lines, starts = expected.token_ids.size, expected.query_start_loc.tolist()
    assert batch.query_start_loc.tolist() == starts + [starts[-1] + 1 + i for i in range(padding)]
    assert batch.seq_lens.tolist() == expected.seq_lens.tolist() + [0] * padding
    assert batch.token_ids[:lines].tolist() == expected.token_ids.tolist()
    computed = np.repeat(expected.seq_lens > 0, counts)
    for name in ("positions", "slot_mapping"):
        found, wanted = getattr(batch, name).cpu().numpy()[:lines], getattr(expected, name)
        assert found[computed].tolist() == wanted[computed].tolist(), name
    mapping, lens = batch.slot_mapping.cpu().numpy(), drafts.token_lens.cpu().numpy()[: batch.num_tokens]
    assert (mapping[:lines][~computed] < host.block_size).all() and (mapping[lines:] < host.block_size).all()
    assert lens[:lines][computed].tolist() == (expected.positions[computed] + 1).tolist()
    assert not lens[:lines][~computed].any() and not lens[lines:].any()
    tables = drafts.block_tables.cpu().numpy()
    row_of = np.repeat(np.arange(listed.size), counts)
    for line in np.flatnonzero(computed).tolist():
        used = -(-int(expected.positions[line] + 1) // host.block_size)
        table = tables[line]
        assert table[:used].tolist() == host.block_table[listed[row_of[line]], :used].tolist(), "tables"
    is_held = (host.held & host.alive)[listed]
    offset = np.arange(lines) - np.repeat(expected.query_start_loc[:-1], counts)
    behind = np.arange(1 + count) * drafts.kept_slots + slots - drafts.kept_slots  # those of a run's newest token
    behind[0] = 0
    places = np.where(is_held[row_of], slots - 1, behind[offset] + listed[row_of])
    assert drafts.logits_slots[:lines].tolist() == places.tolist(), "where logits are left"
    assert (drafts.logits_slots[lines : batch.num_tokens] == slots - 1).all(), "where nobody's are left"
    # The next S finds the run of a row that is held where an F before has left it.
    entries = np.arange(1 + count) <= np.minimum(host.drafted[listed], count)[:, None]
    verify_slots = np.full((drafts.rows, 1 + count), slots - 1)
    verify_logits = np.zeros((drafts.rows, 1 + count), np.int64)
    verify_slots[: listed.size] = np.where(entries, listed[:, None], slots - 1)
    verify_logits[: listed.size] = np.where(entries, behind + listed[:, None], 0)
    there = verify_slots != slots - 1
    assert drafts.verify_slots[: verify_slots.size].tolist() == verify_slots.reshape(-1).tolist(), "whose logits"
    found = drafts.verify_logits[: verify_logits.size].cpu().numpy()
    assert found[there.reshape(-1)].tolist() == verify_logits[there].tolist(), "where logits are"
