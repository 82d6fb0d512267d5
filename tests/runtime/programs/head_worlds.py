"""Rows of real models on the CPU with draft heads of every kind, followed through launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from runahead.cuda_graphs.rings import RingLayout, allocate_rings
from runahead.runtime.checkpoint import open_checkpoint, open_head
from runahead.runtime.drafters.ngram import Drafter
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.memory.block_pool import NO_SLOT
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.drafters.draft_model import DraftModelFiles, DraftNetwork, open_draft_model
from runahead.runtime.models.drafters.eagle import open_eagle
from runahead.runtime.models.drafters.head_files import HeadFiles
from runahead.runtime.models.drafters.mtp import open_mtp
from runahead.runtime.models.load import load_model
from runahead.runtime.models.memory import memory_of
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.programs.cpu.drafter import HeadDrafter
from runahead.runtime.programs.cpu.program import HostProgram
from runahead.runtime.wire.parameters import SamplingParams
from tests.runtime.launches import ENDLESS, Launches, _Row, over_program
from tests.runtime.models import eagle3_heads, eagle_heads, mimo_heads, qwen_heads
from tests.runtime.models.checkpoints import CASES, IDS, Case, save
from tests.runtime.models.eagle_heads import VOCAB
from tests.runtime.models.head_arithmetic import Floats

ROWS, BLOCK, EACH, MOST = 4, 16, 8, 7
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=5)
PROMPT = np.random.default_rng(3).integers(2, VOCAB, 45).tolist()
ALL = 1000
SMALLER = Case(
    "smaller", Qwen3Config, {**IDS, "hidden_size": 48, "head_dim": 8, "num_hidden_layers": 2, "num_attention_heads": 6}
)


@dataclass
class Heard(Drafter):
    """A head whose proposals are kept, and of which the rows see others: `rights` tokens of what they are about to say,
    in a circle, and then a wrong one."""

    own: HeadDrafter
    said: list[int] = field(default_factory=list)  # prompt and completion, of every row
    rights: Sequence[int] = (0,)
    heard: dict[int, list[int]] = field(default_factory=dict)  # by length

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def propose(self, slots: NDArray[np.int64], lengths: NDArray[np.int64], count: int) -> NDArray[np.int32]:
        found = self.own.propose(slots, lengths, count)
        shown = np.zeros_like(found)
        for i, length in enumerate(lengths.tolist()):
            own = [token for token in found[i].tolist() if token >= 0]
            known = self.heard.get(length, own)
            assert known[: len(own)] == own[: len(known)], "it does not hang on how the row came there"
            self.heard[length] = max(known, own, key=len)
            right = self.rights[length % len(self.rights)]
            for ahead in range(count):
                token = self.said[length + ahead] if length + ahead < len(self.said) else 0
                shown[i, ahead] = token if ahead < right else (token + 1) % VOCAB
        return np.where(found >= 0, shown, found)


class ByDefinition(Protocol):
    def proposes(self, tokens: list[int], states: list[Floats], count: int) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class World:
    target: Decoder
    head: DraftNetwork
    by_definition: ByDefinition
    of_transformers: Any  # the target

    def started(self) -> tuple[HostProgram, Launches]:
        """Every KV block is NaN at the start. Of a model that keeps states each row has a place for a snapshot at
        every border."""
        rings = allocate_rings(RingLayout(4, PLAN_WORDS, 8192, ROWS, 4, prompt_tokens=200, drafts=MOST))
        has_states = any(kept.state for kept in memory_of(self.target.weights.layers).kept)
        program = HostProgram(
            self.target, rings, max_rows=ROWS, num_blocks=ROWS * EACH + 1, block_size=BLOCK,
            context_length=EACH * BLOCK, head=self.head, snapshots=ROWS * EACH if has_states else 0,
            snapshot_tokens=BLOCK,
        )  # fmt: skip
        program.poison_blocks(tuple(range(1, ROWS * EACH + 1)))
        program.poison_snapshots(tuple(range(1, ROWS * EACH + 1)) if has_states else ())
        return program, Launches(over_program(program), rings, VOCAB, EACH, EACH if has_states else None)

    def states(self, tokens: list[int]) -> list[Floats]:
        """What `transformers` has of these tokens: the embedding, what each layer but the last leaves, and the last
        one's after the final norm, [tokens, hidden] each."""
        found = self.of_transformers(torch.tensor([tokens]), output_hidden_states=True)
        return [states[0].double().numpy() for states in found.hidden_states]


