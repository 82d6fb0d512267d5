"""Measures the best tilings of a model's decode products on this GPU: `runahead tune`.

F of a decode launch with random weights is captured in a graph and timed, changing one product's tiling at a time: from
the one in use to one that differs in a single field, as long as that is faster. A tiling that changes any bit of the
logits is never taken, and tilings that would by definition are not tried
(`runahead.runtime.kernels.triton.forward.tuned_tilings`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

import torch
import triton

from runahead.runtime.kernels.activations import has_gate
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import Experts, Norm
from runahead.runtime.kernels.ranks import Shard
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet
from runahead.runtime.kernels.triton.forward.tuned_tilings import AnyTiling, neighbors, save_tuned_tilings
from runahead.runtime.kernels.triton.forward.tuning_report import tilings_asked_for
from runahead.runtime.kernels.triton.gemm.separate_epilogue import add_scaled
from runahead.runtime.kernels.triton.gemm.tuning import rows_tiling, tiling_key, tuned
from runahead.runtime.kernels.triton.moe.routing import block_of
from runahead.runtime.kernels.triton.moe.tuning import (
    FIRST_GATED,
    FIRST_SQUARED,
    LAST,
    ExpertProduct,
    expert_tiling,
)
from runahead.runtime.models.config.model_config import ModelConfig, with_layers
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.layer_kinds import layer_kinds
from runahead.runtime.models.weights import described, dummy_weights
from runahead.runtime.rounding import ceil_div

TimeUs = Callable[[Callable[[], object]], float]
LAYERS: Final = 4  # of each kind; more layers have the same shapes
TOKENS: Final = 672  # of each row
_BLOCK_SIZE: Final = 16
_NOISE: Final = 3e-3  # fraction of a launch's time
_PASSES: Final = 4  # most steps from the tiling in use
_ROUNDS: Final = 3
_REPLAYS: Final = 6


def graph_us(work: Callable[[], object]) -> float:
    """Return the median time, in microseconds, of replaying the work that `work` enqueues. Raises what `work`
    raises."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def once() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        begin.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / _REPLAYS

    return statistics.median(once() for _ in range(_ROUNDS))


def few_layers(config: ModelConfig) -> ModelConfig:
    """Return the model with its first LAYERS layers of each kind."""
    kinds = [layer_kinds([layer]) for layer in described(config).layers]
    return with_layers(config, [number for number, kind in enumerate(kinds) if kinds[:number].count(kind) < LAYERS])


class FirstRank:
    """The exchange of a first rank without peers, whose sums lack their parts: to time its kernels alone."""

    def __init__(self, ranks: int) -> None:
        self.shard = Shard(0, ranks)

    def reduce(self, partial: torch.Tensor) -> None:
        pass

    def reduce_add(
        self, partial: torch.Tensor, residual: torch.Tensor, following: torch.Tensor, scaled: torch.Tensor,
        squares: torch.Tensor,
    ) -> int:  # fmt: skip
        add_scaled(partial, None, residual, Norm(following, 0.0), scaled, squares)
        return 1

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def spread(self, words: Any) -> None:
        pass


def tuned_model(config: ModelConfig, dtype: torch.dtype, device: torch.device, positions: int, ranks: int) -> Decoder:
    """The first rank's part of the model, with random weights."""
    kernels, exchange = TritonKernelSet(), FirstRank(ranks)
    weights = dummy_weights(config, dtype, device, kernels.pack_weight, shard=exchange.shard)
    return Decoder(config, weights, kernels, positions, exchange)


class DecodeStep:
    """F and logits, float32 [rows, vocab], of a decode launch of `rows` rows with about `tokens` tokens each; a rank
    has its part of them."""

    def __init__(self, model: Decoder, rows: int, tokens: int = TOKENS) -> None:
        device, blocks = model.device, ceil_div(tokens, _BLOCK_SIZE)
        draw = torch.Generator(device).manual_seed(0)
        self._model = model
        self._cache = model.make_cache(rows * blocks + 1, _BLOCK_SIZE, state_slots=rows)
        for tensor in (*self._cache.keys, *self._cache.values):
            tensor.normal_(generator=draw)
        row = torch.arange(rows + 1, dtype=torch.int32, device=device)
        shuffled = torch.randperm(rows * blocks, generator=draw, device=device)
        lengths = tokens - row[:rows] % 5
        vocab, own = model.config.vocab_size, model.weights.lm_head.shape[0]
        self._batch = ForwardBatch(
            token_ids=torch.randint(0, vocab, (rows,), generator=draw, device=device),
            positions=(lengths - 1).long(),
            slot_mapping=torch.zeros(rows, dtype=torch.int64, device=device),
            query_start_loc=row,
            seq_lens=lengths,
            block_tables=shuffled.int().view(rows, blocks) + 1,
            num_tokens=rows,
            num_rows=rows,
            max_seq_len=tokens,
            is_decode=True,
            state_slots=row[:rows] if self._cache.states else None,
        )
        self._indexes = row[:rows]
        self.logits = torch.zeros((rows, own), dtype=torch.float32, device=device)

    def run(self) -> None:
        hidden = self._model.forward(self._batch, self._cache)
        self._model.kernels.logits_into(hidden, self._model.weights.lm_head, self.logits, self._indexes)

    def bits(self) -> torch.Tensor:
        """Return one launch's logits from zeroed states. [rows, vocab]"""
        for states in self._cache.states:
            for state in states:
                state.zero_()
        self.run()
        return self.logits.clone()


