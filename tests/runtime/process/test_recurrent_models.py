"""How an engine of a model with recurrent states is put together: what it takes, what it says, what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from structlog.testing import capture_logs

from runahead.runtime.checkpoint import CheckpointError, open_checkpoint
from runahead.runtime.models.memory import KeptBytes
from runahead.runtime.models.read_config import load_config
from runahead.runtime.process import cuda
from runahead.runtime.process.parts import (
    Assembled,
    blocks_in,
    bytes_kept,
    check_blocks,
    snapshot_tokens,
    snapshots_in,
    state_bytes,
)
from runahead.runtime.programs.cuda.draft_head import TritonHead
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig, check_config
from tests.runtime.assembled import assembled
from tests.runtime.models.checkpoints import CASES, save
from tests.runtime.models.qwen_heads import HEADED, save_with_qwen_head
from tests.runtime.process.test_captures_logged import CapturingDevice, a_gpu_on_the_cpu

__all__ = ["a_gpu_on_the_cpu"]  # a fixture

BAMBA = next(case for case in CASES if case.name == "bamba")
# Two layers, float32: 3 tokens of 2 * 64 + 2 * 16 channels, and 4 heads of 32 numbers with 16 each.
STATE_BYTES = 2 * 4 * (3 * (128 + 32) + 4 * 32 * 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bamba")
    save(BAMBA, path)
    return path


def started(folder: Path, **settings: object) -> Assembled:
    settings = {"device": "cpu", **settings}
    threads = int(settings["device"] == "cpu")
    config = EngineConfig(model=str(folder), max_rows=4, num_blocks=40, threads=threads, **settings)  # type: ignore[arg-type]
    parts = assembled(config)
    parts.device.close()
    return parts


def test_a_row_has_a_state_slot_whose_bytes_are_told_and_logged(folder: Path) -> None:
    with capture_logs() as events:
        parts = started(folder, state_snapshot_blocks=4)
    (memory,) = [event for event in events if event["event"] == "memory"]
    program = parts.device._program  # type: ignore[attr-defined]
    tensors = [tensor for each in program._cache.states for tensor in each]
    assert parts.info.state_bytes == STATE_BYTES
    assert sum(tensor.nbytes for tensor in tensors) == 8 * STATE_BYTES
    assert memory["state_bytes"] == memory["snapshot_bytes"] == 4 * STATE_BYTES, "as many snapshots as rows"
    assert memory["pool_bytes"] == memory["kv_bytes"] + 8 * STATE_BYTES
    assert all(tensor.dtype is torch.float32 for tensor in tensors)
    assert parts.scheduler.holdings.state_slots.total == 4


def test_prefixes_are_found_up_to_snapshots_of_which_there_are_as_many_as_is_asked_for(folder: Path) -> None:
    parts = started(folder, state_snapshots=7, state_snapshot_blocks=3)
    assert (parts.info.prefix_cache, parts.info.snapshots, parts.info.snapshot_blocks) == (True, 7, 3)
    assert (parts.scheduler.holdings.snapshots.total, parts.scheduler.limits.snapshot_tokens) == (7, 48)
    assert snapshot_tokens(EngineConfig(model="", block_size=32)) == 512 == snapshot_tokens(EngineConfig(model=""))


def test_without_a_prefix_cache_there_are_snapshots_for_shared_prompts_alone(folder: Path) -> None:
    with capture_logs() as events:
        parts = started(folder, prefix_cache=False)
    (memory,) = [event for event in events if event["event"] == "memory"]
    assert (memory["snapshot_bytes"], parts.info.snapshots, parts.info.snapshot_blocks) == (4 * STATE_BYTES, 4, 0)
    assert not parts.info.prefix_cache and not parts.scheduler.limits.finds_prefixes
    assert not [event for event in events if event["event"] == "prefix_cache_off"], "as it was asked for"
    kept = KeptBytes(block=1000, row=1 << 20, snapshot=1 << 20)
    found = {
        cached: snapshots_in(EngineConfig(model="", max_rows=8, prefix_cache=cached), kept, 4096, None)
        for cached in (True, False)
    }
    assert found == {True: 8, False: 4}


def test_where_no_snapshot_has_room_no_prefix_is_found_and_the_log_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runahead.runtime.process.parts.snapshots_in", lambda *sizes: 0)
    with capture_logs() as events:
        parts = started(folder, state_snapshot_blocks=4)
    assert [event["why"] for event in events if event["event"] == "prefix_cache_off"] == [
        "BambaForCausalLM keeps recurrent states, and no snapshot of one has room"
    ]
    assert not parts.info.prefix_cache and not parts.scheduler.limits.finds_prefixes


def test_where_no_request_reaches_a_border_no_prefix_is_found_and_the_log_says_why(folder: Path) -> None:
    with capture_logs() as events:
        parts = started(folder)
    (memory,) = [event for event in events if event["event"] == "memory"]
    assert (memory["snapshot_bytes"], parts.info.snapshots, parts.info.snapshot_blocks) == (4 * STATE_BYTES, 4, 0)
    assert not parts.info.prefix_cache and not parts.scheduler.limits.finds_prefixes
    assert [event["why"] for event in events if event["event"] == "prefix_cache_off"] == [
        "BambaForCausalLM keeps recurrent states, and with a snapshot every 512 tokens a context of 256 has none to go "
        "on from"
    ]


def test_the_last_token_that_a_request_may_begin_with_is_one_behind_a_border() -> None:
    config, kept = EngineConfig(model="", max_rows=8, state_snapshot_blocks=2), KeptBytes(block=1000, row=1 << 20)
    assert [snapshots_in(config, kept, context, None) for context in (32, 33, 34)] == [4, 4, 8]


@pytest.mark.parametrize("asked", [{"state_snapshots": 3}, {"state_snapshot_blocks": 16}])
def test_snapshots_that_no_request_could_begin_with_are_refused(folder: Path, asked: dict[str, int]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"states are kept every (512|256) tokens of a request \(state_snapshot_blocks\), and none goes on from "
        r"there in a context of 256: set state_snapshot_blocks to less, or context_length to more",
    ):
        started(folder, **asked)


@pytest.mark.parametrize("setting", ["state_snapshots", "state_snapshot_blocks"])
def test_snapshots_that_could_have_no_effect_are_refused(folder: Path, tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"{setting} \(3\) has no effect without prefix_cache"):
        started(folder, prefix_cache=False, **{setting: 3})
    check_config(msgspec.structs.replace(EngineConfig(model=""), device="cuda", **{setting: 3}))
    save(CASES[0], tmp_path)
    with pytest.raises(ConfigError, match=rf"{setting} \(3\) has no effect with LlamaForCausalLM, which keeps no"):
        started(tmp_path, **{setting: 3})


def test_snapshots_take_a_quarter_of_what_states_leave_where_blocks_are_sized_by_memory() -> None:
    config, kept = EngineConfig(model="", max_rows=8), KeptBytes(block=1000, row=1 << 20, snapshot=1 << 20)
    assert snapshots_in(config, kept, 1000, 8 << 20) == 0
    assert snapshots_in(config, kept, 1000, 28 << 20) == 5
    assert blocks_in(28 << 20, config, kept, 1 << 20, 5) == (15 << 20) // 1000
    assert snapshots_in(config, kept, 1000, 1 << 30) == snapshots_in(config, kept, 1000, None) == 8
    with pytest.raises(ConfigError, match=r"states of 8 rows and 5 snapshots of states, which take 13 MiB.*snapshots"):
        check_blocks(2, config, 1000, kept, 5)


@pytest.mark.parametrize(("spare_kib", "snapshots"), [(-1, 0), (1023, 0), (1024, 1), (3 * 1024, 3)])
def test_snapshots_that_nobody_asked_for_leave_one_request_of_full_length_its_blocks(
    spare_kib: int, snapshots: int
) -> None:
    config, kept, context = (
        EngineConfig(model="", max_rows=8),
        KeptBytes(block=1 << 20, row=1 << 20, snapshot=1 << 20),
        16 * 99,
    )
    memory = ((8 + 100) << 20) + (spare_kib << 10)
    found = snapshots_in(config, kept, context, memory)
    assert found == snapshots
    if spare_kib >= 0:
        check_blocks(blocks_in(memory, config, kept, context, found), config, context, kept, found)


def test_a_head_is_refused_before_a_weight_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runahead.runtime.process.cpu.load_model", lambda *parts: pytest.fail("the weights were read"))
    with pytest.raises(
        ConfigError, match=r"drafter eagle can't .* BambaForCausalLM.*: no head of EAGLE .*; set drafter none or ngram$"
    ):
        started(folder, drafter="eagle", draft_model="head")
    with pytest.raises(
        ConfigError, match=r"drafter model can't .* BambaForCausalLM.*: a smaller model drafts only for models that"
    ):
        started(folder, drafter="model", draft_model="smaller")
    with pytest.raises(
        CheckpointError, match=r"drafter mtp .* BambaForCausalLM has none .*; MiMo.*, Qwen3NextForCausalLM, .*"
    ):
        started(folder, drafter="mtp")


def test_the_head_of_a_model_with_states_is_told_and_counted(tmp_path: Path) -> None:
    tensors = save_with_qwen_head(tmp_path)
    with capture_logs() as events:
        parts = started(tmp_path, drafter="mtp", draft_tokens=3, state_snapshot_blocks=2)
    (memory,) = [event for event in events if event["event"] == "memory"]
    program = parts.device._program  # type: ignore[attr-defined]
    cache, head = program._cache, program._head._cache
    parameters = sum(tensor.numel() for tensor in tensors.values())
    assert (parts.info.drafters, parts.info.drafter) == (("ngram", "mtp"), "mtp")
    assert parts.info.draft_parameters == parameters and memory["draft_weight_bytes"] == 4 * parameters
    # A slot holds the inputs of three drafts, a block the head's keys, values and hidden states beside the model's.
    runs = sum(run.nbytes for run in cache.runs)
    assert runs == 4 * 3 * 2 * 4 * (2 * 2 * 12 + 4 * 20 + 2 * 4)
    assert memory["state_bytes"] == 4 * parts.info.state_bytes == memory["snapshot_bytes"] + runs
    kept = [*head.entries.keys, *head.entries.values]
    assert len(kept) == 2 and head.entries.states == ()
    assert memory["draft_kv_bytes"] == sum(tensor.nbytes for tensor in kept) + head.hidden.nbytes
    assert parts.scheduler.limits.drafts == 3 and not parts.scheduler.limits.history


def test_a_start_with_other_drafters_names_the_head_that_the_model_comes_with(tmp_path: Path) -> None:
    save(HEADED["qwen3_next"], tmp_path)
    with pytest.raises(ConfigError, match=r"Qwen3NextForCausalLM.*; set drafter none, ngram or mtp$"):
        started(tmp_path, drafter="eagle", draft_model="head")
    with pytest.raises(CheckpointError, match=r"^drafter mtp .* lacks it: there is no tensor mtp.fc.weight, nor"):
        started(tmp_path, drafter="mtp")
    assert started(tmp_path).info.drafters == ("ngram",)


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
def test_a_start_on_a_gpu_counts_the_head_and_the_inputs_of_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as on a CPU; graphs, buffers and scheduler are made for the drafts of a head. A drafter that is refused
    beside states is refused there by the sentence that names the head."""
    tensors, made = save_with_qwen_head(tmp_path), list[dict[str, Any]]()

    def device(*parts: object, **sizes: Any) -> CapturingDevice:
        made.append(sizes)
        return CapturingDevice(*parts, **sizes)

    def program(*parts: object, **sizes: Any) -> SimpleNamespace:
        made.append(sizes)
        return SimpleNamespace()

    asked: dict[str, Any] = {"drafter": "mtp", "draft_tokens": 3, "state_snapshot_blocks": 2, "dtype": "float32"}
    with capture_logs() as events:
        on_cpu = started(tmp_path, **asked)
    (expected,) = [event for event in events if event["event"] == "memory"]
    monkeypatch.setattr(cuda, "CudaDevice", device)
    monkeypatch.setattr(cuda, "TritonProgram", program)
    with capture_logs() as events:
        parts = started(tmp_path, **asked, device="cuda")
    (memory,) = [event for event in events if event["event"] == "memory"]
    names = ("kv_bytes", "draft_kv_bytes", "state_bytes", "snapshot_bytes", "pool_bytes", "draft_weight_bytes")
    assert {name: memory[name] for name in names} == {name: expected[name] for name in names}
    assert memory["draft_weight_bytes"] == 4 * sum(tensor.numel() for tensor in tensors.values())
    assert parts.info.state_bytes == on_cpu.info.state_bytes
    assert (parts.info.drafter, parts.info.drafters, parts.info.snapshots) == ("mtp", ("ngram", "mtp"), 4)
    assert len(made) == 4, "a trial, and what serves"
    for of_program, of_device in zip(made[::2], made[1::2], strict=True):
        assert (of_program["drafts"], of_program["draft_rows"]) == (3, 4)
        assert (of_program["snapshots"], of_program["snapshot_tokens"]) == (4, 32)
        assert isinstance(of_program["head"], TritonHead)
        assert (of_device["draft_forms"], of_device["draft_rows"]) == ((3,), 4)
    limits = parts.scheduler.limits
    assert (limits.drafts, limits.draft_rows, limits.has_state, limits.history) == (3, 4, True, False)
    parts.masks.stop()
    with pytest.raises(
        ConfigError, match=r"^drafter eagle can't be .* Qwen3NextFor.*; set drafter none, ngram or mtp$"
    ):
        started(tmp_path, drafter="eagle", draft_model="head", device="cuda")


