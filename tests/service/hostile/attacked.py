"""A whole service that is attacked, one front end of it, and somebody who uses it meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.local_service import LocalService
from tests.service.hostile.bystander import Bystander
from tests.service.side_clients import samples

FLAGS_BEHIND_A_PROXY: Final = "--upload-timeout-s 1 --stalled-stream-s 1 --max-rows 8".split()
FLAGS: Final = [*FLAGS_BEHIND_A_PROXY, *"--max-caller-streams 256 --max-caller-uploads 256".split()]
PATIENCE_S = 60.0
LABELS = ("grpc_method", "grpc_code", "reason")


@dataclass(frozen=True)
class Attacked:
    """front_end: its process."""

    service: LocalService
    front_end: int
    bystander: Bystander

    @property
    def port(self) -> int:
        return self.service.ports["service"]

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.front_end}/fd").iterdir()))

    @property
    def resident_mib(self) -> float:
        return int(Path(f"/proc/{self.front_end}/statm").read_text(encoding="ascii").split()[1]) * 4096 / (1 << 20)

    def figures(self) -> dict[str, float]:
        """What Prometheus gets, by names and those of the labels that are methods, codes and reasons."""
        found: dict[str, float] = {}
        for sample in samples(self.service.ports["metrics"]):
            labels = [f'{name}="{value}"' for name, value in sorted(sample.labels.items()) if name in LABELS]
            found[f"{sample.name}{{{','.join(labels)}}}" if labels else sample.name] = sample.value
        return found

    def wait_until(self, does: Mapping[str, int], since: Mapping[str, float]) -> None:
        """Returns when each of these figures is so much higher than it was."""
        deadline = time.monotonic() + PATIENCE_S
        while missing := self._missing(does, since):
            assert time.monotonic() < deadline, f"it did not come to {missing}"
            self.bystander.first_tokens_s(1)

    def _missing(self, does: Mapping[str, int], since: Mapping[str, float]) -> dict[str, float]:
        now = self.figures()
        grown = {name: now.get(name, 0.0) - since.get(name, 0.0) for name in does}
        return {name: grown[name] for name, least in does.items() if grown[name] < least}

    def wait_for_descriptors(self, count: int) -> None:
        """Returns when there are no more than so many."""
        deadline = time.monotonic() + PATIENCE_S
        while self.descriptors > count:
            assert time.monotonic() < deadline, f"{self.descriptors} descriptors are open, and {count} were before"
            self.bystander.first_tokens_s(1)
