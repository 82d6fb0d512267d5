"""Times ways to cut recurrent states into programs on the GPU at hand, for rows that decode, and prints the best.

`python -m benchmarks.tune.states`. A recurrent layer of the shape with random weights, whose kernel goes by turns
through the states of several layers, more than the GPU's caches hold. Of each number of rows: one query token a row,
and with `--drafts` as many more, whose inputs are replayed before.

What a way computes is compared with the default's, bit by bit: where bits differ, one way must do for every number of
rows, with drafts and without (`STATES` beside the kernels), but for one row (`LONE_ROW`, with drafts `LONE_RUN`), whose
launches have other bits anyway, and without drafts leave the norm of one group to the product that follows.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any, Final

import torch

from benchmarks.gpu_table.shapes import SHAPES
from benchmarks.tune.trial import READ_BYTES_PER_S, compile_side_by_side, graph_us, part_of
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import Attention, GatedDelta, Mamba2, Norm
from runahead.runtime.kernels.triton.delta_decode import delta_of_one_token
from runahead.runtime.kernels.triton.delta_runs import delta_of_runs
from runahead.runtime.kernels.triton.dependent_launch import dependent_launch_works
from runahead.runtime.kernels.triton.mamba2_decode import mamba2_of_one_token
from runahead.runtime.kernels.triton.mamba2_runs import mamba2_of_runs
from runahead.runtime.kernels.triton.state_tiling import LONE_ROW, LONE_RUN, STATES, StateTiling
from runahead.runtime.models.weights import described

NAMES: Final = ("7B-A1B", "8B-hybrid", "9B-hybrid", "40B-A3B-delta")
_CACHE_BYTES: Final = 2e8  # of states that a graph goes through
_POSITION: Final = 671
_SHOWN: Final = 6


def tilings() -> Iterator[StateTiling]:
    """Candidates: some numbers of each thread, and not too many."""
    for words, warps in itertools.product((1024, 2048, 4096, 8192, 16384), (1, 2, 4, 8)):
        if 8 <= words // (32 * warps) <= 128:
            yield StateTiling(words, warps)


def mixer_of(name: str) -> Mamba2 | GatedDelta:
    """The first recurrent mixer of a shape of the benchmarks, without numbers."""
    for layer in described(SHAPES[name].described()).layers:
        if layer.mixer is not None and not isinstance(layer.mixer, Attention):
            return layer.mixer
    raise ValueError(f"{name} has no recurrent layer")


def _with_numbers(mixer: Mamba2 | GatedDelta, device: torch.device) -> Any:
    """The same with random numbers, but for its products, which are not run."""
    draw = torch.Generator(device).manual_seed(3)

    def numbers(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=draw, device=device).to(like.dtype)

    changed: dict[str, Any] = {}
    for field in fields(mixer):
        part = getattr(mixer, field.name)
        if isinstance(part, torch.Tensor):
            changed[field.name] = numbers(part)
        elif isinstance(part, Norm):
            changed[field.name] = replace(part, weight=numbers(part.weight))
    changed["a"] = -changed["a"].exp()
    return replace(mixer, **changed)


class Bench:
    """A mixer and the states of several layers, for so many rows, of which each has so many drafts."""

    def __init__(
        self, mixer: Mamba2 | GatedDelta, rows: int, drafts: int, device: torch.device, most_layers: int = 36
    ) -> None:
        keeps, shape, tokens = mixer.keeps, mixer.shape, rows * (1 + drafts)
        self.rows, self.drafts, self.weights = rows, drafts, _with_numbers(mixer, device)
        self.row_bytes = sum(4 * torch.Size(part).numel() for part in keeps.state)
        self.layers = min(most_layers, max(2, int(_CACHE_BYTES / (rows * self.row_bytes))))
        draw = torch.Generator(device).manual_seed(4)

        def numbers(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=draw, device=device)

        sizes = [(rows, *part) for part in keeps.state] + [(rows, drafts, keeps.inputs)] * bool(drafts)
        self.states = [tuple(numbers(*part) for part in sizes) for _ in range(self.layers)]
        dtype, width = mixer.proj.weight.dtype, mixer.proj.weight.shape[0]
        self.projected = numbers(tokens, width).to(dtype)
        self.out = torch.empty((tokens, shape.inner), dtype=dtype, device=device)
        groups = mixer.shape.groups if isinstance(mixer, Mamba2) else mixer.shape.key_heads
        self.arrived = torch.zeros(rows * groups, dtype=torch.int32, device=device)
        self.batch = _batch(rows, drafts, device)
        self.dependent = device.type == "cuda" and dependent_launch_works()

    def run(self, tiling: StateTiling) -> None:
        """Of all layers, one after the other."""
        kernel: Callable[..., None] = delta_of_runs if self.drafts else delta_of_one_token
        if isinstance(self.weights, Mamba2):
            kernel = mamba2_of_runs
            if not self.drafts:
                kernel = partial(mamba2_of_one_token, normed=self.rows > 1 or self.weights.shape.groups > 1)
        for states in self.states:
            kernel(
                self.projected, self.weights, states, self.batch, self.out, self.arrived, dependent=self.dependent,
                tiling=tiling,
            )  # fmt: skip

    def left(self, tiling: StateTiling) -> list[torch.Tensor]:
        """What a run leaves of the first layer. The states are then what they were before."""
        first = self.states[0]
        before = [tensor.clone() for tensor in first]
        every, self.states = self.states, [first]
        self.run(tiling)
        self.states = every
        found = [self.out.clone(), *(tensor.clone() for tensor in first)]
        for tensor, old in zip(first, before, strict=True):
            tensor.copy_(old)
        return found

    @property
    def floor_us(self) -> float:
        """Of a layer: its rows' states read and written."""
        return 2 * self.rows * self.row_bytes / READ_BYTES_PER_S * 1e6


