"""F of a decode launch with random weights, cut into programs in one way or another: for the tuners."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Final, TypeAlias
from unittest import mock

import torch

from benchmarks.gpu_table.shapes import SHAPES
from benchmarks.tune.products import AnyTiling
from benchmarks.tune.trial import graph_us
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import Attention, AttentionShape
from runahead.runtime.kernels.triton import (
    decode_buffers,
    decode_streams,
    expert_products,
    expert_row,
    kernel_set,
    loose_products,
)
from runahead.runtime.kernels.triton.decode_work import AttentionPlan
from runahead.runtime.kernels.triton.expert_tilings import (
    ExpertProduct,
    ExpertRowTiling,
    ExpertTiling,
    expert_row_tiling,
    expert_tiling,
)
from runahead.runtime.kernels.triton.kernel_set import TritonKernelSet
from runahead.runtime.kernels.triton.row_product import EPILOGUES
from runahead.runtime.kernels.triton.tiling_counts import LayerProduct
from runahead.runtime.kernels.triton.tilings import (
    attention_plan,
    measured_plan,
    row_tiling,
    rows_tiling,
    tiling_key,
)
from runahead.runtime.models.config import ModelConfig
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.layer_kinds import layer_kinds
from runahead.runtime.models.weights import described, dummy_weights
from runahead.runtime.rounding import ceil_div

ATTENTION: Final = "attention"
_BLOCK_SIZE: Final = 16
_CONTEXT: Final = 4096  # tokens of a row, at most, that the graph is captured for
Way: TypeAlias = AttentionPlan | AnyTiling | ExpertTiling | ExpertRowTiling


@dataclass(frozen=True, slots=True)
class AskedExperts:
    """A product of experts that was asked for. columns: entries of an item; 0: a lone row's kernel."""

    product: ExpertProduct
    columns: int


