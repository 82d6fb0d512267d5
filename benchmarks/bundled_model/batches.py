"""Token batches for training: whole files as streams, and single definitions that start at position 0."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.bundled_model.tokenizer import end_token

STREAM_TOKENS = 2048
PIECE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Encoded:
    """A split as token ids. `files`: the definitions of each file in order, an end token before the first and after
    each. `pieces`: every definition and every method alone, an end token after it. `bytes`: UTF-8 bytes in `files`."""

    files: list[list[int]]
    pieces: list[list[int]]
    bytes: int


def encode(corpus: Path, split: str, tokenizer: Tokenizer, merge_dropout: float = 0.0) -> Encoded:
    """Encode a split of the file that `corpus` wrote. `merge_dropout` skips merges at random (BPE dropout)."""
    entries = json.loads(corpus.read_text())[split]
    end = end_token(tokenizer)
    tokenizer.model.dropout = merge_dropout or None

    def ids(texts: list[str]) -> list[list[int]]:
        return [[*encoding.ids, end] for encoding in tokenizer.encode_batch(texts)]

    definitions = [ids(entry["definitions"]) for entry in entries]
    methods = ids([text for entry in entries for text in entry["methods"]])
    tokenizer.model.dropout = None
    return Encoded(
        files=[[end, *(token for piece in pieces for token in piece)] for pieces in definitions],
        pieces=[piece for pieces in definitions for piece in pieces] + methods,
        bytes=sum(len(text.encode()) for entry in entries for text in entry["definitions"]),
    )


def stream_rows(files: list[list[int]], chance: random.Random) -> Iterator[list[int]]:
    """Endless rows of STREAM_TOKENS + 1 ids, files in random order, cut at a random offset each time round."""
    while True:
        order = chance.sample(files, len(files))
        stream = [token for file in order for token in file]
        start = chance.randrange(STREAM_TOKENS)
        for at in range(start, len(stream) - STREAM_TOKENS, STREAM_TOKENS):
            yield stream[at : at + STREAM_TOKENS + 1]


def piece_rows(pieces: list[list[int]], chance: random.Random) -> Iterator[list[int]]:
    """Endless rows of PIECE_TOKENS + 1 ids; each begins with the first token of a definition."""
    while True:
        row: list[int] = []
        for piece in chance.sample(pieces, len(pieces)):
            row.extend(piece)
            if len(row) > PIECE_TOKENS:
                yield row[: PIECE_TOKENS + 1]
                row = []


class Batches:
    """Endless batches of `tokens` positions, ids [rows, length + 1], on `device`; one in `1 / piece_share` of pieces.

    Every batch is drawn from one of `encodings`, different cuts of the same text into tokens.
    """

    def __init__(
        self, encodings: list[Encoded], tokens: int, piece_share: float, seed: int, device: torch.device
    ) -> None:
        self.chance = random.Random(seed)
        self.tokens, self.piece_share, self.device = tokens, piece_share, device
        self.streams = [stream_rows(encoded.files, self.chance) for encoded in encodings]
        self.pieces = [piece_rows(encoded.pieces, self.chance) for encoded in encodings]

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            single = self.chance.random() < self.piece_share
            rows = self.chance.choice(self.pieces if single else self.streams)
            count = self.tokens // (PIECE_TOKENS if single else STREAM_TOKENS)
            batch = torch.tensor([next(rows) for _ in range(count)])
            if self.device.type == "cuda":
                yield batch.pin_memory().to(self.device, non_blocking=True)
            else:
                yield batch
