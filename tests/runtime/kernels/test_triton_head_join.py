"""What a draft head joins with the query tokens of runs, in rows and in lines that have block tables of their own: the
hidden state of the position before, of the same row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.device import Form  # noqa: E402
from runahead.runtime.kernels.layers import Fuse  # noqa: E402
from runahead.runtime.kernels.triton.drafting.head_inputs import Joining  # noqa: E402
from runahead.runtime.programs.cpu.rows import HostRows  # noqa: E402
from tests.runtime.kernels.test_triton_runs import (  # noqa: E402
    BLOCK_SIZE,
    GuessingRows,
    device_rows,
    fill,
    random_specs,
)

VOCAB, WIDTH, COUNT = 30, 16, 3


@pytest.mark.parametrize("seed", range(3))
def test_before_a_token_of_a_run_stands_what_its_own_row_has_left(seed: int) -> None:
    random, generator = np.random.default_rng(300 + seed), torch.Generator().manual_seed(seed)
    host = GuessingRows(random, VOCAB, 0)
    fill(host, random_specs(random, VOCAB, Form.PLAIN), random)
    host.most_drafts = host.most_guesses = COUNT
    host.draft()
    device, expected = device_rows(host, 5), HostRows.queries(host)
    assert device.drafts is not None
    device.drafts.proposed.copy_(torch.from_numpy(host.proposed))
    device.drafts.drafted.copy_(torch.from_numpy(host.drafted))
    rows = host.rows.size
    device.prepare_verified(rows, 1 + COUNT)
    batch = device.token_batch(rows, COUNT)
    places = int(host.block_table.max() + 1) * BLOCK_SIZE
    kept = torch.randn((places, WIDTH), generator=generator)
    hidden = torch.randn((batch.num_tokens, WIDTH), generator=generator)
    before = kept.clone()
    joining = Joining(Fuse(None), torch.zeros((VOCAB, WIDTH), device=DEVICE), kept.to(DEVICE), BLOCK_SIZE)
    found = joining.in_batch(batch, hidden.to(DEVICE))[:, WIDTH:].cpu()
    starts, seen = expected.query_start_loc.tolist(), 0
    for place, slot in enumerate(host.rows.tolist()):
        for line in range(starts[place], starts[place + 1] if expected.seq_lens[place] else starts[place]):
            last = int(expected.positions[line]) - 1
            if line > starts[place]:
                wanted = hidden[line - 1]
            elif last < 0:
                wanted = torch.zeros(WIDTH)
            else:
                wanted = before[int(host.block_table[slot, last // BLOCK_SIZE]) * BLOCK_SIZE + last % BLOCK_SIZE]
                seen += place > 0
            assert found[line].equal(wanted), (slot, line)
    assert seen > 0, "as if nobody but the first row had begun before"
