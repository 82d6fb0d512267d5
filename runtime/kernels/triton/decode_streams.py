"""A decode launch's rows on their way through the layers, by kernels that do several of a layer's steps at once.

Five kernels a layer: norm and QKV product; attention with all that belongs to it; output product and residual; norm,
gate/up product and activation; down product and residual. The fastest way for one row are kernels of its own, since the
matrix units would idle; more than MAX_ROWS are better off with the vendor's products. Where a row's bits must not hang
on how many rows there are, every number of them goes through `FusedRows`, `exact`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Final

import torch
import torch.nn.functional as functional
import triton

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.layers import Activation, Attention, AttentionShape, Dense, Ends, Linear, Norm
from runahead.runtime.kernels.triton import norms
from runahead.runtime.kernels.triton.activation import gated_mul
from runahead.runtime.kernels.triton.decode_attention import decode_attention
from runahead.runtime.kernels.triton.decode_parts import PartBuffers, make_part_buffers
from runahead.runtime.kernels.triton.decode_work import AttentionPlan, AttentionWork, begin_decode
from runahead.runtime.kernels.triton.dependent_launch import dependent_launch_works
from runahead.runtime.kernels.triton.row_product import ADD, EPILOGUES, GATED, STORE, row_product
from runahead.runtime.kernels.triton.rows_product import Residual, SplitScratch, columns_of, rows_product
from runahead.runtime.kernels.triton.tilings import SPLIT_WORDS, attention_plan, row_tiling, rows_tiling
from runahead.runtime.rounding import ceil_div

MAX_ROWS: Final = 64
_MOST_TILES: Final = 1024  # of a product whose parts are spread over programs
_LEAST_TILE: Final = 16  # outputs of a program that adds to the residual


@dataclass(slots=True)
class DecodeBuffers:
    """What every decode launch of one model uses, made when one first needs it and kept: graphs hold its addresses. So
    a launch of every bucket runs before one is captured."""

    attentions: list[tuple[AttentionShape, int]] = field(default_factory=list)  # shapes and windows that there are
    _windows: torch.Tensor | None = None
    _parts: dict[tuple[AttentionShape, AttentionPlan, int, int, int], PartBuffers] = field(default_factory=dict)
    _scratch: SplitScratch | None = None

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

    def windows(self, device: torch.device) -> torch.Tensor:
        """Of every kind of attention, int32 [W]."""
        if self._windows is None:
            each = [torch.full((), window, dtype=torch.int32, device=device) for _, window in self.attentions]
            self._windows = torch.stack(each)  # a list would have to be copied from the host, which waits
        return self._windows

    def parts(self, shape: AttentionShape, batch: ForwardBatch, plan: AttentionPlan) -> PartBuffers:
        rows, queries = triton.next_power_of_2(batch.num_rows), triton.next_power_of_2(batch.decode_queries)
        key = shape, plan, rows, batch.max_seq_len, queries
        if key not in self._parts:
            self._parts[key] = make_part_buffers(rows, shape, plan, batch.max_seq_len, batch.token_ids.device, queries)
        return self._parts[key]

    def scratch(self, device: torch.device) -> SplitScratch:
        if self._scratch is None:
            self._scratch = SplitScratch(
                torch.zeros(SPLIT_WORDS, dtype=torch.float32, device=device),
                torch.zeros(_MOST_TILES, dtype=torch.int32, device=device),
            )
        return self._scratch


class RowStream(ABC):
    """Rows that decode: to the products, each of their query tokens is a row. exact: a row's bits hang on itself alone.

    The product that begins F's first layer is launched as usual: what follows may then read what apply has left before
    it waits. The others are launched programmatically where that works.
    """

    def __init__(
        self, batch: ForwardBatch, cache: KVCache, ends: Ends, buffers: DecodeBuffers, exact: bool = False
    ) -> None:
        self._batch, self._cache, self._ends, self._buffers = batch, cache, ends, buffers
        self._rows, self._device = batch.num_tokens, batch.token_ids.device
        self._plan = attention_plan(batch.num_rows, buffers.widest_head, self._device, exact)
        self._windows = buffers.windows(self._device)
        self._may_depend = False
        self._residual = self._ends.embedding.new_empty((self._rows, self._ends.embedding.shape[1]))
        self._work: AttentionWork

    def attention(self, weights: Attention, place: int) -> None:
        qkv = self._normed_product(weights.norm, weights.qkv, STORE)
        weights = norms.norm_across_heads(qkv, weights)
        self._add(self._attended(qkv, weights, place), weights.o, weights.post_norm)

    def _attended(self, qkv: torch.Tensor, weights: Attention, place: int) -> torch.Tensor:
        """The heads' results, [rows, heads * D], the cache being written first."""
        shape, batch = weights.shape, self._batch
        attended = qkv.new_empty((self._rows, shape.q_size))
        kind = self._buffers.kind(shape, weights.window)
        decode_attention(
            qkv,
            attended,
            self._cache.keys[place],
            self._cache.values[place],
            batch.block_tables,
            batch.seq_lens,
            self._work.items[kind],
            self._work.total[kind],
            self._ends.ropes[weights.rope],
            weights,
            self._plan,
            self._buffers.parts(shape, batch, self._plan),
            dependent=self._depends(True),
            queries=batch.decode_queries,
            query_start_loc=batch.query_start_loc,
        )
        return attended

    def dense(self, weights: Dense) -> None:
        gated = self._normed_product(weights.norm, weights.gate_up, GATED, weights.activation)
        self._add(gated, weights.down, weights.post_norm)

    def _begin(self, sums: Residual | None = None, norm: Norm | None = None) -> AttentionWork:
        """Embed the query tokens and cut attention's work. sums: what the product that follows reads of the residual is
        made there too, for `norm`."""
        batch = self._batch
        return begin_decode(
            batch.token_ids,
            self._ends.embedding,
            self._residual,
            batch.seq_lens,
            self._windows,
            self._plan,
            scaled=None if sums is None else sums.scaled,
            squares=None if sums is None else sums.squares,
            gamma=None if norm is None else norm.weight,
            scale=self._ends.embedding_scale,
            queries=batch.decode_queries,
            query_start_loc=batch.query_start_loc,
        )

    @abstractmethod
    def end(self) -> torch.Tensor:
        """Hidden states after the final norm, [T, hidden]."""

    @abstractmethod
    def _normed_product(
        self, norm: Norm | None, linear: Linear, epilogue: int, activation: Activation = "silu"
    ) -> torch.Tensor:
        """Of the residual's norm, or of the residual. activation: if GATED. [T, outputs]"""

    @abstractmethod
    def _add(self, x: torch.Tensor, linear: Linear, post_norm: Norm | None) -> None:
        """residual += post_norm(linear(x)), or without that norm"""

    def _depends(self, wanted: bool) -> bool:
        """Whether the next kernel is launched programmatically. The first of F never is."""
        may, self._may_depend = self._may_depend, True
        return may and wanted and dependent_launch_works()

    def _empty(self, linear: Linear, epilogue: int) -> torch.Tensor:
        outputs = linear.weight.shape[0] // (2 if epilogue == GATED else 1)
        return self._residual.new_empty((self._rows, outputs))


