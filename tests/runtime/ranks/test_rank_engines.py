"""Whole engines of ranks say what one process says that computes their segments: at every depth, to the bit, through
every event of a request's life. The CPU device's test mode delays each part of a launch, on each rank by another seed,
and fills whatever is given back with nonsense, on every rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from runahead.cuda_graphs.device import DeviceError
from runahead.runtime.checkpoint import BUNDLED_FOLDER, BUNDLED_HEAD
from runahead.runtime.kernels.forward_batch import KVCache
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.process import rank_start
from runahead.runtime.process.rank_start import RankProcesses
from runahead.runtime.ranks.ranked_device import RankedDevice
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import ConfigError
from runahead.runtime.wire.parameters import SamplingParams
from tests.parity.drafters import OVER_STATES, flags_of
from tests.runtime.models.checkpoints import CASES, Case, save
from tests.runtime.ranks import dying_rank
from tests.runtime.ranks.rank_engines import Life, Said, life

PROMPTS = [[(31 * i + 7 * j + i * j) % 150 for j in range(length)] for i, length in enumerate((21, 40, 9, 33, 26, 17))]
TOKENS = 24
CANCELLED = 7
ASKED: dict[int, SamplingParams] = {
    0: SamplingParams(temperature=0.0),
    1: SamplingParams(temperature=0.9, seed=11, logprobs=2),
    2: SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5),
    3: SamplingParams(temperature=0.7, seed=12, top_k=20, top_p=0.9, prompt_logprobs=2),
    4: SamplingParams(temperature=1.1, seed=13, min_p=0.05, bias_ids=(5, 9), bias_values=(3.0, -4.0)),
    5: SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0),
}


DEPTHS = (0, 1, 2, 4)
# Models, numbers of ranks and depths.
CELLS = (
    ("llama", 2, 2), ("llama", 4, 1), ("llama", 4, 4),
    *(
        pytest.param(name, of, depth, marks=pytest.mark.large)
        for name, of, depths in (("llama", 2, (0, 1, 4)), ("llama", 4, (0, 2)), ("qwen3_next", 2, (0,)))
        for depth in depths
    ),
    ("mixtral_window", 2, 0), ("mixtral_window", 4, 2), ("glm4_moe_bfloat16_two_shared", 2, 2),
    ("granite_hybrid", 2, 2), ("qwen3_next", 2, 4), ("nemotron_h", 2, 1),
)  # fmt: skip
# Drafters with weights (`tests.parity.drafters`), and depths without --large.
DRAFTERS = {"eagle-1": (0,), "wrapped": (4,), "mtp": (1,), "model": (2,), OVER_STATES: (0,)}
RECURRENT = {"granite_hybrid", "qwen3_next", "nemotron_h"}
SNAPSHOTS: Mapping[str, Any] = {"state_snapshot_blocks": 1, "state_snapshots": 40}
FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """A checkpoint by its name, made once."""

    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        save(next(case for case in CASES if case.name == name), folder)
        return folder

    return made


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Settings with a drafter and its model, whose files are made once."""
    folder = tmp_path_factory.mktemp("drafters")

    def settings(kind: str) -> dict[str, Any]:
        flags = iter(flags_of(kind, folder))
        given = {flag.removeprefix("--").replace("-", "_"): next(flags) for flag in flags}
        values = {name: int(value) if value.isdigit() else value for name, value in given.items()}
        head = {"draft_model": str(BUNDLED_HEAD)} if kind == "eagle-1" else {}
        return {"model": str(BUNDLED_FOLDER), "draft_tokens": 3, **head, **values}

    return settings


@pytest.fixture
def folder(folder_of: FolderOf) -> Path:
    return folder_of("llama")