def test_a_slot_holds_the_inputs_of_a_rows_drafts_and_a_snapshot_does_not(folder: Path) -> None:
    with capture_logs() as events:
        parts = started(folder, drafter="ngram", draft_tokens=3, state_snapshot_blocks=2)
    (memory,) = [event for event in events if event["event"] == "memory"]
    program = parts.device._program  # type: ignore[attr-defined]
    inputs = 2 * 4 * (128 + 32 + 4)  # of a token: two layers, what is convolved and a step of each head
    assert parts.info.state_bytes == STATE_BYTES + 3 * inputs
    assert memory["state_bytes"] == 4 * (STATE_BYTES + 3 * inputs)
    assert sum(run.nbytes for run in program._cache.runs) == 4 * 3 * inputs
    assert memory["snapshot_bytes"] == 4 * STATE_BYTES
    assert parts.info.drafters == ("ngram",)
    assert (parts.scheduler.limits.drafts, parts.scheduler.limits.forced_drafts) in ((3, 3), (3, 0))


def test_drafts_whose_inputs_leave_no_memory_for_blocks_are_refused(folder: Path) -> None:
    described = load_config(open_checkpoint(folder))
    config = EngineConfig(model="", max_rows=16, block_size=16, drafter="ngram", draft_tokens=1)
    many = msgspec.structs.replace(config, draft_tokens=7)
    few, more = (bytes_kept(one, described, torch.float32) for one in (config, many))
    memory = 16 * few.row + 70 * few.block
    check_blocks(blocks_in(memory, config, few, 1000), config, 1000, few)
    with pytest.raises(ConfigError, match=r"the states of 16 rows.* set context_length or max_rows or draft_tokens"):
        check_blocks(blocks_in(memory, many, more, 1000), many, 1000, more)


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
    with pytest.raises(
        ConfigError, match=r"0 KV blocks beside the states of 16 rows, which take 32 MiB; .*: set max_rows to less"
    ):
        check_blocks(0, config, 1000, KeptBytes(block=1000, row=2 << 20))
    with pytest.raises(ConfigError, match=r"memory holds 0 KV blocks; one .* set context_length to less"):
        check_blocks(0, config, 1000, KeptBytes(block=1000, row=0))