class OneRow(RowStream):
    """A launch of one row: products by multiply-adds, each norm in the product that reads it."""

    def __init__(self, batch: ForwardBatch, cache: KVCache, ends: Ends, buffers: DecodeBuffers) -> None:
        super().__init__(batch, cache, ends, buffers)
        self._work = self._begin()

    def _normed_product(
        self, norm: Norm | None, linear: Linear, epilogue: int, activation: Activation = "silu"
    ) -> torch.Tensor:
        out = self._empty(linear, epilogue)
        self._product(self._residual, linear, norm, out, epilogue, activation)
        return out

    def _add(self, x: torch.Tensor, linear: Linear, post_norm: Norm | None) -> None:
        if post_norm is None:
            self._product(x, linear, None, self._residual, ADD)
            return
        out = self._empty(linear, STORE)
        self._product(x, linear, None, out, STORE)
        norms.add_normed(out, self._residual, post_norm)

    def _product(
        self,
        x: torch.Tensor,
        linear: Linear,
        norm: Norm | None,
        out: torch.Tensor,
        epilogue: int,
        activation: Activation = "silu",
    ) -> None:
        tiling = row_tiling(*_sizes(linear.weight), EPILOGUES[epilogue])
        tiling = replace(tiling, dependent=self._depends(tiling.dependent))
        row_product(x, linear, norm, out, epilogue, tiling, activation=activation)

    def end(self) -> torch.Tensor:
        norm = self._ends.final_norm
        return norms.rms_norm(self._residual, norm.weight, norm.eps, dependent=self._depends(True))


