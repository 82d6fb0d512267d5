"""What launches take, from a file of measured times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

TABLE: Final = Path(__file__).with_name("costs.json")


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of one model on one device, and the sizes that its service runs with.

    source: where the times were measured. decode_ms: [rows, ms] of decode launches; other numbers of rows are
    interpolated, and more rows than the last go on along the last two points. prompt_ms: [ms, ms a query token] of
    launches with prompt chunks. overhead_ms: the part of a first token's time that is no launch. longest_prompt: up to
    which `prompt_ms` holds. kv_tokens: tokens that the KV cache holds. The others are the settings of the same name.
    """

    source: str
    decode_ms: list[tuple[int, float]]
    prompt_ms: tuple[float, float]
    overhead_ms: float
    longest_prompt: int
    kv_tokens: int
    max_rows: int
    prefill_chunk: int
    max_prefill_tokens: int
    mixed_prefill_tokens: int
    run_ahead: int
    block_size: int = 16

    def decode_table(self) -> list[float]:
        """Milliseconds of a decode launch by its rows, 0 to `max_rows`."""
        rows, times = zip(*self.decode_ms, strict=True)
        table = np.interp(np.arange(self.max_rows + 1), rows, times)
        if len(rows) > 1 and rows[-1] < self.max_rows:
            slope = (times[-1] - times[-2]) / (rows[-1] - rows[-2])
            table[rows[-1] :] = times[-1] + slope * np.arange(self.max_rows + 1 - rows[-1])
        found: list[float] = table.tolist()
        return found


def read(name: str, path: Path = TABLE) -> Costs:
    """The costs of that name. Raises ValueError if the file has none, or one that is malformed."""
    entries = json.loads(path.read_text(encoding="utf-8"))
    if name not in entries:
        raise ValueError(f"{path.name} has no costs {name}; it has {', '.join(entries)}")
    return msgspec.convert(entries[name], Costs)
