"""Log-probabilities of prompts on the CPU: tile by tile, since the logits of a whole chunk would take much memory."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.reference.logprobs import log_probabilities
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.programs.host_queries import Queries
from runahead.runtime.programs.host_rows import HostRows

_TILE: Final = 32  # query tokens whose logits are computed at a time


def leave_prompt_logprobs(
    model: Decoder, rows: HostRows, hidden: torch.Tensor, queries: Queries, finite: NDArray[np.bool_]
) -> None:
    """Those that this launch's query tokens leave, into its result slot. hidden: [T, hidden].

    finite: [T], becomes False for a query token whose logits are not finite: it leaves zeros, and its row has failed.
    """
    wanted = rows.prompt_queries(queries)
    for first in range(0, wanted.index.size, _TILE):
        tile = slice(first, first + _TILE)
        index = wanted.index[tile]
        logits = model.logits(hidden[torch.from_numpy(index)]).numpy()
        good = np.isfinite(logits).all(axis=1)
        finite[index[~good]] = False
        asked = np.where(good, wanted.asked[tile], np.int32(-1))
        found = log_probabilities(logits, wanted.target[tile], asked, rows.rings.layout.max_top)
        rows.write_prompt_logprobs(wanted.entry[tile], found.chosen, found.top_ids, found.top)
