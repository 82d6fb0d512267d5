"""Measures what the exact kernels cost on this GPU: `python -m benchmarks.tune.exact`.

A model of the shape with random weights is opened twice, with the exact kernels and with the fastest, and bare decode
graphs of every number of rows are timed in turns. How long the exact step takes, in parts of the fastest, goes into
`measured_exact.json` beside the kernels, by GPU, model and rows; what stands there of others stays. A start takes the
exact kernels by itself where they are known to cost little in every bucket that it serves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from benchmarks.gpu_table.decode import Batch, bare_graphs, fill_cache
from benchmarks.gpu_table.engines import Bench, opened
from benchmarks.gpu_table.settings import Settings, engine_settings
from benchmarks.gpu_table.shapes import SHAPES, SMALL, Shape, Workload
from runahead.cuda_graphs.buckets import buckets_for
from runahead.runtime.kernels.triton.exactness import TABLE, shape_key
from runahead.runtime.rounding import ceil_div
from runahead.runtime.wire.engine_config import DeviceName

_BLOCK_SIZE: Final = 16
# As long a context as in the table of steps, by fewer of them. A prompt of more blocks would be looked up in the prefix
# cache in pieces, so that one row begins a launch, and the first of many would end before the last begins.
_SHORT: Final = Workload(prompt=512, short=128, long=192, context=1024, lengths=(1024,), ragged=(1, 1))
_DIGITS: Final = 4

Table = dict[str, dict[str, dict[str, float]]]


def ratios(
    shape: Shape, device: DeviceName, buckets: Sequence[int], rounds: int, goes_on: Callable[[], bool]
) -> Iterator[tuple[str, int, float]]:
    """The model's key, rows, and the ratio of the step with the exact kernels to that with the fastest: the medians of
    so many rounds. goes_on: asked before each number of rows."""
    prompt, launches = shape.workload.prompt, shape.workload.chained
    settings = _settings(shape.workload, device, buckets[-1])
    with (
        opened(shape, settings | {"exact": "on"}, launches) as exact,
        opened(shape, settings | {"exact": "off"}, launches) as fastest,
    ):
        weights = exact.model.weights
        key = shape_key(weights.layers, exact.model.config.vocab_size, exact.model.dtype)
        for bench in (exact, fastest):
            fill_cache(bench, (prompt,) * buckets[-1])
        for rows in buckets:
            if not goes_on():
                return
            batch = Batch((prompt,) * rows)
            steps = [(_step_ms(exact, batch), _step_ms(fastest, batch)) for _ in range(rounds)]
            slow, fast = (statistics.median(each) for each in zip(*steps, strict=True))
            print(
                f"{shape.name}, {rows} rows: {slow:.4f} ms exact, {fast:.4f} ms fastest, {slow / fast:.4f}", flush=True
            )
            yield key, rows, round(slow / fast, _DIGITS)


def _step_ms(bench: Bench, batch: Batch) -> float:
    return bare_graphs(bench, batch, 1).step_ms


def _settings(workload: Workload, device: DeviceName, max_rows: int) -> Settings:
    """KV blocks for what is measured and no more, so that two engines fit."""
    each = ceil_div(workload.prompt + workload.chained, _BLOCK_SIZE) + 1
    blocks = max(max_rows * each, ceil_div(workload.context, _BLOCK_SIZE)) + 1
    sizes: Settings = {"block_size": _BLOCK_SIZE, "num_blocks": blocks}
    return engine_settings(device, max_rows, workload.context) | sizes


def _shape(name: str) -> Shape:
    """A shape that the benchmarks know, or that of a checkpoint's folder."""
    if name in SHAPES:
        known = SHAPES[name]
        return known if known.workload is SMALL else replace(known, workload=_SHORT)
    keys = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    return Shape(Path(name).name, (), keys, _SHORT)


def _write(path: Path, gpu: str, key: str, rows: int, ratio: float) -> None:
    """One figure more in the file."""
    table: Table = json.loads(path.read_text()) if path.exists() else {}
    of_model = table.setdefault(gpu, {}).setdefault(key, {})
    of_model[str(rows)] = ratio
    table[gpu][key] = dict(sorted(of_model.items(), key=lambda item: int(item[0])))
    path.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="0.6B,1B,8B", help="shapes of the benchmarks, or folders of checkpoints")
    parser.add_argument("--max-rows", type=int, default=256, help="every bucket up to it (256)")
    parser.add_argument("--rounds", type=int, default=3, help="of each number of rows, both ways (3)")
    parser.add_argument("--seconds", type=float, default=400, help="nothing is begun after so many")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: for trying it; needs --out")
    parser.add_argument("--out", type=Path, help="another table than the kernels'")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cpu" and chosen.out is None:
        parser.error("--device cpu tries the script, and its figures belong into no table: name another with --out")
    gpu = torch.cuda.get_device_name() if chosen.device == "cuda" else "cpu"
    begun = time.monotonic()
    for name in chosen.models.split(","):
        if time.monotonic() - begun > chosen.seconds:
            print(f"{name}: the time is up", file=sys.stderr)
            continue
        buckets = buckets_for(chosen.max_rows)
        found = ratios(
            _shape(name), chosen.device, buckets, chosen.rounds, lambda: time.monotonic() - begun <= chosen.seconds
        )
        for key, rows, ratio in found:
            _write(chosen.out or TABLE, gpu, key, rows, ratio)


if __name__ == "__main__":
    main()
