"""What a start on a GPU makes of drafts and of rows with a grammar: graphs, buffers, memory, and what the scheduler is
told. The GPU is a fake; what its program and its device are made with is looked at."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from runahead.cuda_graphs.buckets import Buckets
from runahead.cuda_graphs.rings import RingMemory
from runahead.runtime import models
from runahead.runtime.checkpoint import open_checkpoint, open_head
from runahead.runtime.grammar.extra import is_installed
from runahead.runtime.kernels.triton.row_state import grammar_masks as mask_state
from runahead.runtime.kernels.triton.row_state.drafts import make_draft_state
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.drafters.eagle import open_eagle
from runahead.runtime.models.drafters.head_files import HeadFiles
from runahead.runtime.models.read_config import load_config
from runahead.runtime.process import cuda, grammar_masks, parts, sizes
from runahead.runtime.process.assemble import assemble
from runahead.runtime.process.cuda import make_on_cuda
from runahead.runtime.process.parts import MadeOnDevice, forced_drafts, make_scheduler
from runahead.runtime.process.pool_fit import is_out_of_memory
from runahead.runtime.process.sizes import Gpu, ModelSize
from runahead.runtime.scheduler.draft_choice import ChoiceByForms
from runahead.runtime.wire.engine_config import EngineConfig
from tests.runtime.process.test_captures_logged import CapturingDevice, a_gpu_on_the_cpu

__all__ = ["a_gpu_on_the_cpu"]  # a fixture

BUNDLED = Path(models.__path__[0]) / "bundled"
CONTEXT, ROWS, VOCAB = 256, 40, 4096


class Made:
    """What the trial and the real start were made with: (program's, device's) arguments of each, and the rings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.programs: list[dict[str, Any]] = []
        self.devices: list[dict[str, Any]] = []
        self.rings: list[RingMemory] = []
        monkeypatch.setattr(cuda, "TritonProgram", self._program)
        monkeypatch.setattr(cuda, "CudaDevice", self._device)

    def _program(self, model: Any, rings: RingMemory, **sizes: Any) -> object:
        self.programs.append(sizes)
        self.rings.append(rings)
        return SimpleNamespace()

    def _device(self, program: object, rings: RingMemory, **sizes: Any) -> CapturingDevice:
        self.devices.append(sizes)
        return CapturingDevice(program, rings, **sizes)


