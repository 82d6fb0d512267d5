"""Buffers of a model's decode launches, allocated once and kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
import triton

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import AttentionShape
from runahead.runtime.kernels.triton.attention.schedule import AttentionPlan
from runahead.runtime.kernels.triton.attention.split_kv import PartBuffers, make_part_buffers
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import SplitScratch
from runahead.runtime.kernels.triton.gemm.tuning import SPLIT_WORDS, attention_plan

_MOST_TILES: Final = 1024  # of a product whose parts are spread over programs


@dataclass(slots=True)
class DecodeBuffers:
    """Buffers of one model's decode launches, allocated at first use and kept, because graphs hold their addresses. So
    a launch of every bucket runs before the first capture."""

    attentions: list[tuple[AttentionShape, int]] = field(default_factory=list)  # shapes and windows that there are
    _windows: dict[bool, torch.Tensor] = field(default_factory=dict)
    _parts: dict[tuple[AttentionShape, AttentionPlan, int, int], PartBuffers] = field(default_factory=dict)
    _rooms: dict[str, torch.Tensor] = field(default_factory=dict)  # in which they all lie, the largest launch's first
    _scratch: SplitScratch | None = None
    _arrived: torch.Tensor | None = None
    _meetings: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, shape: AttentionShape, window: int) -> None:
        """The model has this kind of attention."""
        if (shape, window) not in self.attentions:
            self.attentions.append((shape, window))

    def kind(self, shape: AttentionShape, window: int) -> int:
        """The number of a kind that the model has."""
        return self.attentions.index((shape, window))

    @property
    def widest_head(self) -> int:
        return max((shape.head_dim for shape, _ in self.attentions), default=0)

    @property
    def _most_kv_heads(self) -> int:
        return max((shape.kv_heads for shape, _ in self.attentions), default=1)

    @property
    def _widest_group(self) -> int:
        return max((shape.heads // shape.kv_heads for shape, _ in self.attentions), default=1)

    def plan(self, batch: ForwardBatch, dtype: torch.dtype) -> AttentionPlan:
        """Return the attention plan for launches with the batch's number of rows. dtype: of keys and values."""
        return attention_plan(
            batch.num_rows, self.widest_head, batch.token_ids.device, self._most_kv_heads, self._widest_group,
            dtype.itemsize,
        )  # fmt: skip

    def windows(self, device: torch.device, by_token: bool = False) -> torch.Tensor:
        """Return the window of each kind of attention, int32 [W]. by_token: add a window of 1, which sees only the
        newest token."""
        if by_token not in self._windows:
            numbers = [window for _, window in self.attentions] + [1] * by_token
            each = [torch.full((), window, dtype=torch.int32, device=device) for window in numbers]
            # A list would have to be copied from the host, which waits.
            none = torch.empty(0, dtype=torch.int32, device=device)
            self._windows[by_token] = torch.stack(each) if each else none
        return self._windows[by_token]

    def parts(self, shape: AttentionShape, batch: ForwardBatch, plan: AttentionPlan) -> PartBuffers:
        rows = triton.next_power_of_2(batch.num_rows)
        key = shape, plan, rows, batch.max_seq_len
        if key not in self._parts:
            self._parts[key] = make_part_buffers(
                rows, shape, plan, batch.max_seq_len, batch.token_ids.device, self._rooms
            )
        return self._parts[key]

    def scratch(self, device: torch.device) -> SplitScratch:
        if self._scratch is None:
            self._scratch = SplitScratch(
                torch.zeros(SPLIT_WORDS, dtype=torch.float32, device=device),
                torch.zeros(_MOST_TILES, dtype=torch.int32, device=device),
            )
        return self._scratch

    def arrived(self, device: torch.device) -> torch.Tensor:
        """Return the counter of `route`, int32 [1]."""
        if self._arrived is None:
            self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
        return self._arrived

    def meetings(self, count: int, device: torch.device) -> torch.Tensor:
        """Return arrival counters of a recurrent mixer's programs, int32 [count or more], zero between mixers."""
        count = triton.next_power_of_2(count)
        if count not in self._meetings:
            self._meetings[count] = torch.zeros(count, dtype=torch.int32, device=device)
        return self._meetings[count]
