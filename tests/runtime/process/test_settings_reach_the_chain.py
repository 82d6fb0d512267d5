"""What an engine is configured with is what its scheduler and its ledger work with, setting by setting."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from runahead.runtime.process.parts import make_scheduler
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.wire.engine_config import EngineConfig
from tests.gpu.gpu_chain import small_config

# With every size in it, as once they have been found out.
CONFIG = EngineConfig(
    model="any", run_ahead=2, max_rows=64, prefill_chunk=128, max_prefill_tokens=256, mixed_prefill_tokens=256,
    run_ahead_tokens=512,
)  # fmt: skip
READ: dict[str, Callable[[Scheduler], object]] = {
    "run_ahead": lambda scheduler: scheduler.ledger.run_ahead,
    "run_ahead_tokens": lambda scheduler: scheduler.ledger.run_ahead_tokens,
    "max_rows": lambda scheduler: scheduler.rows.max_rows,
    "block_size": lambda scheduler: scheduler.pool.block_size,
    "prefill_chunk": lambda scheduler: scheduler.limits.prefill_chunk,
    "max_prefill_tokens": lambda scheduler: scheduler.limits.max_prefill_tokens,
    "mixed_prefill_tokens": lambda scheduler: scheduler.limits.mixed_prefill_tokens,
    "penalty_slots": lambda scheduler: scheduler.holdings.penalty_slots.total,
    "prefix_cache": lambda scheduler: scheduler.limits.prefix_cache,
}
OTHERS = {
    "run_ahead": 4,
    "run_ahead_tokens": 700,
    "max_rows": 7,
    "block_size": 32,
    "prefill_chunk": 64,
    "max_prefill_tokens": 384,
    "mixed_prefill_tokens": 66,
    "penalty_slots": 3,
    "prefix_cache": False,
}


@pytest.mark.parametrize("name", READ)
def test_a_setting_is_what_the_chain_works_with(name: str) -> None:
    model = small_config(max_position_embeddings=2048)
    for value in (getattr(CONFIG, name), OTHERS[name]):
        config = msgspec.structs.replace(CONFIG, **{name: value})
        assert READ[name](make_scheduler(config, model, 200, 2048)) == value
    assert OTHERS[name] != getattr(CONFIG, name)


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 0), ("cuda", 512)])
def test_only_a_gpu_spreads_prompts_over_launches_that_are_one_graph(device: str, tokens: int) -> None:
    config = msgspec.structs.replace(CONFIG, device=device)
    scheduler = make_scheduler(config, small_config(max_position_embeddings=2048), 200, 2048)
    assert scheduler.limits.mixed_graph_tokens == tokens
