"""S looks at the stop ids that its rows have, end-of-sequence ids among them, and at no others: where no row has any,
checking them costs nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.device import Form  # noqa: E402
from runahead.cuda_graphs.rings import STOPPED, VOID  # noqa: E402
from runahead.runtime.kernels.reference.sampling import Sampled  # noqa: E402
from runahead.runtime.kernels.triton.row_updates.rows import DeviceRows  # noqa: E402
from runahead.runtime.kernels.triton.sampling.sampler import make_sampler_buffers, sample_rows_cuda  # noqa: E402
from runahead.runtime.row_record import ROW_TENSORS  # noqa: E402
from runahead.runtime.wire.parameters import MAX_STOP_IDS  # noqa: E402
from tests.runtime.kernels.counted_reads import elements_read  # noqa: E402
from tests.runtime.kernels.sampling_oracle import RowSpec  # noqa: E402
from tests.runtime.kernels.test_triton_runs import (  # noqa: E402
    MOST,
    ROWS,
    VOCAB,
    GuessingRows,
    device_rings,
    device_rows,
    fill,
)

TOKEN = 7  # is what every row says
STOPS: list[tuple[int, ...]] = [(), (TOKEN,), (1, 2, TOKEN), tuple(range(MAX_STOP_IDS)), (3,), ()]
NOBODYS: list[tuple[int, ...]] = [()] * ROWS
interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="reads are counted in the interpreter")


def rows_that_stop(stop_ids: list[tuple[int, ...]], min_position: int = 0) -> tuple[GuessingRows, DeviceRows]:
    """Rows with these stop ids on the host and on the device. Behind those of a row lies, in the device's memory, what
    it says."""
    random = np.random.default_rng(1)
    host = GuessingRows(random, VOCAB, 4)
    specs = [RowSpec(temperature=0.0, position=20, stop_ids=ids, min_position=min_position) for ids in stop_ids]
    fill(host, specs, random)
    host.rows, host.samples = np.arange(ROWS), np.ones(ROWS, np.bool_)
    host.max_position[:ROWS] = 60
    device = device_rows(host, 4)
    device.state.stop_ids[torch.from_numpy(np.arange(MAX_STOP_IDS) >= host.stop_count[:, None]).to(DEVICE)] = TOKEN
    return host, device


def their_places(stop_ids: list[tuple[int, ...]]) -> set[int]:
    return {slot * MAX_STOP_IDS + place for slot, ids in enumerate(stop_ids) for place in range(len(ids))}


def advance(host: GuessingRows, device: DeviceRows) -> None:
    tokens = np.full(ROWS, TOKEN, np.int32)
    host.begin()
    host.advance(np.arange(ROWS), host.rows, tokens, np.ones(ROWS, np.bool_))
    found = torch.from_numpy(tokens).to(DEVICE)
    device.advance(ROWS, Sampled(found, torch.ones(ROWS, dtype=torch.bool, device=DEVICE)))


def advance_verified(host: GuessingRows, device: DeviceRows) -> None:
    """Runs of four tokens, each the draft in its place."""
    assert device.drafts is not None
    tokens = np.full((ROWS, 4), TOKEN, np.int32)
    host.drafted[:ROWS], host.proposed[:ROWS, :3] = 3, TOKEN
    device.drafts.drafted.copy_(torch.from_numpy(host.drafted))
    device.drafts.proposed.copy_(torch.from_numpy(host.proposed))
    host.begin()
    host.begin_verified(np.arange(ROWS), host.rows, 3)
    host.advance_verified(np.arange(ROWS), host.rows, tokens, np.ones(tokens.shape, np.bool_))
    found = torch.from_numpy(tokens.reshape(-1)).to(DEVICE)
    device.advance(ROWS, Sampled(found, torch.ones(ROWS * 4, dtype=torch.bool, device=DEVICE)), 3)


WAYS = pytest.mark.parametrize("way", [advance, advance_verified], ids=["tokens", "runs"])


@WAYS
def test_what_lies_behind_a_rows_stop_ids_ends_no_row(way) -> None:  # type: ignore[no-untyped-def]
    host, device = rows_that_stop(STOPS)
    way(host, device)
    ring = host.rings.slot(host.number)
    width = 1 + (3 if way is advance_verified else 0)
    cells = host.rings.cells[ring, :ROWS, :width]
    assert device_rings(device)["cells"][ring, :ROWS, :width].tolist() == cells.tolist()
    assert ((cells[:, 0] & STOPPED) != 0).tolist() == [TOKEN in ids for ids in STOPS]
    goes_on = [width if TOKEN not in ids else 1 for ids in STOPS]
    assert ((cells & VOID) == 0).sum(axis=1).tolist() == goes_on
    read = device.read()
    for name in set(ROW_TENSORS) - {"stop_ids"}:
        assert np.array_equal(read[name], getattr(host, name)), name


@interpreted
@WAYS
def test_no_stop_id_is_read_where_no_row_has_one(way) -> None:  # type: ignore[no-untyped-def]
    host, device = rows_that_stop(NOBODYS)
    with elements_read(device.state.stop_ids) as read, elements_read(device.state.seq_len) as others:
        way(host, device)
    assert read == set() and others >= set(range(ROWS))


@interpreted
@WAYS
def test_beside_others_a_rows_own_stop_ids_are_read_alone(way) -> None:  # type: ignore[no-untyped-def]
    host, device = rows_that_stop(STOPS)
    with elements_read(device.state.stop_ids) as read:
        way(host, device)
    assert read == their_places(STOPS)


@interpreted
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@pytest.mark.parametrize("stop_ids", [STOPS, NOBODYS], ids=["some", "none"])
def test_below_their_least_number_of_tokens_rows_have_their_own_stop_ids_masked(
    stop_ids: list[tuple[int, ...]],
) -> None:
    """And nothing else: what lies behind them may be said."""
    _, device = rows_that_stop(stop_ids, min_position=30)
    logits = torch.zeros((ROWS, VOCAB), device=DEVICE)
    logits[:, TOKEN], logits[:, 40] = 9.0, 5.0
    buffers = make_sampler_buffers(ROWS * (1 + MOST), VOCAB, 1, DEVICE)
    with elements_read(device.state.stop_ids) as read:
        slots = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
        found = sample_rows_cuda(logits, device.state, device.penalties, slots, Form.FULL, buffers)
    assert found.tokens[:ROWS].tolist() == [40 if TOKEN in ids else TOKEN for ids in stop_ids]
    assert read == their_places(stop_ids)
