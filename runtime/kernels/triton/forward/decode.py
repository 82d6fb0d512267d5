"""A launch's rows on their way through the layers, by kernels that do several of a layer's steps at once.

Five kernels a layer: norm and QKV product; attention with all that belongs to it; output product and residual; norm,
gate/up product and activation; down product and residual. With more than MAX_ROWS rows a product of one sum is
the vendor's where that has the same bits and is as fast, and what follows it a separate kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.layers import Activation, Attention, Dense, EmbeddingAndHead, Linear, Norm, Ungated
from runahead.runtime.kernels.quantized_weight import FP8_COLUMNS, Fp8Weight
from runahead.runtime.kernels.triton.attention.decode import decode_attention
from runahead.runtime.kernels.triton.attention.schedule import AttentionWork, begin_decode
from runahead.runtime.kernels.triton.forward.buffers import DecodeBuffers
from runahead.runtime.kernels.triton.forward.recurrent import (
    Recurrent,
    States,
    of_decode_rows,
    squares_of_norm,
)
from runahead.runtime.kernels.triton.forward.unfused_products import has_end_inside, sizes_of, sums_of
from runahead.runtime.kernels.triton.gemm.epilogue import ADD, EPILOGUES, GATED, SQUARED, STORE, Squares
from runahead.runtime.kernels.triton.gemm.fp8_rows import Fp8Rows
from runahead.runtime.kernels.triton.gemm.int4_gemm import INT4_ROWS, int4_batch_product
from runahead.runtime.kernels.triton.gemm.separate_epilogue import add_scaled, finish_in_fp8, finish_product
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import Residual, columns_of, small_batch_product
from runahead.runtime.kernels.triton.gemm.tuning import is_one_sum, rows_in_table, rows_tiling
from runahead.runtime.kernels.triton.gpu.pdl import dependent_launch_works
from runahead.runtime.kernels.triton.moe.layer import PackedExperts, Results, live_tokens
from runahead.runtime.kernels.triton.ops import norms
from runahead.runtime.kernels.triton.ops.gates import logistic_mul
from runahead.runtime.kernels.triton.ranks.rank_sums import add_of_ranks, embed_on_ranks
from runahead.runtime.rounding import ceil_div

MAX_ROWS: Final = 64
Join = Callable[[torch.Tensor], torch.Tensor]
_LEAST_TILE: Final = 8  # outputs of a program that adds to the residual


class RowStream:
    """A launch's rows on their way through the layers: to the products each query token is a row, and no row's bits
    depend on the others.

    The product that begins F's first layer is launched as usual: what follows may then read what apply has left before
    it waits. The others are launched programmatically where that works.

    The kernel that makes the residual also stores it times the weight of the following norm. So it is made when that
    norm is known: `_pending` is the part that the residual still lacks; None if it is made, for `_following`.
    """

    def __init__(self, batch: ForwardBatch, cache: KVCache, emb: EmbeddingAndHead, buffers: DecodeBuffers) -> None:
        self._batch, self._cache, self._emb, self._buffers = batch, cache, emb, buffers
        self._rows, self._device = batch.num_tokens, batch.token_ids.device
        self._plan = buffers.plan(batch, emb.embedding.dtype)
        self._windows = buffers.windows(self._device, batch.by_token)
        self._may_depend = False
        residual = emb.embedding.new_empty((self._rows, emb.embedding.shape[1]))
        tiles = ceil_div(residual.shape[1], _LEAST_TILE)
        squares = torch.empty((tiles, columns_of(self._rows)), dtype=torch.float64, device=self._device)
        self._sums = Residual(residual, torch.empty_like(residual), squares)
        self._scratch = buffers.scratch(self._device)
        self._scaled_in_fp8: Fp8Rows | None = None  # `_sums.scaled`, where the kernel that made it left it in FP8 too
        self._pending: Callable[[Norm | None], int] | None = self._embed  # given that norm, makes the residual for it
        self._following: Norm | None = None
        self._tiles = 0  # of the squares
        self._residual_copies: list[torch.Tensor] = []  # what becomes the residual when it is made
        self._chunk_lens: torch.Tensor | None = None  # of a mixed launch, as `begin_decode` has it
        self._work: AttentionWork
        self._joined: torch.Tensor  # what a draft head has joined

    def attention(self, weights: Attention, cache_index: int) -> None:
        if weights.joined:
            qkv = self._stored(self._joined, weights.qkv, self._empty(weights.qkv, STORE))
        else:
            qkv = self._normed_product(weights.norm, weights.qkv, STORE)
        gate = None if weights.gate is None else self._normed_product(weights.norm, weights.gate, STORE)
        weights = norms.norm_across_heads(qkv, weights)
        attended = self._attended(qkv, weights, cache_index)
        if gate is not None:
            logistic_mul(attended, gate)
        self._add(attended, weights.o, weights.post_norm)

    def recurrent(self, weights: Recurrent, cache_index: int) -> None:
        projected = self._normed_product(weights.norm, weights.proj, STORE)
        states = *self._cache.states[cache_index], self._cache.runs[cache_index]
        left = squares_of_norm(weights, self._batch, self._sums.squares, self._emb.ranks)
        mixed, squares = self._mixed(projected, weights, states, left)
        self._pending = partial(self._add_product, mixed, weights.out, None, squares)

    def _mixed(
        self, projected: torch.Tensor, weights: Recurrent, states: States, squares: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Squares]:
        """Return the input of the mixer's second product (see `of_decode_rows`), and advance the states of live
        rows."""
        return of_decode_rows(
            projected, weights, states, self._batch, self._buffers, squares=squares, dependent=self._depends(True)
        )

    def _attended(self, qkv: torch.Tensor, weights: Attention, cache_index: int) -> torch.Tensor:
        """The heads' results, [rows, heads * D], the cache being written first.

        Lines see the tokens of lines before them, which are not in the cache yet. So attention runs twice: first over
        the newest token of each line alone, for what it writes. It is the same kernel, so that keys have the bits that
        they have in a plain step.
        """
        attended = qkv.new_empty((self._rows, weights.shape.q_size))
        dependent = self._depends(True)
        if self._batch.by_token:
            self._attend(qkv, attended, weights, cache_index, -1, dependent)
            dependent = False  # what it asks for before it would wait is what the first has written
        self._attend(qkv, attended, weights, cache_index, self._buffers.kind(weights.shape, weights.window), dependent)
        return attended

    def _attend(
        self,
        qkv: torch.Tensor,
        attended: torch.Tensor,
        weights: Attention,
        cache_index: int,
        kind: int,
        dependent: bool,
    ) -> None:
        """Run decode attention of one layer into `attended`. kind: index of the window that the work was cut for."""
        shape, batch = weights.shape, self._batch
        decode_attention(
            qkv, attended, self._cache.keys[cache_index], self._cache.values[cache_index],
            batch.block_tables, batch.seq_lens, self._work.items[kind], self._work.total[kind],
            self._emb.ropes[weights.rope], weights, self._plan, self._buffers.parts(shape, batch, self._plan),
            dependent=dependent, query_start_loc=batch.query_start_loc, ragged=self._chunk_lens is not None,
        )  # fmt: skip

    def dense(self, weights: Dense) -> None:
        if self._is_separate(weights.gate_up) and isinstance(weights.down.quantized, Fp8Weight):
            x, squares = self._read(weights.norm)
            product = self._sums_of(x, weights.gate_up)
            gated: torch.Tensor | Fp8Rows = finish_in_fp8(
                product, weights.gate_up, squares, GATED, weights.activation, dependent=self._depends(True)
            )
        else:
            gated = self._normed_product(weights.norm, weights.gate_up, GATED, weights.activation)
        self._add(gated, weights.down, weights.post_norm)

    def ungated(self, weights: Ungated) -> None:
        self._add(self._normed_product(weights.norm, weights.up, SQUARED), weights.down, None)

    def experts(self, experts: PackedExperts) -> None:
        x, squares = self._read(experts.weights.norm)
        scores = torch.empty((self._rows, experts.scored), dtype=torch.float32, device=self._device)
        self._product(x, experts.router, scores, STORE, squares=squares)
        arrived = self._buffers.arrived(self._device)
        results = experts.results(x, scores, self._live, arrived, self._depends, squares)
        self._pending = partial(self._add_results, experts, results)

    def _add_results(self, experts: PackedExperts, results: Results, norm: Norm | None) -> int:
        sums, ranks = self._sums, self._emb.ranks
        if not ranks.shard.is_whole:
            return add_of_ranks(experts.made(results, self._live), ranks, sums, norm)
        dependent = self._depends(True)
        return experts.add(results, self._live, sums.values, norm, sums.scaled, sums.squares, dependent=dependent)

    @cached_property
    def _live(self) -> torch.Tensor:
        """Return int32 [T], more than 0 for query tokens of unmasked rows."""
        return live_tokens(self._batch)

    def _begin(self, sums: Residual | None = None, norm: Norm | None = None, *, embeds: bool = True) -> AttentionWork:
        """Embed the query tokens, unless a head joins them with something else, and cut attention's work. sums: what
        the product that follows reads of the residual is made there too, for `norm`."""
        batch = self._batch
        made = (None, None) if sums is None else (sums.scaled, sums.squares)
        return begin_decode(
            batch.token_ids if embeds else batch.token_ids[:0], self._emb.embedding, self._sums.values,
            batch.seq_lens, self._windows, self._plan, scaled=made[0], squares=made[1],
            gamma=None if norm is None else norm.weight, scale=self._emb.embedding_scale,
            query_start_loc=batch.query_start_loc, chunk_lens=self._chunk_lens,
        )  # fmt: skip

    def fuse(self, join: Join, product: Linear | None) -> None:
        """Begin a draft head, instead of the embedding. join: given the residual, leaves what a head without
        a product goes on with there, and returns what `product` reads, or attention where there is none."""
        self._work = self._begin(embeds=False)
        self._joined = join(self._sums.values)
        self._pending = None if product is None else partial(self._fused, product)

    def _fused(self, product: Linear, norm: Norm | None) -> int:
        if norm is None:
            self._stored(self._joined, product, self._sums.values)
            return 1
        self._sums.values.zero_()  # a sum leaves what its norm needs
        return self._product(self._joined, product, self._sums.values, ADD, norm=norm, residual=self._sums)

    def copy_residual(self, out: torch.Tensor) -> None:
        """`out` becomes what the layers have left so far, [T, hidden]: before this F ends."""
        self._residual_copies.append(out)
        if self._pending is None:
            self._show()

    def _show(self) -> None:
        for out in self._residual_copies:
            out.copy_(self._sums.values)
        self._residual_copies.clear()

    def left(self) -> torch.Tensor:
        """Return the residual after the layers, before the final norm, [T, hidden]."""
        self._complete(self._emb.final_norm)
        return self._sums.values

    def end(self) -> torch.Tensor:
        """Hidden states after the final norm, [T, hidden]."""
        norm, residual = self._emb.final_norm, self.left()
        return norms.rms_norm(residual, norm.weight, norm.eps, dependent=self._depends(True))

    def _stored(self, x: torch.Tensor | Fp8Rows, linear: Linear, out: torch.Tensor) -> torch.Tensor:
        """out = linear(x), of contiguous rows. Returns it."""
        if self._is_separate(linear):
            return out.copy_(self._finished(x, linear, None, STORE))
        self._product(x, linear, out, STORE)
        return out

    def _is_separate(self, linear: Linear) -> bool:
        """Return whether what follows the product is a separate kernel: the matrix is in FP8, or the vendor's library
        computes this number of rows."""
        if isinstance(linear.quantized, Fp8Weight):
            return True
        if self._rows <= (MAX_ROWS if linear.quantized is None else INT4_ROWS):
            return False
        return is_one_sum(*sizes_of(linear.weight)) and not has_end_inside(linear, self._rows)

    def _read(self, norm: Norm | None) -> tuple[torch.Tensor, Squares]:
        """Return a product's input from the residual, and the squares by which its sums are scaled."""
        self._complete(norm)
        sums = self._sums
        if norm is None:
            return sums.values, None
        if sums.values.dtype == torch.float16:  # which may not hold the residual before its norm's scale
            return norms.rms_norm(sums.values, norm.weight, norm.eps), None
        return sums.scaled, (sums.squares, self._tiles, norm.eps)

    def _normed_product(
        self, norm: Norm | None, linear: Linear, epilogue: int, activation: Activation = "silu"
    ) -> torch.Tensor:
        """Multiply the normalized residual, or without a norm the residual, by a matrix. activation: with the epilogue
        GATED. Returns [T, outputs]."""
        x, squares = self._read(norm)
        if self._is_separate(linear):
            return self._finished(x, linear, squares, epilogue, activation)
        out = self._empty(linear, epilogue)
        self._product(x, linear, out, epilogue, activation=activation, squares=squares)
        return out

    def _add(self, x: torch.Tensor | Fp8Rows, linear: Linear, post_norm: Norm | None) -> None:
        """residual += post_norm(linear(x)), or without that norm"""
        self._pending = partial(self._add_product, x, linear, post_norm, None)

    def _embed(self, norm: Norm | None) -> int:
        if self._emb.ranks.shard.is_whole:
            self._work = self._begin(None if norm is None else self._sums, norm)
            return 1
        self._work = self._begin(embeds=False)
        return embed_on_ranks(self._batch.token_ids, self._emb, self._sums, norm)

    def _complete(self, norm: Norm | None) -> None:
        """Make the residual for the norm that follows, or for a product that reads it without one."""
        if self._pending is None:
            assert norm is self._following, "what was made for one norm is read by another"
            return
        pending, self._pending = self._pending, None
        self._scaled_in_fp8 = None
        self._tiles, self._following = pending(norm), norm
        self._show()

    def _add_product(
        self, x: torch.Tensor | Fp8Rows, linear: Linear, post_norm: Norm | None, squares: Squares, norm: Norm | None
    ) -> int:
        """Return the number of tiles of the residual's squares. squares: of the norm of x. norm: the next one."""
        sums, ranks = self._sums, self._emb.ranks
        if post_norm is None and ranks.shard.is_whole:
            assert norm is not None, "what is read without a norm is normalised before it is added"
            if self._is_separate(linear):
                product = self._sums_of(x, linear)
                self._scaled_in_fp8 = add_scaled(
                    product, linear, sums.values, norm, sums.scaled, sums.squares, squares,
                    in_fp8=isinstance(linear.quantized, Fp8Weight) and product.shape[1] % FP8_COLUMNS == 0,
                    dependent=self._depends(True),
                )  # fmt: skip
                return 1
            return self._product(x, linear, sums.values, ADD, squares=squares, norm=norm, residual=sums)
        if self._is_separate(linear):
            out = self._finished(x, linear, None, STORE)
        else:
            out = self._stored(x, linear, self._empty(linear, STORE))
        if post_norm is None:
            return add_of_ranks(out, ranks, sums, norm)
        ranks.reduce(out)
        made = (None, None) if norm is None else (sums.scaled, sums.squares)
        norms.add_normed(out, sums.values, post_norm, norm, *made)
        return 1

    def _finished(
        self,
        x: torch.Tensor | Fp8Rows,
        linear: Linear,
        squares: Squares,
        epilogue: int,
        activation: Activation = "silu",
    ) -> torch.Tensor:
        """Compute a product, and its epilogue in a separate kernel: [T, outputs]. squares: see `_read`."""
        product = self._sums_of(x, linear)
        return finish_product(product, linear, squares, epilogue, activation, dependent=self._depends(True))

    def _sums_of(self, x: torch.Tensor | Fp8Rows, linear: Linear) -> torch.Tensor:
        """Compute a product without its bias and epilogue, with the rows in FP8 where both factors are there in FP8."""
        if x is self._sums.scaled and isinstance(linear.quantized, Fp8Weight) and self._scaled_in_fp8 is not None:
            x = self._scaled_in_fp8
        return sums_of(x, linear, self._rows, self._depends)

    def _product(self, x: torch.Tensor | Fp8Rows, linear: Linear, out: torch.Tensor, epilogue: int, **more: Any) -> int:
        """Compute a product and its epilogue. more: as `small_batch_product` has it. Returns the number of tiles."""
        assert isinstance(x, torch.Tensor)
        if self._rows > MAX_ROWS and out.dtype == x.dtype and has_end_inside(linear, self._rows):
            # Gluon is experimental and may change: import it only where it is needed.
            from runahead.runtime.kernels.triton.gemm.chains_hopper import many_rows_product

            return many_rows_product(x.contiguous(), linear, out, epilogue, dependent=self._depends(True), **more)
        tiling = rows_tiling(*sizes_of(linear.weight), rows_in_table(self._rows), EPILOGUES[epilogue], x.element_size())
        tiling = replace(tiling, dependent=self._depends(tiling.dependent))
        if linear.quantized is not None:
            return int4_batch_product(x, linear, out, epilogue, tiling, self._scratch, self._rows, **more)
        small_batch_product(x, linear, out, epilogue, tiling, self._scratch, self._rows, **more)
        return ceil_div(linear.weight.shape[0], tiling.rows)

    def _depends(self, wanted: bool) -> bool:
        """Return whether the next kernel is launched programmatically. The first of F never is."""
        may, self._may_depend = self._may_depend, True
        return may and wanted and dependent_launch_works()

    def _empty(self, linear: Linear, epilogue: int) -> torch.Tensor:
        outputs = linear.weight.shape[0] // (2 if epilogue == GATED else 1)
        return self._sums.values.new_empty((self._rows, outputs))