@dataclass
class Step:
    """F of a decode launch of `rows` rows, in which a row has about as many tokens as one of `contexts` says; `queries`
    of them are query tokens. few_layers: the first layer of each kind alone. ways: how it is cut, by what the table
    calls a product, or "attention"; what is not there is cut as it would be otherwise, and joins. asked: the products,
    by what the table calls them, with rows of the batch as there; asked_experts: those of experts. on_units: one row
    goes through the matrix units, as two would."""

    name: str
    rows: int
    contexts: Sequence[int]
    few_layers: bool = False
    queries: int = 1
    on_units: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    ways: dict[str, Way] = field(default_factory=dict)
    asked: dict[str, tuple[LayerProduct, int]] = field(default_factory=dict)
    asked_experts: dict[str, AskedExperts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = SHAPES[self.name].described()
        config = of_each_kind(config) if self.few_layers else config
        rows, lines, kernels = self.rows, self.rows * self.queries, TritonKernelSet()
        weights = dummy_weights(config, torch.bfloat16, self.device, kernels.pack_weight)
        self.shapes = {layer.mixer.shape for layer in weights.layers if isinstance(layer.mixer, Attention)}
        self.shape = max(self.shapes, key=lambda shape: shape.head_dim)
        self.head_dim = self.shape.head_dim
        self._model = Decoder(config, weights, kernels, _CONTEXT)
        blocks = ceil_div(max(self.contexts), _BLOCK_SIZE)
        self._cache = self._model.make_cache(rows * blocks + 1, _BLOCK_SIZE, state_slots=rows, drafts=self.queries - 1)
        for tensor in (*self._cache.keys, *self._cache.values):
            tensor.normal_()
        self._batches = [self._batch(tokens, config.vocab_size) for tokens in self.contexts]
        self._places = torch.arange(lines, dtype=torch.int32, device=self.device)
        self._logits = torch.zeros((lines, config.vocab_size), dtype=torch.float32, device=self.device)

    def _batch(self, tokens: int, vocabulary: int) -> ForwardBatch:
        """The same query tokens whenever it is asked for, so that they choose the same experts. Where a row has a state
        and several query tokens, they are drafts behind the newest one, after a run of as many that were all kept."""
        draw, rows, lines = torch.Generator(self.device).manual_seed(0), self.rows, self.rows * self.queries
        blocks = ceil_div(tokens, _BLOCK_SIZE)
        tables = torch.zeros((rows, _CONTEXT // _BLOCK_SIZE), dtype=torch.int32, device=self.device)
        shuffled = torch.randperm(rows * blocks, generator=draw, device=self.device)
        tables[:, :blocks] = shuffled.int().view(rows, blocks) + 1
        row = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        line = torch.arange(lines, dtype=torch.int32, device=self.device)
        lengths = tokens - row[:rows] % min(5, tokens)
        first = lengths - self.queries
        drafts = torch.full_like(lengths, self.queries - 1) if self._cache.runs and self.queries > 1 else None
        return ForwardBatch(
            token_ids=torch.randint(0, vocabulary, (lines,), generator=draw, device=self.device),
            positions=(first[line // self.queries] + line % self.queries).long(),
            slot_mapping=torch.zeros(lines, dtype=torch.int64, device=self.device),
            query_start_loc=row * self.queries,
            seq_lens=lengths,
            block_tables=tables,
            num_tokens=lines,
            num_rows=rows,
            max_seq_len=_CONTEXT,
            is_decode=True,
            decode_queries=self.queries,
            state_slots=row[:rows] if self._cache.states else None,
            replayed=drafts,
            certain=None if drafts is None else torch.ones_like(lengths),
        )

    def run(self, batch: ForwardBatch | None = None) -> None:
        """batch: None takes that of the first context."""
        of_products: dict[str, Any] = {"row_tiling": self._row_tiling, "rows_tiling": self._rows_tiling}
        batch = batch or self._batches[0]
        with (
            mock.patch.multiple(decode_streams, **of_products),
            mock.patch.object(decode_buffers, "measured_plan", self._measured_plan),
            mock.patch.multiple(loose_products, **of_products),
            mock.patch.object(expert_row, "expert_row_tiling", self._expert_row_tiling),
            mock.patch.object(expert_products, "expert_tiling", self._expert_tiling),
            mock.patch.object(
                kernel_set, "OneRow", decode_streams.FusedRows if self.on_units else decode_streams.OneRow
            ),
        ):
            hidden = self._model.forward(batch, self._cache)
            self._model.kernels.logits_into(hidden, self._model.weights.lm_head, self._logits, self._places)

    def us(self) -> float:
        return statistics.geometric_mean(graph_us(partial(self.run, batch)) for batch in self._batches)

    def __str__(self) -> str:
        of_each = "" if self.queries == 1 else f", {self.queries} query tokens each"
        of_each += ", on the matrix units" if self.on_units else ""
        return f"{self.name}, {self.rows} rows of {' or '.join(map(str, self.contexts))} tokens{of_each}"

    def _row_tiling(self, outputs: int, depth: int, epilogue: str) -> Any:
        return self._product(outputs, depth, 1, epilogue, lambda: row_tiling(outputs, depth, epilogue))

    def _rows_tiling(self, outputs: int, depth: int, columns: int, epilogue: str, exact: bool = False) -> Any:
        return self._product(
            outputs, depth, columns, epilogue, lambda: rows_tiling(outputs, depth, columns, epilogue, exact)
        )

    def _product(self, outputs: int, depth: int, columns: int, epilogue: str, otherwise: Callable[[], Way]) -> Way:
        key = tiling_key(outputs, depth, columns, epilogue)
        self.asked[key] = LayerProduct(outputs, depth, EPILOGUES.index(epilogue), normed=False), columns
        return self._way(key, otherwise)

    def _expert_row_tiling(self, product: ExpertProduct) -> Any:
        self.asked_experts[product.key(1)] = AskedExperts(product, 0)
        return self._way(product.key(1), lambda: expert_row_tiling(product))

    def _expert_tiling(self, product: ExpertProduct, tokens: int, columns: int) -> Any:
        self.asked_experts[product.key(tokens)] = AskedExperts(product, columns)
        return self._way(product.key(tokens), lambda: expert_tiling(product, tokens, columns))

    def _measured_plan(self, shapes: Iterable[AttentionShape], rows: int, queries: int) -> Any:
        return self._way(
            ATTENTION,
            lambda: measured_plan(shapes, rows, queries) or attention_plan(rows, self.head_dim, self.device),
        )

    def _way(self, key: str, otherwise: Callable[[], Way]) -> Way:
        if key not in self.ways:
            self.ways[key] = otherwise()
        return self.ways[key]


def of_each_kind(config: ModelConfig) -> ModelConfig:
    """The model's first layer of each kind alone."""
    kinds = [layer_kinds([layer]) for layer in described(config).layers]
    kept = sorted({kinds.index(kind) for kind in kinds})
    of_layers: dict[str, Any] = {"num_layers": len(kept)}
    for name in (one.name for one in fields(config)):
        value = getattr(config, name)
        if isinstance(value, tuple | str) and len(value) == config.num_layers:
            each = [value[number] for number in kept]
            of_layers[name] = "".join(each) if isinstance(value, str) else tuple(each)
    return replace(config, **of_layers)