def _batch(rows: int, drafts: int, device: torch.device) -> ForwardBatch:
    """Rows that decode, each with the drafts of a run before that were all kept."""
    each = 1 + drafts

    def of_rows(value: int) -> torch.Tensor:
        return torch.full((rows,), value, dtype=torch.int32, device=device)

    return ForwardBatch(
        token_ids=torch.zeros(rows * each, dtype=torch.int64, device=device),
        positions=_POSITION + torch.arange(each, device=device).repeat(rows),
        slot_mapping=torch.zeros(rows * each, dtype=torch.int64, device=device),
        query_start_loc=torch.arange(0, rows * each + 1, each, dtype=torch.int32, device=device),
        seq_lens=of_rows(_POSITION + each),
        block_tables=torch.zeros((rows, 1), dtype=torch.int32, device=device),
        num_tokens=rows * each,
        num_rows=rows,
        max_seq_len=_POSITION + each,
        is_decode=True,
        decode_queries=each,
        state_slots=torch.arange(rows, dtype=torch.int32, device=device),
        replayed=of_rows(drafts),
        certain=of_rows(1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=NAMES, default=NAMES[0])
    parser.add_argument("--rows", default="1,8,32,64")
    parser.add_argument("--drafts", type=int, default=0, help="of a row (0)")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    mixer, device = mixer_of(chosen.shape), torch.device("cuda")
    if chosen.compile is not None:
        for tiling in list(tilings())[part_of(chosen.compile)]:
            Bench(mixer, 2, chosen.drafts, device).run(tiling)
        return
    compile_side_by_side("benchmarks.tune.states", [f"--shape={chosen.shape}", f"--drafts={chosen.drafts}"])
    for rows in map(int, chosen.rows.split(",")):
        bench = Bench(mixer, rows, chosen.drafts, device)
        default = STATES if rows > 1 else LONE_RUN if chosen.drafts else LONE_ROW
        usual = bench.left(default)
        found = []
        for tiling in dict.fromkeys((default, *tilings())):
            try:
                same = all(map(torch.equal, bench.left(tiling), usual))
                found.append((graph_us(partial(bench.run, tiling)) / bench.layers, tiling, same))
            except Exception as error:  # a way that this GPU can't hold
                print("   ", tiling, str(error)[:80].replace("\n", " "))
        found.sort(key=lambda one: one[0])
        print(f"{chosen.shape}, {rows} rows, {chosen.drafts} drafts: floor {bench.floor_us:.1f} µs", flush=True)
        for took, tiling, same in found[:_SHOWN] + [one for one in found[_SHOWN:] if one[1] == default]:
            note = " (the default)" if tiling == default else "" if same else " (other bits)"
            print(f"  {took:.1f} {tiling}{note}", flush=True)


if __name__ == "__main__":
    main()