def lived(own: Life) -> dict[int, Said]:
    """Six requests of all kinds; one that begins like the first, one that stops by itself, one that is cancelled."""

    def ask_late() -> None:
        if own.engine.ledger.launched >= 6 and not late:
            late.append(1)
            own.ask(6, PROMPTS[0] + [7, 8], TOKENS)
            own.ask(CANCELLED, PROMPTS[1][:12], 200)
            own.ask(8, PROMPTS[3], 60, SamplingParams(temperature=1.5, seed=3), stop_token_ids=tuple(range(20, 40)))
        if late and own.engine.ledger.launched >= 12 and len(late) == 1:
            late.append(2)
            own.links.tell(1, m.Cancel(CANCELLED))

    late: list[int] = []
    for handle, sampling in ASKED.items():
        own.ask(handle, PROMPTS[handle], TOKENS, sampling)
    own.run(ask_late)
    said = own.said()
    said.pop(CANCELLED, None)  # how far it came depends on the time
    own.close()
    return said


@cache
def oracle(folder: Path, of: int, *, keeps_states: bool = False) -> dict[int, Said]:
    """What the segments of one process say, in serial."""
    with pytest.MonkeyPatch.context() as patched:
        return lived(life(folder, 0, patched, segments=of, num_blocks=120, **(SNAPSHOTS if keeps_states else {})))


@pytest.mark.parametrize(("name", "of", "depth"), CELLS)
def test_ranks_say_what_segments_of_one_process_say(
    name: str, of: int, depth: int, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool that is too small for all rows, and with a barrier before every eighth launch."""
    folder, keeps_states = folder_of(name), name in RECURRENT
    own = life(
        folder, depth, monkeypatch, ranks=of, threads=True, num_blocks=20, log_interval=8, log_mode="barrier",
        **(SNAPSHOTS if keeps_states else {}),
    )  # fmt: skip
    said = lived(own)
    assert said == oracle(folder, of, keeps_states=keeps_states)
    assert all(len(each.ends) == 1 for each in said.values())
    figures = own.engine.stats()
    assert figures.events["evicted"].count > 0, "nobody was evicted: the pool is too large"
    assert figures.cached_tokens > 0
    assert len(own.programs) == of
    for kept in ("seq_len", "last_token", "alive", "held", "block_table", "parameters"):
        columns = [getattr(program.rows, kept)[:-1] for program in own.programs]
        assert all(np.array_equal(column, columns[0]) for column in columns), f"ranks differ in {kept}"


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_ranks_with_a_drafter_that_has_weights_say_what_segments_of_one_process_say(
    kind: str,
    depth: int,
    drafters: Callable[[str], dict[str, Any]],
    large: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first rank drafts for all, and changes no token."""
    if depth not in DRAFTERS[kind] and not large:
        pytest.skip("many engines: make parity runs them")
    settings = drafters(kind)
    folder = Path(settings.pop("model"))
    own = life(folder, depth, monkeypatch, ranks=2, threads=True, num_blocks=20, **settings)
    assert lived(own) == oracle(folder, 2, keeps_states=kind == OVER_STATES)
    figures = own.engine.stats()
    assert figures.events["evicted"].count > 0, "nobody was evicted: the pool is too large"
    assert sum(figures.accepted.values()) > 0
    follower = own.programs[1]
    assert follower.rows.drafter is None
    assert not follower.rows.rings.cells.any(), "a rank other than the first has written tokens"


def test_six_ranks_of_which_two_have_each_kv_head_say_what_segments_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 162}
    save(Case("sixths", LlamaConfig, sizes), tmp_path)
    own = life(tmp_path, 2, monkeypatch, ranks=6, threads=True, num_blocks=20)
    assert lived(own) == oracle(tmp_path, 6)
    assert len(own.programs) == 6


@pytest.fixture
def blocks_of_rank_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """KV blocks that rank 1 has memory for: fewer than rank 0 has found room for."""
    make, most = Decoder.make_cache, 40
    oracle(folder, 2)  # is kept, from before memory is short

    def make_cache(decoder: Decoder, num_blocks: int, *sizes: int, **named: int) -> KVCache:
        if decoder.ranks.shard.rank == 1 and num_blocks > most:
            raise MemoryError
        return make(decoder, num_blocks, *sizes, **named)

    monkeypatch.setattr(Decoder, "make_cache", make_cache)
    return most


