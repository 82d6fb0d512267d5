"""Scores and tokens of each rank's part of a vocabulary, drawn by a seed, and the best of each part."""

from __future__ import annotations

import torch


def bests(step: int, rank: int, ranks: int, rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Scores of 3 tiles of each row, with ties and -inf, and their tokens; and the same with the peers' best."""
    drawn = torch.Generator().manual_seed(step)
    scores = torch.randint(-2, 2, (ranks, rows, 3), generator=drawn).float()
    scores[scores == -2] = float("-inf")
    tokens = torch.randint(0, 1 << 17, (ranks, rows, 3), generator=drawn).int()
    highest = scores.amax(2)
    chosen = tokens.where(scores == highest[:, :, None], 1 << 30).amin(2)
    peers = [peer for peer in range(ranks) if peer != rank]
    empty = torch.zeros(rows, ranks - 1)
    own = [torch.cat((scores[rank], empty), 1), torch.cat((tokens[rank], empty.int()), 1)]
    return own, [torch.cat((scores[rank], highest[peers].T), 1), torch.cat((tokens[rank], chosen[peers].T), 1)]