def eagle_world(folder: Path, write: Callable[[Path, Path], None] | None = None, **given: Any) -> World:
    """With a head of EAGLE-1. write: writes target and head; None: random ones. given: of `random_head`."""
    if write is None:
        save(CASES[0], folder / "target")
        eagle_heads.write_head(folder / "head", eagle_heads.random_head(**given))
    else:
        write(folder / "target", folder / "head")
    return _world(folder, eagle_heads.HeadByDefinition)


def eagle3_world(folder: Path, write: Callable[[Path, Path], None] | None = None, **given: Any) -> World:
    """With a head of EAGLE-3. given: of `random_head`, and `reads`: after how many layers each."""
    reads, norms = given.pop("reads", eagle3_heads.READS), given.get("norms", ())
    if write is None:
        save(CASES[0], folder / "target")
        tensors = eagle3_heads.random_head(**given)
        keys: dict[str, Any] = {
            "draft_vocab_size": len(tensors["lm_head.weight"]),
            "hidden_size": len(tensors["norm.weight"]),
            **dict.fromkeys(norms, True),
        }
        if reads != eagle3_heads.READS:
            keys["eagle_aux_hidden_state_layer_ids"] = list(reads)
        eagle3_heads.write_head3(folder / "head", tensors, **keys)
    else:
        write(folder / "target", folder / "head")

    def definition(tensors: dict[str, torch.Tensor], embedding: torch.Tensor, lm_head: torch.Tensor) -> ByDefinition:
        return eagle3_heads.HeadByDefinition(tensors, embedding, lm_head, reads, norms)

    return _world(folder, definition)


def mimo_world(folder: Path, write: Callable[[Path, Path], None] | None = None) -> World:
    """With the head of a MiMo's own checkpoint."""
    if write is None:
        mimo_heads.save_with_head(folder / "target")
    else:
        write(folder / "target", folder)
    return _world(folder, mimo_heads.HeadByDefinition)


def qwen_world(
    folder: Path, write: Callable[[Path, Path], object] | None = None, case: Case = qwen_heads.HEADED["qwen3_next"]
) -> World:
    """With the head of a checkpoint whose model keeps recurrent states."""
    if write is None:
        qwen_heads.save_with_qwen_head(folder / "target", case)
    else:
        write(folder / "target", folder)
    config = AutoConfig.from_pretrained(folder / "target")
    return _world(folder, partial(qwen_heads.HeadByDefinition, config=config))


def model_world(folder: Path, write: Callable[[Path, Path], None] | None = None) -> World:
    """With a smaller model of another architecture, and of other shapes."""
    if write is None:
        save(CASES[0], folder / "target")
        save(SMALLER, folder / "model", seed=1)
    else:
        write(folder / "target", folder / "model")
    return _world(folder, _ModelByDefinition)


def save_twice(target: Path, model: Path) -> None:
    """A model that drafts for itself: it is always right."""
    save(CASES[0], target)
    save(CASES[0], model)


@dataclass(frozen=True, slots=True)
class _ModelByDefinition:
    """What `transformers` says."""

    model: Any

    def proposes(self, tokens: list[int], states: list[Floats], count: int) -> list[int]:
        known = list(tokens)
        for _ in range(count):
            known.append(int(self.model(torch.tensor([known])).logits[0, -1].argmax()))
        return known[len(tokens) :]