class FusedRows(RowStream):
    """A launch of any number of rows: products on the matrix units, each with the norm before it.

    Whoever makes the residual also leaves it times the weight of the norm that follows. So it is made when that norm is
    known: `_pending` is what the residual still lacks.
    """

    def __init__(
        self, batch: ForwardBatch, cache: KVCache, ends: Ends, buffers: DecodeBuffers, exact: bool = False
    ) -> None:
        super().__init__(batch, cache, ends, buffers, exact)
        self._exact = exact
        tiles = ceil_div(self._residual.shape[1], _LEAST_TILE)
        squares = torch.empty((tiles, columns_of(self._rows)), dtype=torch.float64, device=self._device)
        self._sums = Residual(self._residual, torch.empty_like(self._residual), squares)
        self._scratch = buffers.scratch(self._device)
        self._pending: tuple[torch.Tensor, Linear, Norm | None] | None = None
        self._tiles = 0  # of the squares

    def _normed_product(
        self, norm: Norm | None, linear: Linear, epilogue: int, activation: Activation = "silu"
    ) -> torch.Tensor:
        self._complete(norm)
        out = self._empty(linear, epilogue)
        sums = self._sums
        x, squares = (sums.values, None) if norm is None else (sums.scaled, (sums.squares, self._tiles, norm.eps))
        self._product(x, linear, out, epilogue, activation=activation, squares=squares)
        return out

    def _add(self, x: torch.Tensor, linear: Linear, post_norm: Norm | None) -> None:
        self._pending = x, linear, post_norm

    def _complete(self, norm: Norm | None) -> None:
        """Make the residual for the norm that follows, or for a product that reads it without one."""
        sums = self._sums
        if self._pending is None:
            self._work = self._begin(None if norm is None else sums, norm)
            self._tiles = 1
            return
        (x, linear, post_norm), self._pending = self._pending, None
        if post_norm is None:
            assert norm is not None, "what is read without a norm is normalised before it is added"
            self._tiles = self._product(x, linear, sums.values, ADD, norm=norm, residual=sums)
            return
        out = self._empty(linear, STORE)
        self._product(x, linear, out, STORE)
        made = (None, None) if norm is None else (sums.scaled, sums.squares)
        norms.add_normed(out, sums.values, post_norm, norm, *made)
        self._tiles = 1

    def _product(
        self,
        x: torch.Tensor,
        linear: Linear,
        out: torch.Tensor,
        epilogue: int,
        *,
        activation: Activation = "silu",
        squares: tuple[torch.Tensor, int, float] | None = None,
        norm: Norm | None = None,
        residual: Residual | None = None,
    ) -> int:
        tiling = rows_tiling(*_sizes(linear.weight), columns_of(self._rows), EPILOGUES[epilogue], self._exact)
        tiling = replace(tiling, dependent=self._depends(tiling.dependent))
        rows_product(
            x, linear, out, epilogue, tiling, self._scratch, self._rows, squares=squares, norm=norm, residual=residual,
            activation=activation,
        )  # fmt: skip
        return ceil_div(linear.weight.shape[0], tiling.rows)

    def end(self) -> torch.Tensor:
        norm = self._ends.final_norm
        self._complete(norm)
        return norms.rms_norm(self._sums.values, norm.weight, norm.eps, dependent=self._depends(True))


class VendorRows(RowStream):
    """A launch of more rows, or of another dtype: the vendor's products, with a kernel each for norm and activation."""

    def __init__(self, batch: ForwardBatch, cache: KVCache, ends: Ends, buffers: DecodeBuffers) -> None:
        super().__init__(batch, cache, ends, buffers)
        self._sum = norms.LateSum(self._residual)
        self._work = self._begin()

    def _normed_product(
        self, norm: Norm | None, linear: Linear, epilogue: int, activation: Activation = "silu"
    ) -> torch.Tensor:
        product = functional.linear(self._sum.normed(norm), linear.weight, linear.bias)
        return gated_mul(product, activation) if epilogue == GATED else product

    def _add(self, x: torch.Tensor, linear: Linear, post_norm: Norm | None) -> None:
        self._sum.add(functional.linear(x, linear.weight, linear.bias), post_norm)

    def _depends(self, wanted: bool) -> bool:
        return False

    def end(self) -> torch.Tensor:
        return self._sum.normed(self._ends.final_norm)


def _sizes(weight: torch.Tensor) -> tuple[int, int]:
    outputs, depth = weight.shape
    return outputs, depth


def head_of_one_row(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, places: torch.Tensor) -> None:
    """The logits of one row. hidden: [1, hidden]. weight: [vocab, hidden]. out: float32 [n, vocab]. places: int32 [1],
    the row of `out` to which they go."""
    tiling = row_tiling(*_sizes(weight), EPILOGUES[STORE])
    dependent = tiling.dependent and dependent_launch_works()
    row_product(hidden, Linear(weight, None), None, out, STORE, replace(tiling, dependent=dependent), places)


def product_of_rows(
    hidden: torch.Tensor,
    linear: Linear,
    out: torch.Tensor,
    exact: bool = False,
    places: torch.Tensor | None = None,
) -> None:
    """out = hidden @ weight.T + bias, on the matrix units. hidden: [R, in]. linear: weight [outputs, in], the depth in
    one part, which a vocabulary is large enough for. out: [R, outputs]; with places, int32 [R], rows of any number, of
    which each row goes to its own place."""
    rows = hidden.shape[0]
    tiling = rows_tiling(*_sizes(linear.weight), columns_of(rows), EPILOGUES[STORE], exact)
    tiling = replace(tiling, splits=1, dependent=tiling.dependent and dependent_launch_works())
    rows_product(hidden, linear, out, STORE, tiling, None, rows, places=places)
