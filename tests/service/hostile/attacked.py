"""A whole service that is attacked, one front end of it, and somebody who uses it meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.local_service import LocalService
from tests.service.hostile.bystander import Bystander

FLAGS_BEHIND_A_PROXY: Final = "--upload-timeout-s 1 --stalled-stream-s 1 --max-rows 8".split()
FLAGS: Final = [*FLAGS_BEHIND_A_PROXY, *"--max-caller-streams 256 --max-caller-uploads 256".split()]
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Attacked:
    """front_end: its process."""

    service: LocalService
    front_end: int
    bystander: Bystander

    @property
    def port(self) -> int:
        return int(self.service.url.rpartition(":")[2])

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.front_end}/fd").iterdir()))

    @property
    def resident_mib(self) -> float:
        return int(Path(f"/proc/{self.front_end}/statm").read_text(encoding="ascii").split()[1]) * 4096 / (1 << 20)

    def wait_for_descriptors(self, count: int) -> None:
        """Returns when there are no more than so many."""
        deadline = time.monotonic() + PATIENCE_S
        while self.descriptors > count:
            assert time.monotonic() < deadline, f"{self.descriptors} descriptors are open, and {count} were before"
            self.bystander.first_tokens_s(1)
