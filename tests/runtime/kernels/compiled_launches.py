"""Compiles every kernel that launches of a model run, for a GPU that need not be there: a process of its own.

`python -m tests.runtime.kernels.compiled_launches ORDERS`, which is the JSON of `Orders`, prints the JSON of a list of
`Compiled`. The launches are made as on a GPU, by the same program, on tensors without memory; where Triton would
compile a kernel and launch it, it compiles it, for the compute capability asked for. That can't be done in the process
of the tests: there Triton has been told to interpret.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Set
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Final, Literal

import msgspec
import torch

from benchmarks.gpu_table.shapes import SHAPES
from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.cuda_graphs.rings import allocate_rings
from runahead.runtime.kernels.reference.sampling import Sampled
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.memory import FP8_KV
from runahead.runtime.models.weights import described
from runahead.runtime.process.parts import ring_layout, snapshot_tokens, state_bytes
from runahead.runtime.scheduler.draft_choice import MOST
from runahead.runtime.wire.engine_config import EngineConfig
from tests.runtime.kernels.barrier_memory import reused_barriers
from tests.runtime.kernels.fp8_kv import with_fp8_kv
from tests.runtime.kernels.kernel_forms import fewest, kinds_of
from tests.runtime.kernels.pretended_gpu import Address, NoGpu
from tests.runtime.kernels.read_elsewhere import read_elsewhere
from tests.runtime.kernels.shaped_heads import heads_like

# Bytes that a program may have, by compute capability: CUDA Programming Guide, "Technical Specifications".
SHARED_MEMORY: Final = {(8, 0): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
# What older GPUs do not know: to wait for the kernels before, the matrix units' instructions of 9.0, and those of 10.0.
# And by what operands of the matrix units come from shared memory.
INSTRUCTIONS: Final = ("griddepcontrol.wait", "wgmma", "tcgen05", "ldmatrix")
# Small models with recurrent states. `make kernels` has real sizes among its shapes.
_MAMBA2: Final = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 1,
    "layer_types": ["mamba"],
    "mamba_n_heads": 64,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "num_local_experts": 0,
}
_GATED_DELTA: Final = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "shared_expert_intermediate_size": 512,
}
# Experts that are chosen otherwise than by the highest scores alone.
_GROUPED: Final = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
_OLDEST: Final = (8, 0)
_WIDTHS: Final = re.compile(r"kWidth = (\d+)")
_PROCESSORS: Final = 132
_BLOCKS: Final = 64
_DRAFT_ROWS: Final = 32
_SNAPSHOTS: Final = 4  # of states, where a model keeps any


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """shape: its name in `SHAPES`. changes: of its config.json, null for a key that
    is left out. capability: of the GPU. dependent: kernels are launched
    programmatically, those that can be. used_as: an older compute capability that the GPU stands for. rows: of decode
    launches. forms: of each kernel. "each": few, which have each of its parts together. "parts":
    products with each epilogue, attention for one and for several query tokens, the sampler for one and
    for several tokens a row, and each kernel with every set of the parts that it may have or lack, in its largest form.
    "one": the first form in which a launch asks for it, which is the largest. But for "all", kernels of recurrent
    states, of experts by groups and of a rank's part of experts are among them. further: changes of models whose
    launches come after. fp8_kv: keys and values are FP8, and only kernels that read or write them are compiled. only:
    names of the kernels to compile; empty: all."""

    shape: str
    changes: dict[str, Any] = {}
    dtype: str = "bfloat16"
    capability: tuple[int, int]
    dependent: bool
    used_as: str = "auto"
    rows: tuple[int, ...]
    forms: Literal["all", "parts", "each", "one"] = "all"
    further: tuple[dict[str, Any], ...] = ()
    fp8_kv: bool = False
    only: Set[str] = frozenset()


class Compiled(msgspec.Struct, frozen=True):
    """One kernel in one form. shared: bytes of shared memory that a program takes. has: which of INSTRUCTIONS.
    unordered: arguments that one of its threads may have written before another has read them. barriers: for all its
    warps. widths: numbers that lie together in a thread's operands of its matrix products, which order their sums.
    reused: operations that take a barrier's shared memory."""

    kernel: str
    shared: int
    has: tuple[str, ...]
    unordered: tuple[str, ...] = ()
    barriers: int = 0
    widths: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()