def test_a_rank_with_a_smaller_pool_gives_all_ranks_as_many_blocks(
    folder: Path, blocks_of_rank_1: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = life(folder, 2, monkeypatch, ranks=2, threads=True, num_blocks=0)
    blocks = own.parts.info.num_blocks
    assert 0 < blocks <= blocks_of_rank_1
    made = [program._cache.keys[0].shape[0] for program in own.programs]
    assert made.count(blocks) == 2 and max(made) > blocks_of_rank_1, "rank 0 had room for more"
    assert lived(own) == oracle(folder, 2)


def test_more_blocks_than_a_rank_has_memory_for_are_refused(
    folder: Path, blocks_of_rank_1: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"num_blocks 41 is more than a rank has memory for: 36"):
        life(folder, 2, monkeypatch, ranks=2, threads=True, num_blocks=blocks_of_rank_1 + 1)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_the_other_ranks_sample_and_draft_nothing(
    name: str, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a drafter guesses is rank 0's, and changes no token. Every rank replays drafts that became tokens."""
    folder = folder_of(name)
    own = life(folder, 2, monkeypatch, ranks=2, threads=True, num_blocks=120, drafter="ngram", draft_tokens=3)
    repeated = [5, 6, 7, 8] * 6
    own.ask(0, repeated, 40)
    own.ask(1, PROMPTS[1], TOKENS, ASKED[1])
    own.run()
    found = own.said()
    assert sum(own.engine.stats().drafted.values()) > 0
    own.close()
    with pytest.MonkeyPatch.context() as patched:
        plain = life(folder, 0, patched, segments=2, num_blocks=120)
        plain.ask(0, repeated, 40)
        plain.ask(1, PROMPTS[1], TOKENS, ASKED[1])
        plain.run()
        plain.close()
    assert found == plain.said()
    follower = own.programs[1]
    assert follower.rows.drafter is None
    assert not follower.rows.rings.cells.any(), "a rank other than the first has written tokens"


@pytest.mark.parametrize(("name", "of", "depth"), [("llama", 2, 0), ("llama", 4, 4), ("qwen3_next", 2, 2)])
def test_rows_with_a_grammar_say_what_segments_of_one_process_say(
    name: str, of: int, depth: int, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first rank reads masks. They come late, and are overwritten while other ranks are behind."""

    def structured(own: Life) -> dict[int, Said]:
        for handle, structure in enumerate(("one 99", "some 99", "", "any 99", "some 9")):
            own.ask(handle, PROMPTS[handle], TOKENS, ASKED[handle], structure, ignore_eos=False)
        own.run()
        said, held = own.said(), own.engine.stats().held_rows
        own.close()
        assert held > 0, "no mask was late"
        return said

    folder = folder_of(name)
    own = life(folder, depth, monkeypatch, ranks=of, threads=True, num_blocks=120, has_masks=True)
    expected = life(folder, 0, monkeypatch, segments=of, num_blocks=120, has_masks=True)
    assert structured(own) == structured(expected)


def test_tokens_are_those_of_the_whole_model_but_for_rounding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = lived(life(folder, 0, monkeypatch, num_blocks=120))
    assert whole[0].tokens == oracle(folder, 2)[0].tokens


def test_two_processes_say_what_segments_of_one_process_say(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = life(folder, 4, monkeypatch, ranks=2, num_blocks=20)
    device = own.parts.device
    assert isinstance(device, RankedDevice)
    assert lived(own) == oracle(folder, 2)


@pytest.mark.parametrize("depth", [0, 4])
def test_a_rank_that_is_killed_between_s_and_apply_fails_the_engine_by_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    command = (sys.executable, "-m", dying_rank.__name__)
    monkeypatch.setattr(rank_start, "RankProcesses", partial(RankProcesses, command=command))
    own = life(folder, depth, monkeypatch, ranks=2, num_blocks=120)
    own.ask(0, PROMPTS[0], TOKENS)
    with pytest.raises(DeviceError, match=r"rank 1 has ended \(signal SIGKILL\)"):
        own.run()
    assert own.engine.ledger.retired < dying_rank.LAUNCH <= own.engine.ledger.launched
    own.close()
