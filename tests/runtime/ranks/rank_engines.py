"""Engines whose model several ranks have between them: as processes, as threads, and as segments of one process."""

from __future__ import annotations

import os
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from runahead.runtime.checkpoint import Checkpoint
from runahead.runtime.engine.loop import Engine
from runahead.runtime.engine.poison import Poison
from runahead.runtime.kernels.ranks import ONE_RANK, Ranks
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.load import load_model as load_model_of
from runahead.runtime.process import cpu, rank, rank_start
from runahead.runtime.process.parts import Assembled, forced_drafts
from runahead.runtime.process.rank_start import BlocksMade, BlocksOffered, Captured, RankLoaded, RankOrders
from runahead.runtime.programs.cpu.program import HostProgram
from runahead.runtime.ranks.ranked_device import RankedDevice
from runahead.runtime.ranks.segment import map_memory
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.runtime.assembled import assembled
from tests.runtime.chain import MemoryLinks
from tests.runtime.late_masks import LateMasks
from tests.runtime.ranks.segments import segmented

SIZES: Mapping[str, Any] = {
    "max_rows": 4, "block_size": 8, "prefill_chunk": 16, "max_prefill_tokens": 32, "num_blocks": 40, "threads": 1,
    "context_length": 96,
}  # fmt: skip


class ThreadRanks:
    """`RankProcesses`, of threads of this process. programs: of all ranks but the first."""

    def __init__(self, orders: Sequence[RankOrders]) -> None:
        self.programs: list[HostProgram] = []
        self._ended, self._tell = os.pipe()
        self._lost = ""
        self._closing = False
        self._say: list[queue.SimpleQueue[msgspec.Struct]] = [queue.SimpleQueue() for _ in orders]
        self._hear: list[queue.SimpleQueue[BlocksOffered]] = [queue.SimpleQueue() for _ in orders]
        self._threads = [
            threading.Thread(target=self._follow, args=(each, number), name=f"rank-{each.rank}", daemon=True)
            for number, each in enumerate(orders)
        ]
        self.memories = [map_memory(os.dup(each.descriptor), each.layout) for each in orders]
        for thread in self._threads:
            thread.start()

    def loaded(self) -> None:
        for said in self._say:
            answer = said.get(timeout=60.0)
            assert isinstance(answer, RankLoaded), answer

    def offer(self, blocks: int, snapshots: int) -> int:
        for heard in self._hear:
            heard.put(BlocksOffered(blocks, snapshots))
        answers = [said.get(timeout=60.0) for said in self._say]
        least = min(blocks, *(answer.blocks for answer in answers if isinstance(answer, BlocksMade)))
        for heard in self._hear:
            heard.put(BlocksOffered(least, snapshots))
        return least

    def captured(self, digest: str) -> None:
        assert [said.get(timeout=60.0) for said in self._say] == [Captured(digest)] * len(self._say)

    def sentinels(self) -> Sequence[int]:
        return (self._ended,)

    def lost(self) -> str:
        return self._lost

    def close(self) -> None:
        self._closing = True
        for thread in self._threads:
            thread.join(30.0)
            assert not thread.is_alive(), f"{thread.name} does not end"

    def _follow(self, orders: RankOrders, number: int) -> None:
        try:
            rank.follow(
                orders, self.memories[number], self._say[number].put, lambda kind: self._hear[number].get(timeout=60.0),
                lambda: None,
            )  # fmt: skip
        except Exception as error:
            self._lost = self._lost or f"rank {orders.rank} has ended ({error})"
        if not self._closing:
            os.write(self._tell, b"e")


@dataclass
class AllPrograms:
    """Poisons the memory of every rank. programs: of all of them."""

    programs: list[HostProgram] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[[Any], None]:
        def poison(what: Any) -> None:
            for program in self.programs:
                getattr(program, name)(what)

        return poison