def _world(folder: Path, definition: Callable[..., ByDefinition]) -> World:
    """A head that is in no folder of its own comes with the target. definition: of a head's tensors and the target's
    ends, or of a model."""
    target_folder, head_folder, model_folder = folder / "target", folder / "head", folder / "model"
    kernels = ReferenceKernels()
    target = load_model(open_checkpoint(target_folder), torch.device("cpu"), torch.float32, "auto", kernels)
    model = _of_transformers(target_folder)
    ends = model.model.embed_tokens.weight, model.lm_head.weight
    files: HeadFiles | DraftModelFiles
    if model_folder.exists():
        both = open_checkpoint(model_folder), target.config, open_checkpoint(target_folder)
        files = open_draft_model(*both, EACH * BLOCK, "draft_model", "context_length", has_weights=True)
        by_definition = definition(_of_transformers(model_folder))
    elif head_folder.exists():
        files = open_eagle(open_head(head_folder), target.config, EACH * BLOCK, "draft_model", "context_length")
        by_definition = definition(load_file(head_folder / "model.safetensors"), *ends)
    else:
        files = open_mtp(open_checkpoint(target_folder), target.config, "drafter mtp", has_weights=True)
        by_definition = definition(load_file(target_folder / "model.safetensors"), *ends)
    head = files.load(target, kernels, EACH * BLOCK, drawn=False)
    return World(target, head, by_definition, model.model)


def _of_transformers(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def plain(world: World, sampling: SamplingParams, count: int) -> list[int]:
    _, launches = world.started()
    launches.begin(0, PROMPT, sampling)
    launches.launch({0: ALL})
    return launches.decode((0,), count)[0]


def lived(
    world: World, said: list[int], rights: Sequence[int], drafts: Sequence[int] = (MOST,), chunk: int = ALL,
    known: int = len(PROMPT), slot: int = 0, until: int = 100, began: tuple[HostProgram, Launches, Heard] | None = None,
    cached: int = 0,
) -> tuple[HostProgram, Launches, Heard]:  # fmt: skip
    """A row that lives up to a length. known: tokens that are read in chunks. drafts: K of each launch, in a circle.
    cached: tokens whose blocks, and the snapshot behind them, are those of row 0 of the same program."""
    program, launches = world.started() if began is None else began[:2]
    heard = Heard(program.rows.drafter) if began is None else began[2]  # type: ignore[arg-type]
    heard.said, heard.rights = said, rights
    program.rows.drafter = heard
    own = tuple(range(1 + slot * EACH, 1 + slot * EACH + EACH))
    blocks = tuple(range(1, 1 + cached // BLOCK)) + own[cached // BLOCK :]
    row = _Row(list(said[:known]), len(PROMPT), GREEDY, NO_SLOT, blocks, ENDLESS, 1 << 20, computed=cached)
    row.state = launches.state_of(slot, cached // BLOCK, cached // BLOCK)
    launches._rows[slot] = row
    while row.computed < known:
        launches.launch({slot: chunk})
    length, number, found = known, 0, []
    while length < until:
        run = launches.launch({slot: 1}, drafts=drafts[number % len(drafts)]).runs[slot]
        found += [cell.token for cell in run]
        length, number = known + len(found), number + 1
    assert found == said[known : known + len(found)], "no draft changes a token"
    return program, launches, heard


def entries(program: HostProgram, slot: int, count: int) -> list[NDArray[np.float32]]:
    """What lies in a row's blocks of positions below `count`: keys, values and hidden states. Entry 0 is nobody's."""
    drafter = program._head
    assert drafter is not None
    places = np.concatenate([np.arange(BLOCK) + BLOCK * int(block) for block in program.rows.block_table[slot]])
    cache = drafter._cache
    kept = [tensor.numpy().reshape(-1, *tensor.shape[2:]) for tensor in (*cache.entries.keys, *cache.entries.values)]
    return [*(part[places[1:count]] for part in kept), cache.hidden[places[:count]]]
