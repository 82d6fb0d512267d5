"""Bits a byte of a text under a model, beside `xz -9` on the same text."""

from __future__ import annotations

import lzma
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.cpu_check.self_test import Trial
from runahead.runtime.models.load import load_model

CONTEXT = 2048
STRIDE = CONTEXT // 2  # every token but a file's first 1,024 is predicted from at least this many before it
CHUNK = 128
BLOCK_SIZE = 16
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Compressed:
    """What a set of texts costs, in bits a UTF-8 byte."""

    text_bytes: int
    model: float
    xz_each: float  # every text compressed alone
    xz_together: float  # all texts as one


class Scorer:
    """Bits that a checkpoint needs for a text, on the CPU in float32, through the service's own decoder."""

    def __init__(self, folder: Path, kv_dtype: str = "auto") -> None:
        checkpoint, cpu = open_checkpoint(folder), torch.device("cpu")
        self._decoder = load_model(checkpoint, cpu, torch.float32, "auto", ReferenceKernels(), kv_dtype=kv_dtype)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._end = end_token(self._tokenizer)

    def bits(self, pieces: Sequence[str]) -> float:
        """Bits of the pieces in order, an end token after each. The end tokens are paid for."""
        ids = [self._end]
        for encoding in self._tokenizer.encode_batch(list(pieces)):
            ids += [*encoding.ids, self._end]
        nats, scored = 0.0, 0
        while scored < len(ids) - 1:
            start = max(0, scored - STRIDE)
            window = ids[start : start + CONTEXT + 1]
            nats += self._nats(window, scored - start)
            scored = start + len(window) - 1
        return nats / math.log(2)

    @torch.inference_mode()
    def _nats(self, window: list[int], known: int) -> float:
        """Nats of window[known + 1:], each token given all before it. The last token is only predicted."""
        trial = Trial(self._decoder, [window[:-1]], len(window), BLOCK_SIZE, seed=0)
        nats = 0.0
        for start in range(0, len(window) - 1, CHUNK):
            count = min(CHUNK, len(window) - 1 - start)
            logits = trial.advance([(0, count)])[0]
            skip = max(0, known - start)
            if skip < count:
                targets = torch.tensor(window[start + skip + 1 : start + count + 1])
                nats += float(F.cross_entropy(logits[skip:], targets, reduction="sum"))
        return nats


def compress(folder: Path, texts: Sequence[Sequence[str]]) -> Compressed:
    """Compress texts with the model and with `xz`. texts: the pieces of each; `xz` gets them without end marks."""
    raw = ["".join(pieces).encode() for pieces in texts]
    total = sum(map(len, raw))
    each = sum(len(lzma.compress(text, preset=9)) for text in raw)
    together = len(lzma.compress(b"".join(raw), preset=9))
    return Compressed(total, _bits(folder, texts) / total, 8 * each / total, 8 * together / total)


def _bits(folder: Path, texts: Sequence[Sequence[str]]) -> float:
    """Return the bits of all texts. Each core has a part of them, with a separate decoder (a decoder serves one thread)
    and one torch thread, since a forward of 128 tokens is too small to be split."""
    shares: list[list[Sequence[str]]] = [[] for _ in range(os.cpu_count() or 1)]
    for pieces in sorted(texts, key=_size, reverse=True):
        min(shares, key=lambda share: sum(map(_size, share))).append(pieces)

    def bits_of(share: list[Sequence[str]]) -> float:
        scorer = Scorer(folder)
        return sum(map(scorer.bits, share))

    with ThreadPoolExecutor(len(shares), initializer=torch.set_num_threads, initargs=(1,)) as threads:
        return sum(threads.map(bits_of, shares))


def _size(pieces: Sequence[str]) -> int:
    return sum(map(len, pieces))


def end_token(tokenizer: Tokenizer) -> int:
    """The id of the end token. Raises ValueError for a tokenizer without it."""
    token: int | None = tokenizer.token_to_id(END_OF_TEXT)
    if token is None:
        raise ValueError(f"the tokenizer has no token {END_OF_TEXT}; it is not one that this corpus was made for")
    return token