def started(
    monkeypatch: pytest.MonkeyPatch, *, with_grammars: bool, **settings: Any
) -> tuple[MadeOnDevice, dict[str, Any]]:
    """And what the log says of memory. with_grammars: the library that follows them is there."""
    monkeypatch.setattr(grammar_masks, "is_installed", lambda: with_grammars)
    config = EngineConfig(model=str(BUNDLED), device="cuda", max_rows=ROWS, context_length=CONTEXT, **settings)
    checkpoint = open_checkpoint(BUNDLED)
    described = load_config(checkpoint)
    with capture_logs() as events:
        made = make_on_cuda(config, checkpoint, described, CONTEXT, lambda *_: None, lambda *_: None)
    (said,) = [dict(event) for event in events if event["event"] == "memory"]
    return made, said


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
@pytest.mark.parametrize(
    ("drafter", "tokens", "with_grammars", "forms", "rows", "most"),
    [
        ("none", 0, False, (), 0, 0),
        ("none", 0, True, (7,), 8, 7),
        ("ngram", 0, False, (1, 3, 7), 32, 7),
        ("ngram", 0, True, (1, 3, 7), 32, 7),
        ("ngram", 3, True, (3,), 32, 3),
    ],
)
def test_graphs_and_buffers_are_made_for_every_launch_that_the_scheduler_may_plan(
    monkeypatch: pytest.MonkeyPatch, drafter: Any, tokens: int, with_grammars: bool, forms: tuple[int, ...],
    rows: int, most: int,
) -> None:  # fmt: skip
    assert is_installed()
    found = Made(monkeypatch)
    made, _ = started(monkeypatch, drafter=drafter, draft_tokens=tokens, with_grammars=with_grammars)
    masks = None if made.masks is None else made.masks.memory  # type: ignore[attr-defined]
    assert (masks is not None) == with_grammars
    assert [device["is_trial"] for device in found.devices] == [True, False], "the trial, and what serves"
    for program, device in zip(found.programs, found.devices, strict=True):
        assert program["masks"] is masks
        assert (device["draft_forms"], device["draft_rows"], device["masked"]) == (forms, rows, with_grammars)
        assert (program["drafts"], program["draft_rows"]) == (0 if drafter == "none" else most, rows)
        assert device["forced_rows"] == 0, "no drafter here has steps to leave out"
        assert masks is None or masks.drafts == most
    (rings,) = set(map(id, found.rings))
    assert rings and found.rings[0].layout.drafts == most
    # The scheduler of such an engine plans no launch with another number of drafts, nor one of more rows with any.
    config = load_config(open_checkpoint(BUNDLED))
    forced = forced_drafts(made.config, config) if with_grammars else 0
    scheduler = make_scheduler(made.config, config, made.blocks, CONTEXT, made.draft_rows, forced)
    buckets = Buckets.up_to(ROWS, 300, forms, rows, with_grammars)
    planned = {
        (scheduler.drafts.choose(number, count, 0), count) for number in range(400) for count in range(1, ROWS + 1)
    }
    assert {count for guesses, count in planned if guesses} == set(range(1, rows + 1) if drafter != "none" else ())
    assert {guesses for guesses, _ in planned} <= {0, *forms}
    assert (scheduler.limits.draft_rows, scheduler.limits.forced_drafts) == (rows, most if with_grammars else 0)
    assert not rows or buckets.draft_rows[-1] == rows
    if tokens == 0 and drafter == "ngram":
        assert isinstance(scheduler.drafts._choice, ChoiceByForms)  # type: ignore[attr-defined]
    if made.masks is not None:
        made.masks.stop()


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
@pytest.mark.parametrize(("drafter", "with_grammars"), [("none", True), ("ngram", False), ("ngram", True)])
def test_the_log_says_what_drafts_and_masks_take(
    monkeypatch: pytest.MonkeyPatch, drafter: Any, with_grammars: bool
) -> None:
    """As much as what is made of it takes."""
    Made(monkeypatch)
    made, said = started(monkeypatch, drafter=drafter, with_grammars=with_grammars)
    drafts, slots, blocks = 7, ROWS + 1, CONTEXT // 16
    rows = 8 if drafter == "none" else 32
    state = make_draft_state(
        slots, CONTEXT if drafter == "ngram" else 0, blocks, rows, drafts, torch.device("cpu"),
        kept_slots=min(slots, 2 * rows) if with_grammars else 0,
    )  # fmt: skip
    assert said["history_bytes"] == state.history.nbytes
    assert said["run_table_bytes"] == state.block_tables.nbytes
    lines = rows * (1 + drafts)
    logits = (state.kept_slots * drafts if with_grammars else lines) * VOCAB * 4
    assert said["run_logits_bytes"] == logits + 8 * max(0, lines - ROWS) * VOCAB
    if made.masks is None:
        assert "mask_bytes" not in said
        return
    memory = MaskMemory(ROWS, VOCAB, drafts)
    kept = mask_state.make_mask_state(memory, torch.device("cpu"))
    assert (said["mask_bytes"], said["mask_host_bytes"]) == (kept.copies.nbytes, memory.words.nbytes)
    made.masks.stop()


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
def test_a_head_is_counted_with_the_pool_and_handed_to_every_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys, values and hidden states take a part of each block, and its weights are said."""
    head, asked = SimpleNamespace(weight_bytes=1_234, step_fraction=0.25, parameters=99), []

    def load(files: HeadFiles, target: Decoder, positions: int, *, drawn: bool) -> Any:
        asked.append((files.kind, target.config.vocab_size, positions, drawn))
        return head

    monkeypatch.setattr(cuda, "load_drafter", load)
    found = Made(monkeypatch)
    plain, of_plain = started(monkeypatch, with_grammars=False)
    found.programs.clear()
    seen: list[ModelSize] = []
    with_sizes = sizes.with_sizes

    def sized(config: EngineConfig, gpu: Gpu, model: ModelSize) -> tuple[EngineConfig, str]:
        seen.append(model)
        return with_sizes(config, gpu, model)

    monkeypatch.setattr(parts, "with_sizes", sized)
    made, said = started(
        monkeypatch,
        with_grammars=False,
        drafter="eagle",
        draft_model=str(BUNDLED / "draft_head"),
        load_format="dummy",
    )
    assert asked == [("a head of EAGLE-1", VOCAB, CONTEXT, False)], "a head of a folder of its own is read"
    assert [program["head"] for program in found.programs] == [head, head]
    assert (made.draft_step, made.draft_parameters, made.draft_rows) == (0.25, 99, 32)
    of_block = head_of_bundled().block_bytes(16, torch.float32)
    assert said["draft_kv_bytes"] == made.blocks * of_block > 0
    assert said["draft_weight_bytes"] == 1_234
    assert said["kv_bytes"] // made.blocks == of_plain["kv_bytes"] // plain.blocks
    assert said["pool_bytes"] == said["kv_bytes"] + said["draft_kv_bytes"]
    assert said["history_bytes"] == 0
    (size,) = seen
    numbers = (said["kv_bytes"] + said["draft_kv_bytes"]) // made.blocks // made.model.dtype.itemsize  # of a block
    itemsize = size.weight_bytes // made.model.num_parameters  # as it is served; the model here is another
    assert size.token_bytes == numbers * itemsize // 16, "sizes allow for it"
    assert size.draft_weight_bytes == head_of_bundled().parameters * itemsize
    scheduler = make_scheduler(made.config, load_config(open_checkpoint(BUNDLED)), made.blocks, CONTEXT, 32, 0, 0.25)
    assert not scheduler.limits.history and not scheduler.limits.guesses_along_masks
    assert [device["forced_rows"] for device in found.devices[-2:]] == [0, 0], "nothing is forced of any row"
    made, _ = started(
        monkeypatch, with_grammars=True, drafter="eagle", draft_model=str(BUNDLED / "draft_head"), load_format="dummy"
    )
    assert [device["forced_rows"] for device in found.devices[-2:]] == [8, 8], "some launches leave its steps out"
    assert made.masks is not None
    made.masks.stop()


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
def test_a_rank_without_the_head_makes_the_graphs_of_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    head = SimpleNamespace(weight_bytes=1, step_fraction=0.25, parameters=9)
    monkeypatch.setattr(cuda, "load_drafter", lambda *given, drawn: head)
    found, bundled = Made(monkeypatch), str(BUNDLED / "draft_head")
    made, _ = started(monkeypatch, with_grammars=True, drafter="eagle", draft_model=bundled, load_format="dummy")
    own = cuda.Maker(
        made.config, made.model, found.rings[0], CONTEXT, 0, MaskMemory(ROWS, VOCAB, 7), stop_ranks=lambda: None
    )
    own.device(2, lambda *_: None, is_trial=True)
    first, *_, other = ({**device, "progress": None} for device in found.devices)
    assert other == first and first["forced_rows"] == 8
    assert [program["head"] for program in found.programs] == [head, head, None]
    assert made.masks is not None
    made.masks.stop()


def head_of_bundled() -> HeadFiles:
    config = load_config(open_checkpoint(BUNDLED))
    return open_eagle(open_head(BUNDLED / "draft_head"), config, CONTEXT, "draft_model", "context_length")


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
def test_a_service_on_a_gpu_follows_structures_and_says_which_drafters_it_could_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Made(monkeypatch)
    config = EngineConfig(model=str(BUNDLED), device="cuda", max_rows=ROWS, context_length=CONTEXT, drafter="ngram")
    parts = assemble(config, lambda *_: None)
    assert (parts.info.structures, parts.info.drafter) == (True, "ngram")
    assert parts.info.drafters == ("ngram", "eagle", "model")
    assert all(device["masked"] for device in found.devices)
    assert (parts.scheduler.limits.draft_rows, parts.scheduler.limits.forced_drafts) == (32, 7)
    parts.masks.stop()


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
def test_without_the_library_a_start_on_a_gpu_has_no_such_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Made(monkeypatch)
    made, said = started(monkeypatch, with_grammars=False)
    assert made.masks is None and made.draft_rows == 0
    assert [(device["masked"], device["draft_forms"]) for device in found.devices] == [(False, ())] * 2
    assert not any(name.startswith(("run_", "mask_")) for name in said)


def test_memory_of_masks_is_mapped_once_however_many_programs_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver refuses to map it again; the trial has mapped it when the start's own program is made."""
    mapped: list[tuple[int, int]] = []

    class Runtime:
        @staticmethod
        def cudaHostRegister(address: int, size: int, flags: int) -> int:
            if (address, size) in mapped:
                return 712
            mapped.append((address, size))
            return 0

        @staticmethod
        def cudaHostUnregister(address: int) -> int:
            mapped[:] = [one for one in mapped if one[0] != address]
            return 0

    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"part or all of the requested memory range is already mapped ({code})")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: any(one[0] == self.data_ptr() for one in mapped))
    first, second = MaskMemory(4, VOCAB, 3), MaskMemory(4, VOCAB)
    for memory in (first, first, second, first):
        mask_state.map_once(memory)
    assert mapped == [(one.words.ctypes.data, one.words.nbytes) for one in (first, second)]
    del memory, first
    assert len(mapped) == 1, "it is given back with the memory"


@pytest.mark.parametrize("why", ["operation not supported (801)", "out of memory (2)"])
def test_memory_of_masks_that_cannot_be_mapped_is_a_sentence(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """And no reason to start again with a smaller KV pool: it is the host's memory that there is none of."""

    def refuse(code: int) -> None:
        error = torch.cuda.CudaError.__new__(torch.cuda.CudaError)
        RuntimeError.__init__(error, why)
        raise error

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 1))
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    memory = MaskMemory(4, VOCAB)
    with pytest.raises(
        OSError, match=f"^{memory.words.nbytes} bytes of masks can't be mapped for the GPU: o"
    ) as raised:
        mask_state.map_once(memory)
    assert not is_out_of_memory(raised.value)
