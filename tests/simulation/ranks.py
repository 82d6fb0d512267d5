"""Ranks of one model in the simulator: each has a whole hash model and falls behind by a seed, so that what is released
or staged anew before the last of them has ended changes its tokens. The engine sees the product's device over ranks."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import NEVER, Device, LaunchShape
from runahead.cuda_graphs.rings import RingLayout, RingMemory, cell_tag
from runahead.runtime.kernels.ranks import OneRank, Shard
from runahead.runtime.plan import shape_of
from runahead.runtime.ranks.ranked_device import RankedDevice
from runahead.runtime.ranks.segment import ENDED, SAMPLED, TAIL, Segment, SegmentLayout, segment_bytes
from tests.simulation.clock import TimedDevice
from tests.simulation.programs import SimulatedProgram

_TOKEN_BITS = 32
_PACES = ((0, 0, 0, 1), (0, 1, 2), (0,) * 12 + (9,))  # steps at a look


class Said(OneRank):
    """`Ranks` whose sums have one part: what the first rank says, which each of the others reads later."""

    def __init__(self, shard: Shard, words: Sequence[deque[NDArray[np.int32]]]) -> None:
        self.shard = shard  # type: ignore[misc]
        self._words = words  # of each other rank, or of this one alone

    def spread(self, words: NDArray[np.int32]) -> None:
        for each in self._words:
            if self.shard.is_first:
                each.append(words.copy())
            else:
                words[:] = each.popleft()


class Follower:
    """A rank from 1 on. most_behind: launches that rank 0 had ended and this rank had not begun, at most."""

    def __init__(self, program: SimulatedProgram, segment: Segment, rank: int, seed: int, launched: int) -> None:
        self.program = program
        self.marks = segment.marks(rank)
        self.most_behind = 0
        self._dice = random.Random(f"{seed} rank {rank}")
        self._pace = self._dice.choice(_PACES)
        self._launched = self._sampled = launched
        self._waiting = deque[int]()
        self._shape: LaunchShape | None = None  # between S and apply

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def launch(self, number: int) -> None:
        self._waiting.append(number)

    def go_on(self, first: RingMemory, sampled: int, ended: int) -> None:
        """Take some steps. S waits for rank 0's. first, sampled, ended: rank 0's rings and marks."""
        for _ in range(self._dice.choice(self._pace)):
            # F waits for what the first rank has drafted.
            first_has = sampled if self._shape is None else ended if self._shape.drafts else NEVER
            if self._waiting and self._waiting[0] <= first_has:
                self.most_behind = max(self.most_behind, ended - int(self.marks[ENDED]))
                self._step(first)

    def _step(self, first: RingMemory) -> None:
        rings = self.program.rows.rings
        if self._shape is None:
            number = self._waiting[0]
            shape = shape_of(rings.plan[rings.slot(number)])
            assert shape.number == number, f"launch {number} has found plan {shape.number}"
            self.program.sample(shape)
            if not self.program.copies(shape):
                self._check_cells(first.cells[rings.slot(number)], rings.cells[rings.slot(number)], number)
            self._shape, self.marks[SAMPLED] = shape, number
            if self._dice.random() < 0.5:
                self.marks[TAIL] = number
            return
        self.program.apply(self._shape)
        self.program.forward(self._shape)
        self.marks[TAIL] = self.marks[ENDED] = self._waiting.popleft()
        self._shape = None

    def _check_cells(self, first: NDArray[np.int64], own: NDArray[np.int64], number: int) -> None:
        written = first >> _TOKEN_BITS == cell_tag(number) >> _TOKEN_BITS
        assert np.array_equal(first[written], own[written]), f"launch {number}: ranks sampled different tokens"


class FirstDevice(TimedDevice):
    """Rank 0's. Whenever the host looks, the other ranks may go on."""

    followers: Sequence[Follower] = ()
    marks: NDArray[np.int64]

    def launch(self, shape: LaunchShape) -> None:
        super().launch(shape)
        for each in self.followers:
            each.launch(shape.number)

    def wait(self, sampled: int, ended: int, wake_fds: Sequence[int], timeout_s: float, in_tail: int = NEVER) -> None:
        super().wait(sampled, ended, wake_fds, timeout_s, in_tail)
        while not self._all_have_come(sampled, ended, in_tail) and any(each.has_work for each in self.followers):
            self._run(1)

    def _all_have_come(self, sampled: int, ended: int, in_tail: int) -> bool:
        least = min([self._ended, *(int(each.marks[ENDED]) for each in self.followers)])
        tail = min([self._tail, *(int(each.marks[TAIL]) for each in self.followers)])
        return min(self._sampled, least + 1) > sampled or least > ended or tail > in_tail

    def _run(self, steps: int) -> None:
        super()._run(steps)
        self.marks[:] = self._sampled, self._tail, self._ended
        for each in self.followers:
            each.go_on(self.rings, self._sampled, self._ended)


class _Programs:
    """Poisons the memory of every rank."""

    def __init__(self, programs: Sequence[SimulatedProgram]) -> None:
        self._programs = programs

    def __getattr__(self, name: str) -> Callable[[Any], None]:
        def poison(what: Any) -> None:
            for program in self._programs:
                getattr(program, name)(what)

        return poison


@cache
def _silent_pipe() -> tuple[int, int]:
    """One for all lives."""
    return os.pipe()


class _Simulated:
    """`Followers` that can't end by themselves."""

    def sentinels(self) -> Sequence[int]:
        return (_silent_pipe()[0],)

    def lost(self) -> str:
        return ""

    def close(self) -> None:
        pass


class Ranks:
    """The memory of several ranks, and what an engine needs of them. followers: set by `join`."""

    def __init__(self, count: int, layout: RingLayout, seed: int, launched: int) -> None:
        self._layout = SegmentLayout(count, layout, 1)
        self._segment = Segment(self._layout, memoryview(bytearray(segment_bytes(self._layout))), launched)
        self._segment.begin()
        self._seed, self._launched = seed, launched
        self.followers: list[Follower] = []
        self.rings = self._segment.rings(0)

    def join(self, own: FirstDevice, first: SimulatedProgram, make: Callable[[RingMemory], SimulatedProgram]) -> Device:
        """Return the engine's device. first: rank 0's program. make: the program of a rank, from its rings."""
        own.marks = self._segment.marks(0)
        if self._layout.ranks == 1:
            return own
        words = [deque[NDArray[np.int32]]() for _ in range(1, self._layout.ranks)]
        first.follow(Said(Shard(0, self._layout.ranks), words))
        for rank, heard in enumerate(words, 1):
            program = make(self._segment.rings(rank))
            program.follow(Said(Shard(rank, self._layout.ranks), [heard]))
            self.followers.append(Follower(program, self._segment, rank, self._seed, self._launched))
        own.followers = self.followers
        return RankedDevice(own, self._segment, _Simulated(), self._launched)

    def poisoned(self, first: SimulatedProgram) -> Any:
        """Return what poisons every rank's memory."""
        if not self.followers:
            return first
        return _Programs([first, *(each.program for each in self.followers)])
