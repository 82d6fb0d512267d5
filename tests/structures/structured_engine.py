"""A whole engine in one process that follows grammars: the bundled tokenizer, random weights, its own mask worker."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer

from runahead.runtime import models
from runahead.runtime.engine.loop import Engine
from runahead.runtime.masks.masks import Masks
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.runtime.wire.parameters import FinishReason, SamplingParams, StoppingParams
from runahead.runtime.wire.prompts import prepared_submit
from runahead.service.structures.grammar_text import grammar_text
from tests.runtime.assembled import assembled
from tests.runtime.chain import MemoryLinks

BUNDLED: Final = Path(models.__path__[0]) / "bundled"
_MOST_DEPTH: Final = 64


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


@cache
def spaces() -> tuple[int, ...]:
    """Tokens of nothing but space, which a model that draws at random would say most of the time between two tokens."""
    known = tokenizer()
    return tuple(
        one for one in range(known.get_vocab_size()) if known.decode([one]) and not known.decode([one]).strip()
    )


def grammar_of(schema: Mapping[str, Any] | bool) -> str:
    """What a front end sends for a JSON Schema."""
    return grammar_text("json_schema", json.dumps(schema), _MOST_DEPTH)[0]


@dataclass
class StructuredEngine:
    """tokens, ends: by handle."""

    engine: Engine
    links: MemoryLinks
    masks: Masks
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, FinishReason] = field(default_factory=dict)

    def submit(self, handle: int, *, structure: str = "", sampling: SamplingParams | None = None, **stop: Any) -> None:
        """Ask for a request whose prompt is a function of its handle."""
        prompt = np.random.default_rng(handle).integers(20, 1000, 3 + handle % 9).astype(np.int32)
        drawn = sampling or SamplingParams(seed=handle, bias_ids=spaces(), bias_values=(-50.0,) * len(spaces()))
        block_size = self.engine.scheduler.pool.block_size
        stopping = StoppingParams(**stop)
        self.links.tell(
            1,
            prepared_submit(handle, f"r{handle}", prompt, drawn, stopping, block_size=block_size, structure=structure),
        )

    def run(self) -> None:
        """Turn until nothing is left to do."""
        self.engine.turn()
        while len(self.engine.registry) or self.engine.ledger.in_flight or self.engine.ledger.owes_a_launch:
            self.turn()
        self.engine.drain("test")
        self.read()

    def turn(self) -> None:
        self.engine.turn()
        self.read()

    def read(self) -> None:
        """What was said since the last look."""
        sent, self.links.sent = self.links.sent, []
        for _, message in sent:
            assert not isinstance(message, m.Refused), message
            if isinstance(message, m.Output):
                handles = np.frombuffer(message.handles, np.int64).tolist()
                for handle, token in zip(handles, np.frombuffer(message.tokens, np.int32).tolist(), strict=True):
                    self.tokens.setdefault(handle, []).append(token)
                for end in message.finished:
                    assert end.handle not in self.ends, "a request has ended twice"
                    self.ends[end.handle] = FinishReason(end.reason)

    def text(self, handle: int) -> str:
        """What a request has said, without the token that ends it."""
        text: str = tokenizer().decode(self.tokens[handle], skip_special_tokens=True)
        return text


@contextmanager
def structured_engine(depth: int, **config: Any) -> Iterator[StructuredEngine]:
    """An engine over the bundled model as its configuration makes it, without prefix cache, on one thread."""
    threads = torch.get_num_threads()
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "max_rows": 8,
        "context_length": 512,
        "device": "cpu",
        "threads": 1,
        "prefix_cache": False,
        **config,
    }
    parts = assembled(EngineConfig(model=str(BUNDLED), run_ahead=depth, **settings))
    assert parts.info.structures, "the engine says that it follows no grammars"
    links = MemoryLinks()
    engine = Engine(parts.device, parts.scheduler, links, max_queue=1000, masks=parts.masks)
    try:
        yield StructuredEngine(engine, links, parts.masks)
    finally:
        parts.masks.stop()
        parts.device.close()
        torch.set_num_threads(threads)
