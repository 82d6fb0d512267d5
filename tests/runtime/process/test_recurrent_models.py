"""How an engine of a model with recurrent states is put together: what it takes, what it says, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.models.memory import KeptBytes
from runahead.runtime.models.read_config import load_config
from runahead.runtime.process.assemble import assemble
from runahead.runtime.process.cuda import check_layers
from runahead.runtime.process.parts import Assembled, blocks_in, check_blocks, state_bytes
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig
from tests.runtime.models.checkpoints import CASES, save

BAMBA = next(case for case in CASES if case.name == "bamba")
# Two layers, float32: 3 tokens of 2 * 64 + 2 * 16 channels, and 4 heads of 32 numbers with 16 each.
STATE_BYTES = 2 * 4 * (3 * (128 + 32) + 4 * 32 * 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bamba")
    save(BAMBA, path)
    return path


def started(folder: Path, **settings: object) -> Assembled:
    config = EngineConfig(model=str(folder), max_rows=4, num_blocks=40, threads=1, **settings)  # type: ignore[arg-type]
    parts = assemble(config, lambda done, total: None)
    parts.device.close()
    return parts


def test_a_row_has_a_state_slot_whose_bytes_are_told_and_logged(folder: Path) -> None:
    with capture_logs() as events:
        parts = started(folder)
    (memory,) = [event for event in events if event["event"] == "memory"]
    program = parts.device._program  # type: ignore[attr-defined]
    tensors = [tensor for each in program._cache.states for tensor in each]
    assert parts.info.state_bytes == STATE_BYTES
    assert sum(tensor.nbytes for tensor in tensors) == 4 * STATE_BYTES == memory["state_bytes"]
    assert all(tensor.dtype is torch.float32 for tensor in tensors)
    assert parts.scheduler.holdings.state_slots.total == 4


def test_no_prefix_is_found_and_the_log_says_why(folder: Path) -> None:
    with capture_logs() as events:
        parts = started(folder)
    assert [event["why"] for event in events if event["event"] == "prefix_cache_off"] == [
        "BambaForCausalLM keeps recurrent states, of which none is cached"
    ]
    assert not parts.info.prefix_cache and not parts.scheduler.limits.finds_prefixes
    with capture_logs() as events:
        started(folder, prefix_cache=False)
    assert not [event for event in events if event["event"] == "prefix_cache_off"], "as it was asked for"


def test_drafts_are_refused_before_a_weight_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runahead.runtime.process.cpu.load_model", lambda *parts: pytest.fail("the weights were read"))
    with pytest.raises(ConfigError, match=r"drafter ngram can't be combined with BambaForCausalLM.* set drafter none"):
        started(folder, drafter="ngram")


def test_a_gpu_is_refused_by_a_sentence(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"BambaForCausalLM has layers with recurrent states.*; --device cpu serves"):
        check_layers(load_config(open_checkpoint(folder)))


def test_a_start_on_a_gpu_says_so_before_a_weight_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = EngineConfig(model=str(folder), device="cuda", max_rows=4)
    with pytest.raises(ConfigError, match=r"BambaForCausalLM has layers with recurrent states"):
        assemble(config, lambda done, total: pytest.fail("the weights were read"))


def test_a_model_of_attention_alone_keeps_no_state(tmp_path: Path) -> None:
    save(CASES[0], tmp_path)
    assert state_bytes(load_config(open_checkpoint(tmp_path))) == 0


def test_a_model_without_attention_is_refused_where_the_states_of_its_rows_do_not_fit() -> None:
    config, kept = EngineConfig(model="", max_rows=512), KeptBytes(block=0, row=50 << 20)
    assert blocks_in((512 * 50 << 20) - 1, config, kept, 1000) == 0
    assert blocks_in(512 * 50 << 20, config, kept, 1000) == 512 * 63 + 1
    with pytest.raises(ConfigError, match=r"0 KV blocks beside the states of 512 rows, which take 25600 MiB"):
        check_blocks(0, config, 1000, kept)


def test_where_the_states_leave_no_memory_for_blocks_the_sentence_names_the_rows() -> None:
    config = EngineConfig(model="", max_rows=16)
    with pytest.raises(ConfigError, match=r"0 KV blocks beside the states of 16 rows, which take 32 MiB; .*max_rows"):
        check_blocks(0, config, 1000, KeptBytes(block=1000, row=2 << 20))
    with pytest.raises(ConfigError, match=r"memory holds 0 KV blocks; one .* set context_length to less"):
        check_blocks(0, config, 1000, KeptBytes(block=1000, row=0))
