"""What a service's chain did between two moments, by its own figures: what a client measures depends on the client,
too, and on a GPU on that most of all."""

from __future__ import annotations

from dataclasses import dataclass, fields

from runahead.v1 import GenerationServiceStub, ServerStats, StatsRequest


@dataclass(frozen=True, slots=True)
class ChainFigures:
    """Counters. firsts: launches after an idle chain. replays: of graphs. broken: launches that were not one graph.
    drafted, accepted: drafts that launches have looked at, and right ones. held: rows that launches brought no token
    of. device_s: seconds of launches and of the idle time between them, without that of an idle chain."""

    launches: int = 0
    firsts: int = 0
    overlapped: int = 0
    replays: int = 0
    broken: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    held: int = 0
    device_s: float = 0.0

    @classmethod
    def of(cls, stats: ServerStats) -> ChainFigures:
        chain, tokens = stats.chain, stats.tokens
        return cls(
            launches=chain.launches_retired,
            firsts=chain.firsts_after_idle,
            overlapped=chain.overlapped,
            replays=stats.graphs.replays,
            broken=sum(stats.graphs.fallbacks.values()),
            tokens=tokens.generated,
            drafted=sum(tokens.drafted.values()),
            accepted=sum(tokens.accepted.values()),
            held=tokens.held_rows,
            device_s=chain.device_busy_s + chain.device_idle_s,
        )

    def since(self, before: ChainFigures) -> ChainFigures:
        return ChainFigures(*(getattr(self, field.name) - getattr(before, field.name) for field in fields(self)))

    def and_of(self, other: ChainFigures) -> ChainFigures:
        return ChainFigures(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def launch_ms(self) -> float:
        """From one launch's end to the next one's, on the device's clock."""
        return 1e3 * self.device_s / max(1, self.launches)

    @property
    def tokens_a_launch(self) -> float:
        return self.tokens / max(1, self.launches)

    @property
    def line(self) -> str:
        """Format the figures in one line, without graphs if there are none."""
        overlap = self.overlapped / max(1, self.launches - self.firsts)
        one_graph = f", one graph {1 - self.broken / max(1, self.launches):.1%}" if self.replays else ""
        drafts = f", {self.accepted} of {self.drafted} drafts right" if self.drafted else ""
        return (
            f"{self.launch_ms:.3f} ms a launch, {self.tokens_a_launch:.2f} tokens in it, overlap {overlap:.3f}"
            f"{one_graph}{drafts}"
        )


async def chain_figures(stub: GenerationServiceStub) -> ChainFigures:
    """Read the figures since the service's start."""
    return ChainFigures.of((await stub.Stats(StatsRequest())).stats)


def flags_of(device: str) -> list[str]:
    """Return the flags of a measured service. On a CPU it has one thread, so that several can run side by side."""
    return ["--threads", "1"] if device == "cpu" else ["--device", device]
