"""Log-probabilities of prompts on the CPU: tile by tile, since the logits of a whole chunk would take much memory."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.reference.logprobs import log_probabilities
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.programs.cpu.inputs import Queries
from runahead.runtime.programs.cpu.rows import HostRows

_TILE: Final = 32  # query tokens whose logits are computed at a time


def leave_prompt_logprobs(
    model: Decoder, rows: HostRows, hidden: torch.Tensor, queries: Queries, finite: NDArray[np.bool_], vocab: int
) -> None:
    """Those that this launch's query tokens leave, into its result slot. hidden: [T, hidden].

    finite: [T], becomes False for a query token whose logits are not finite: it leaves zeros, and its row has failed.
    vocab: ids below this may be sampled; a prompt token that is none of these has a log-probability of -inf.
    """
    wanted = rows.prompt_queries(queries)
    for first in range(0, wanted.index.size, _TILE):
        tile = slice(first, first + _TILE)
        index = wanted.index[tile]
        logits = model.logits(hidden[torch.from_numpy(index)]).numpy()[:, :vocab]
        if not model.ranks.share.is_first:
            continue  # the first rank has all of them
        good = np.isfinite(logits).all(axis=1)
        finite[index[~good]] = False
        asked = np.where(good, wanted.asked[tile], np.int32(-1))
        target = wanted.target[tile]
        found = log_probabilities(logits, np.minimum(target, vocab - 1), asked, rows.rings.layout.max_top)
        found.chosen[(target >= vocab) & good] = -np.inf
        rows.write_prompt_logprobs(wanted.entry[tile], found.chosen, found.top_ids, found.top)
