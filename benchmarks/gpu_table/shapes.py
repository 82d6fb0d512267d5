"""The models that are measured: shapes of known ones with random weights, written as a checkpoint of a config.json."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from runahead.runtime.checkpoint import BUNDLED_FOLDER, open_checkpoint
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.read_config import load_config
from runahead.runtime.rounding import ceil_div


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths in tokens. A step is what `long` tokens of a batch take, less what `short` tokens take, over the rest.

    prompt: of every row. context: the engine's longest request. lengths: prompts of the table of
    lengths. ragged: the shortest and the longest prompt of its batch of many lengths. first: prompts of the table of
    first tokens, and beside: the rows that decode meanwhile. together: how many prompts come at once beside them, of
    how many tokens each.
    """

    prompt: int
    short: int
    long: int
    context: int
    lengths: tuple[int, ...]
    ragged: tuple[int, int]
    first: tuple[int, ...] = ()
    beside: int = 0
    together: tuple[int, int] = (0, 0)

    @property
    def steps(self) -> int:
        return self.long - self.short

    @property
    def chained(self) -> int:
        """Tokens of a row where bare graphs are measured: the first to begin are not to end before the last step."""
        return self.long + 40

    @property
    def generated(self) -> float:
        """Tokens that a row has generated at the middle of the steps that are measured."""
        return (self.short + self.long) / 2

    @property
    def longest(self) -> int:
        """Tokens that a request of the table of lengths may hold, in blocks of any size up to 256."""
        return 256 * ceil_div(max(*self.lengths, self.ragged[1]) + self.long + 1, 256)


FULL: Final = Workload(512, 32, 288, 4096, (4096, 16384), (128, 8192), (128, 512, 2048, 8192, 32768), 32, (4, 8192))
SMALL: Final = Workload(
    24, 4, 20, 128, (40, 90), (8, 70), (16, 300), 3, (2, 300)
)  # for trying the benchmark itself, on the CPU too


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder. batches: rows that decode together, ascending. keys: of config.json."""

    name: str
    batches: tuple[int, ...]
    keys: Mapping[str, Any]
    workload: Workload = FULL

    def write(self, folder: Path) -> ModelConfig:
        """A checkpoint without tensors, for `load_format` dummy. Returns what the product reads in it."""
        (folder / "config.json").write_text(json.dumps(dict(self.keys)), encoding="utf-8")
        return load_config(open_checkpoint(folder))

    def described(self) -> ModelConfig:
        """What the product reads in the checkpoint."""
        with tempfile.TemporaryDirectory(prefix="runahead-") as folder:
            return self.write(Path(folder))


# 0.6B and 30B-A3B are Qwen3's, 1B, 8B and 70B Llama's, 7B-A1B is Granite 4.0 H Tiny, 8B-hybrid is Nemotron-H 8B,
# 9B-hybrid is Bamba 9B, and 40B-A3B-delta is half the layers of Qwen3-Next 80B-A3B, so that one GPU holds it.
SHAPES: Final = {
    name: Shape(name, tuple(one["batches"]), one["keys"], SMALL if one["small"] else FULL)
    for name, one in json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8")).items()
}


@contextlib.contextmanager
def random_weights(shape: str) -> Iterator[Path]:
    """A checkpoint's folder for `--load-format dummy`: of this shape, with the bundled model's tokenizer, which has
    fewer tokens than the shape's vocabulary."""
    with tempfile.TemporaryDirectory(prefix="runahead-") as folder:
        SHAPES[shape].write(Path(folder))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(BUNDLED_FOLDER / name, folder)
        yield Path(folder)