@dataclass
class Said:
    """What an engine has said of a request, to the bit. prompt: log-probabilities of its prompt's tokens. ends: the
    reasons why it ended, one if all is well."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    prompt: list[tuple[int, bytes, bytes, bytes]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


@dataclass
class Life:
    """An engine and what it has been asked."""

    parts: Assembled
    engine: Engine
    links: MemoryLinks
    programs: list[HostProgram]

    def ask(
        self, handle: int, prompt: Sequence[int], tokens: int, sampling: SamplingParams | None = None,
        structure: str = "", **stopping: Any,
    ) -> None:  # fmt: skip
        limits = StoppingParams(tokens, **{"ignore_eos": True, **stopping})
        ids, sampling = np.asarray(prompt, np.int32).tobytes(), sampling or SamplingParams(temperature=0.0)
        self.links.tell(1, m.Submit(handle, f"r{handle}", ids, sampling, limits, structure=structure))

    def run(self, each_turn: Callable[[], None] = lambda: None) -> None:
        """Until nothing is left to do."""
        self.engine.turn()
        while len(self.engine.registry):
            each_turn()
            self.engine.turn()
        self.engine.drain("test")

    def close(self) -> None:
        self.parts.device.close()
        self.parts.masks.stop()

    def said(self) -> dict[int, Said]:
        """By handle."""
        found: dict[int, Said] = defaultdict(Said)
        for _, message in self.links.sent:
            if isinstance(message, m.PromptLogprobs):
                of_prompt = (message.offset, message.chosen, message.top_ids, message.top_logprobs)
                found[message.handle].prompt.append(of_prompt)
            if isinstance(message, m.Output):
                handles, ids = np.frombuffer(message.handles, np.int64), np.frombuffer(message.tokens, np.int32)
                for handle, token in zip(handles.tolist(), ids.tolist(), strict=True):
                    found[handle].tokens.append(token)
                for logprobs in message.logprobs:
                    found[int(handles[logprobs.index])].logprobs.append(
                        msgspec.msgpack.encode((logprobs.chosen, logprobs.top_ids, logprobs.top_logprobs))
                    )
                for end in message.finished:
                    found[end.handle].ends.append(end.reason)
        return dict(found)


def _late_masks(seed: int, config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, context: int) -> LateMasks:
    return LateMasks(config.max_rows, seed, forced_drafts(config, model), vocab=model.vocab_size)


def life(
    folder: Path, depth: int, monkeypatch: pytest.MonkeyPatch, *, ranks: int = 1, threads: bool = False,
    segments: int = 0, has_masks: bool = False, **settings: Any,
) -> Life:  # fmt: skip
    """ranks: of the engine, as threads of this process or as processes. segments: the oracle's, in their place.
    has_masks: rows may have a made-up grammar, and their masks come late."""
    programs: list[HostProgram] = []
    with monkeypatch.context() as patched:
        build = cpu.host_program

        def host_program(*given: Any) -> HostProgram:
            programs.append(build(*given))
            return programs[-1]

        patched.setattr(cpu, "host_program", host_program)
        if has_masks:
            patched.setattr(cpu, "make_masks", partial(_late_masks, depth))
        if threads:
            patched.setattr(rank_start, "RankProcesses", ThreadRanks)
        if segments:
            load: Any = load_model_of

            def load_model(*given: Any) -> Decoder:
                def segment(ranks: Ranks) -> Decoder:
                    *before, own, quantize, kv_dtype, _ = given
                    assert own is ONE_RANK, "ranks are in another place"
                    return load(*before, ranks, quantize, kv_dtype)

                decoder: Decoder = segmented(segment, segments)
                return decoder

            patched.setattr(cpu, "load_model", load_model)
        config = EngineConfig(
            model=str(folder), run_ahead=depth, tensor_parallel=ranks, **{**SIZES, "jitter_seed": depth, **settings}
        )
        before = torch.get_num_threads()
        parts = assembled(config)
        torch.set_num_threads(before)
    poison = parts.poison
    if poison is not None:
        poison = Poison(AllPrograms(programs), parts.device.rings)
    links = MemoryLinks()
    engine = Engine(parts.device, parts.scheduler, links, max_queue=20, poison=poison, masks=parts.masks)
    assert isinstance(parts.device, RankedDevice) == (ranks > 1)
    return Life(parts, engine, links, programs)