def compiled_launches(orders: Orders) -> list[Compiled]:
    """Every form of every kernel, once. Leaves this process unfit for anything else."""
    found: dict[str, Compiled] = {}
    compile_asked = _pretend(orders, found)
    with torch.inference_mode():
        own = () if orders.forms == "all" else (_GROUPED, _MAMBA2, _GATED_DELTA)
        for changes in (orders.changes, *orders.further, *own):
            _launch_everything(msgspec.structs.replace(orders, changes=changes))
        if orders.forms != "all":
            from tests.runtime.kernels.compiled_shares import launch_a_share

            launch_a_share()
        compile_asked()
    return list(found.values())


def _pretend(orders: Orders, found: dict[str, Compiled]) -> Callable[[], None]:
    """Put a GPU that is not there in the place of this machine's. Before the kernels' modules are imported, which then
    ask the one here. Returns what compiles the launches' kernels, if they are not compiled at once."""
    import triton
    from triton.runtime.jit import JITFunction

    from runahead.runtime.kernels.triton.gpu import capability as gpu

    capability = orders.capability
    known = gpu.Gpu("a GPU", capability if orders.dependent else _OLDEST, SHARED_MEMORY[capability])
    vars(gpu)["current_gpu"] = cache(lambda: known)
    vars(torch.cuda)["get_device_properties"] = lambda device: SimpleNamespace(multi_processor_count=_PROCESSORS)
    from runahead.runtime.kernels.triton.gemm import cublaslt, tuning

    device = torch.device("cuda")
    plan = tuning.attention_plan
    vars(tuning)["attention_plan"] = lambda *asked: plan(
        *(device if isinstance(one, torch.device) else one for one in asked)
    )
    vars(cublaslt)["vendor_library"] = lambda: None
    triton.runtime.driver.set_active(NoGpu(capability))
    run = JITFunction.run

    def ask(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = self.fn.__name__
        if orders.only and name not in orders.only:
            return
        if orders.fp8_kv and not any(getattr(one, "dtype", None) == FP8_KV for one in _flat(arguments)):
            return
        kinds = frozenset(kinds_of(name, arguments, options, orders.forms))
        passed = partial(run, self, *_without_tensors(arguments), grid=grid, warmup=True, **options)
        if orders.forms == "all":
            compile_form(name, passed)
        else:
            asked.setdefault(name, {}).setdefault(kinds, passed)

    def compile_form(name: str, passed: Callable[[], Any]) -> None:
        kernel = passed()
        has = tuple(one for one in INSTRUCTIONS if one in kernel.asm["ptx"])
        unordered = read_elsewhere(kernel.asm["ttgir"])
        barriers = kernel.asm["ptx"].count("bar.sync")
        widths = tuple(sorted(set(_WIDTHS.findall(kernel.asm["ttgir"]))))
        reused = reused_barriers(kernel.asm["ttgir"])
        found[kernel.hash] = Compiled(name, kernel.metadata.shared, has, unordered, barriers, widths, reused)

    asked: dict[str, dict[frozenset[tuple[Any, ...]], Callable[[], Any]]] = {}  # by kernel: the first form of each kind
    JITFunction.run = ask

    def compile_asked() -> None:
        for name, forms in asked.items():
            for kinds in fewest(forms):
                compile_form(name, forms[kinds])

    return compile_asked


def _flat(arguments: tuple[Any, ...]) -> Iterator[Any]:
    for one in arguments:
        yield from _flat(one) if isinstance(one, tuple) else (one,)


def _without_tensors(arguments: tuple[Any, ...]) -> list[Any]:
    """The same arguments, tuples among them, with addresses for tensors."""

    def passed(one: Any) -> Any:
        if isinstance(one, tuple):
            inner = _without_tensors(one)
            return type(one)(*inner) if hasattr(one, "_fields") else tuple(inner)
        return Address(one) if isinstance(one, torch.Tensor) else one

    return [passed(one) for one in arguments]


def _launch_everything(orders: Orders) -> None:
    """The largest launch of rows that verify drafts, in both forms; decode launches, from the largest on, which comes
    in both forms; a launch with a prompt, one with its log-probabilities, the last; of a model with states those once
    more where nobody drafts; a launch with a prompt by a measured plan of attention; and launches whose S looks for
    masks, behind drafts too, with a drafter and without."""
    from runahead.cuda_graphs import marks
    from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet
    from runahead.runtime.programs.cuda.program import TritonProgram
    from tests.runtime.kernels.older_gpu import use_as

    if orders.used_as != "auto":
        use_as(orders.used_as)

    keys = {key: value for key, value in {**SHAPES[orders.shape].keys, **orders.changes}.items() if value is not None}
    shape = dataclasses.replace(SHAPES[orders.shape], keys=keys)
    config = shape.described()
    has_states = state_bytes(config) > 0
    settings = EngineConfig(
        model="", device="cuda", run_ahead=2, max_rows=max(orders.rows), max_prefill_tokens=256,
        context_length=shape.workload.context, drafter="ngram", draft_tokens=MOST,
    )  # fmt: skip
    weights = _weights(config, orders)
    rings = allocate_rings(ring_layout(settings, config, settings.context_length))
    model = Decoder(config, weights, TritonKernelSet(), settings.context_length)
    program_with = partial(
        TritonProgram,
        model,
        rings,
        max_rows=settings.max_rows,
        max_tokens=settings.max_rows + settings.max_prefill_tokens,
        num_blocks=_BLOCKS,
        block_size=settings.block_size,
        context_length=settings.context_length,
        penalty_slots=settings.penalty_slots,
        snapshots=_SNAPSHOTS if has_states else 0,
        snapshot_tokens=snapshot_tokens(settings),
    )
    program = program_with(drafts=MOST, draft_rows=min(settings.max_rows, _DRAFT_ROWS))
    without_drafts = program_with() if has_states else None
    counter = torch.zeros(1, dtype=torch.int64, device="meta")
    stamps, seen = torch.from_numpy(rings.start_ns), torch.zeros(marks.MARKS, dtype=torch.int64)
    rows = max(orders.rows)
    few = min(rows, _DRAFT_ROWS)
    drafted = LaunchShape(0, few, Form.FULL, few, few * (1 + MOST), is_decode=True, drafts=MOST, sample_drafts=MOST)
    mixed = LaunchShape(0, 1, Form.PLAIN, rows=1, tokens=settings.max_prefill_tokens, is_decode=False)
    for launch in (
        drafted,
        drafted._replace(form=Form.PLAIN),
        LaunchShape(0, rows, Form.FULL, rows, rows, is_decode=True),
        *(LaunchShape(0, some, Form.PLAIN, some, some, is_decode=True) for some in sorted(orders.rows, reverse=True)),
        mixed,
        mixed._replace(rows=2),
        mixed._replace(prompt_logprobs=True),
        LaunchShape(0, 1, Form.PLAIN, rows=0, tokens=0, is_decode=False),
    ):
        marks.start(counter, stamps)
        program.sample(launch)
        marks.sampled(counter, seen, in_tail=bool(launch.drafts))
        program.apply(launch)
        program.forward(launch)
        marks.tail(counter, seen)
        marks.ended(counter, seen, stamps)
        if without_drafts is not None and not launch.drafts:
            without_drafts.apply(launch)
            without_drafts.forward(launch)
    _launch_by_tables(program, mixed, orders)
    _launch_masked(program_with, rows, config.vocab_size, mixed)
    _launch_masks_along_drafts(program_with, drafted, config.vocab_size, orders)
    _launch_heads(program_with, model, drafted, mixed, orders)


def _launch_by_tables(program: Any, mixed: LaunchShape, orders: Orders) -> None:
    """What only a table of plans of attention asks for."""
    if orders.dtype != "float32":
        _give_chunks_a_plan(orders.capability)
        program.forward(mixed)
    if orders.dtype == "bfloat16" and orders.capability == (9, 0):
        _give_chunks_a_plan(orders.capability, copiers=1)
        program.forward(mixed)
        from tests.runtime.kernels.compiled_shares import launch_chains

        launch_chains()


def _launch_masked(program_with: Callable[..., Any], rows: int, vocab_size: int, mixed: LaunchShape) -> None:
    """Launches whose S looks for masks, of rows without drafts and a padded vocabulary. mixed: one with a prompt."""
    masked = program_with(masks=MaskMemory(rows, vocab_size), sampled_vocab=vocab_size - 7)
    for launch in (LaunchShape(0, rows, Form.FULL, rows, rows, is_decode=True, masked=True), mixed):
        masked.sample(launch)
        masked.apply(launch)


def _launch_masks_along_drafts(
    program_with: Callable[..., Any], drafted: LaunchShape, vocab_size: int, orders: Orders
) -> None:
    """Launches that verify drafts of rows with a grammar, with a drafter and without. drafted: the largest."""
    few, memory = drafted.rows, MaskMemory(max(orders.rows), vocab_size, MOST)
    for guessed in (MOST, 0):
        along = program_with(masks=memory, drafts=guessed, draft_rows=few)
        for launch in (drafted, LaunchShape(0, few, Form.FULL, few, few, is_decode=True)):
            along.apply(launch)
        if orders.forms != "all":  # the sampler's kernels were compiled for runs, and for masks
            along.rows.judge(few, MOST)
            along.rows.advance(few, _nothing_sampled(few * (1 + MOST)), MOST)
        else:
            along.sample(drafted._replace(masked=True))


def _launch_heads(
    program_with: Callable[..., Any], model: Decoder, drafted: LaunchShape, mixed: LaunchShape, orders: Orders
) -> None:
    """Launches with a draft head of each kind, of one row and of as many as have drafts, with a prompt too, and of rows
    that may be held. drafted: the largest. mixed: one with a prompt."""
    from runahead.runtime.programs.cuda.draft_head import TritonHead

    few, rows = drafted.rows, max(orders.rows)
    for weights in heads_like(model, lambda *shape: torch.empty(shape, dtype=model.dtype, device="meta")).values():
        head = TritonHead(weights, model, model.config.max_position_embeddings)
        program = program_with(drafts=MOST, draft_rows=few, head=head)
        for some in (1, few):
            launch = drafted._replace(rows=some, tokens=some * (1 + MOST))
            program.apply(launch)
            program.forward(launch)
        for launch in (LaunchShape(0, rows, Form.PLAIN, rows, rows, is_decode=True), mixed):
            program.forward(launch)
        memory = MaskMemory(rows, model.config.vocab_size, MOST)
        program_with(drafts=MOST, draft_rows=few, head=head, masks=memory).apply(drafted)


def _nothing_sampled(lines: int) -> Sampled:
    flags = torch.zeros(lines, dtype=torch.bool, device="meta")
    return Sampled(torch.zeros(lines, dtype=torch.int64, device="meta"), flags, nothing_left=flags)


def _give_chunks_a_plan(capability: tuple[int, int], copiers: int = 0) -> None:
    """To attention of prompt chunks, as a table of measured plans may have it: the largest that fits."""
    from runahead.runtime.kernels.triton.attention import prefill_hopper, ragged
    from runahead.runtime.kernels.triton.attention.prefill_tuning import ChunkPlan

    def planned(shape: Any, dtype: torch.dtype) -> ChunkPlan:
        few = shape.head_dim > 128
        if copiers and shape.head_dim in prefill_hopper.HEAD_DIMS:
            return ChunkPlan(128, 128, _PROCESSORS, 8, 3, copiers=copiers)
        if capability >= (9, 0):
            return ChunkPlan(128, 32 if few else 64, _PROCESSORS, 8, 3)
        return ChunkPlan(64, 16 if few else 32, _PROCESSORS, 4, 2)

    vars(ragged)["chunk_plan"] = planned


def _weights(config: ModelConfig, orders: Orders) -> Any:
    weights = _without_memory(described(config), getattr(torch, orders.dtype))
    return with_fp8_kv(weights) if orders.fp8_kv else weights


def _without_memory(weights: Any, dtype: torch.dtype) -> Any:
    """The same tensors, of this dtype."""
    if isinstance(weights, torch.Tensor):
        return torch.empty(weights.shape, dtype=dtype, device="meta")
    if isinstance(weights, tuple):
        return tuple(_without_memory(item, dtype) for item in weights)
    if dataclasses.is_dataclass(weights) and not isinstance(weights, type):
        fields = {field.name: getattr(weights, field.name) for field in dataclasses.fields(weights)}
        return dataclasses.replace(weights, **{name: _without_memory(one, dtype) for name, one in fields.items()})
    return weights


if __name__ == "__main__":
    print(msgspec.json.encode(compiled_launches(msgspec.json.decode(sys.argv[1], type=Orders))).decode())