def tilings_in_use(model: Decoder, rows: int) -> Iterator[tuple[str, AnyTiling]]:
    """Yield the tilings of a decode launch of `rows` rows, by their names in the table."""
    layers = model.weights.layers
    divided = not model.ranks.shard.is_whole
    asked = tilings_asked_for(layers, model.weights.lm_head, [rows], divided=divided)
    for outputs, depth, columns, epilogue in sorted(asked):
        tiling = rows_tiling(outputs, depth, columns, epilogue)
        yield tiling_key(outputs, depth, columns, epilogue), tiling
    for experts in dict.fromkeys(_products_of_experts(layers)):
        tokens = max(rows, 2)  # one token has the tiling of two
        columns = block_of(tokens, experts.experts, experts.chosen)
        yield experts.key(tokens), expert_tiling(experts, tokens, columns)


def tune_step(
    step: DecodeStep, in_use: Sequence[tuple[str, AnyTiling]], until: float, time_us: TimeUs = graph_us
) -> dict[str, AnyTiling]:
    """Return the faster tilings that were found, by their names in the table, and put them in use.

    until: by `time.monotonic`; nothing more is tried after it.
    """
    expected, found = step.bits(), dict[str, AnyTiling]()
    for key, tiling in in_use:
        for _ in range(_PASSES):
            best, best_us = tiling, time_us(step.run) * (1 - _NOISE)
            for other in neighbors(key, tiling):
                if time.monotonic() > until:
                    break
                tuned()[key] = asdict(other)
                try:
                    took = time_us(step.run)
                    if took < best_us and torch.equal(step.bits(), expected):
                        best, best_us = other, took
                except Exception as error:  # a tiling that this GPU can't hold
                    print(f"  {key}: {other}: {str(error).splitlines()[0][:80] if str(error) else error!r}", flush=True)
            tuned()[key] = asdict(best)
            if best == tiling:
                break
            tiling = found[key] = best
        if key not in found:
            del tuned()[key]
    return found


@torch.inference_mode()
def tune(config: ModelConfig, dtype: torch.dtype, batches: Sequence[int], seconds: float, ranks: int = 1) -> None:
    """Tune decode launches of these batch sizes on the current GPU, print the times, and write the file of tilings.
    ranks: among which the model is divided; products have the sizes of the first one's.

    Raises OSError if the file can't be written.
    """
    began, device = time.monotonic(), torch.device("cuda", torch.cuda.current_device())
    model = tuned_model(few_layers(config), dtype, device, triton.next_power_of_2(TOKENS), ranks)
    if dtype == torch.float32:
        print("nothing to tune: products in float32 have one tiling")
        return
    print(f"{torch.cuda.get_device_name()}: {len(model.weights.layers)} layers, {TOKENS} tokens a row", flush=True)
    for rows in batches:
        if time.monotonic() - began > seconds:
            print(f"{rows} rows: not tried, the time is up", flush=True)
            continue
        step = DecodeStep(model, rows)
        before, begun = graph_us(step.run), time.monotonic()
        found = tune_step(step, list(tilings_in_use(model, rows)), began + seconds)
        path = save_tuned_tilings(found)
        after = graph_us(step.run)
        took = time.monotonic() - begun
        print(f"{rows} rows: {before:.1f} -> {after:.1f} us, {len(found)} tilings in {path} ({took:.0f} s)", flush=True)


def _products_of_experts(layers: Sequence[Any]) -> Iterator[ExpertProduct]:
    for layer in layers:
        experts = layer.feed_forward
        if isinstance(experts, Experts):
            hidden, width = experts.down[0].weight.shape
            first = FIRST_GATED if has_gate(experts.activation) else FIRST_SQUARED
            own, itemsize = len(experts.down), experts.down[0].weight.element_size()
            yield ExpertProduct(first, experts.chosen, own, width, hidden, itemsize)
            yield ExpertProduct(LAST, experts.chosen, own, hidden, width, itemsize)
