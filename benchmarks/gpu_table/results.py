"""What a part of the benchmark leaves in its file: figures, and where, when and of what they were measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import msgspec
import torch

from benchmarks.gpu_table.errors import ResultError
from benchmarks.gpu_table.settings import Settings
from runahead.service.version import commit_of

ROOT: Final = Path(__file__).resolve().parents[2]
FORMAT: Final = 1
_GIT_DIGITS: Final = 12

Way = Literal["graph", "engine"]
Sampling = Literal["greedy", "sampled", "one sampled", "one with log-probabilities"]
Table = Literal["step", "lengths", "models"]


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine of a run. gpu: empty on the CPU. cores: as the operating system counts them."""

    gpu: str
    driver: str
    cpu: str
    cores: int
    system: str


class Versions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Versions of a run's software; empty if not installed. cuda: that torch was built for."""

    python: str
    torch: str
    triton: str
    cuda: str
    grpc: str


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One figure. Times are of one decode step of the whole batch.

    prompt: how long the prompts are, in words. context: tokens that a row holds in the middle of what was measured, the
    mean over the rows. runs: seconds of the short and of the long run, of each repetition; bare graphs have none.
    nodes: of the graph. idle_us: of the device between two launches, by its stamps. overlap: the share of launches that
    were enqueued while the one before ran. host_us: the engine's own time a launch. launches: that these three are of,
    and not_one_graph: those among them that were not one graph, by reason; None in older results, and where there are
    no graphs. experts: that the rows name in a layer, each counted once, the mean over layers and steps. skipped: why
    there is no figure.
    """

    table: Table
    shape: str
    rows: int
    prompt: str
    context: float
    way: Way
    sampling: Sampling = "greedy"
    run_ahead: int = 2
    floor_ms: float
    step_ms: float | None = None
    runs: tuple[tuple[float, float], ...] = ()
    nodes: int | None = None
    idle_us: float | None = None
    overlap: float | None = None
    host_us: float | None = None
    launches: int | None = None
    not_one_graph: dict[str, int] | None = None
    experts: float | None = None
    skipped: str = ""


class KernelTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel, or a copy, in one place or many of a step. count: a step. share: of the time of all kernels.

    total_us: a step, from its start to its end: what runs side by side counts twice. own_us: a step, by how much it
    moved the end of all work, idle time before it included: these add up to the step. None in older results.
    """

    name: str
    role: str
    count: float
    mean_us: float
    total_us: float
    share: float
    own_us: float | None = None


class RoleTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All kernels of a step that do one kind of work. floor_us: of the bytes that they must read, where known.

    total_us, own_us: as of a `KernelTime`.
    """

    role: str
    total_us: float
    floor_us: float | None
    own_us: float | None = None


class Breakdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the time of a decode launch goes. step_us: from start to start, while it was traced."""

    shape: str
    rows: int
    launches: int
    context: float
    step_us: float
    floor_us: float
    kernels: tuple[KernelTime, ...]
    roles: tuple[RoleTime, ...]


class PromptTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long a prompt took to its first token, through the engine.

    setting: what the engine is set for, the prompts' rate or the rows' pace. tokens: of the prompt. rows: that
    decode beside it. together: how many such prompts came at once. first_token_ms: the median of `runs_ms`, which
    has all of them. met_ms: of those before, which met launches of their size for the first time, the longest; None
    in older results, whose first run that was. gap_p50_ms, gap_p99_ms: between two tokens of a row, while a prompt
    ran that counts. products_ms: of their products alone, at the rate that the GPU's matrix units reach.
    idle_between, idle_inside: of the device, in parts of its time with launches that carried such a prompt, before
    them and at most inside them; None in older results. skipped: why there is no figure.
    """

    shape: str
    setting: Literal["rate", "pace"]
    tokens: int
    rows: int
    products_ms: float
    first_token_ms: float | None = None
    met_ms: float | None = None
    runs_ms: tuple[float, ...] = ()
    gap_p50_ms: float | None = None
    gap_p99_ms: float | None = None
    together: int = 1
    idle_between: float | None = None
    idle_inside: float | None = None
    skipped: str = ""


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One part.

    seconds: that it took. settings: of the engine, by name, and of the benchmark. failure: everything that went wrong,
    for which figures are missing; empty if all went well.
    """

    format: int
    part: str
    commit: str
    date: str
    seconds: float
    machine: Machine
    versions: Versions
    settings: Settings
    cells: tuple[Cell, ...] = ()
    breakdowns: tuple[Breakdown, ...] = ()
    prompts: tuple[PromptTime, ...] = ()
    failure: str = ""


def write(result: Result, folder: Path) -> Path:
    """Leaves the part's file whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(result.part, folder)
    scratch = path.with_suffix(".partial")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    scratch.replace(path)
    return path


def path_of(part: str, folder: Path) -> Path:
    return folder / f"part-{part}.json"


def read(path: Path) -> Result:
    """Raises ResultError for a file that is no result, or one of another format."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except (msgspec.MsgspecError, OSError) as error:
        raise ResultError(f"{path} is no result of this benchmark: {error}") from error
    if result.format != FORMAT:
        raise ResultError(f"{path} has format {result.format}; this benchmark reads format {FORMAT}")
    return result


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def commit(given: str | None) -> str:
    """The commit of this checkout, `.dirty` behind it where files have changed; `given` where git does not know.

    Raises ResultError where neither says it, or where they differ.
    """
    known = commit_of(ROOT)
    short = given[:_GIT_DIGITS] if given else None
    if known is None and short is None:
        raise ResultError("this folder is no git checkout: name the commit that is measured with --commit")
    if known is not None and short is not None and not known.startswith(short):
        raise ResultError(f"--commit says {short}, and this checkout is of {known}")
    return known or str(short)


def this_machine(device: str) -> Machine:
    """What the figures were measured on. device: cpu or cuda."""
    on_gpu = device == "cuda"
    return Machine(
        gpu=torch.cuda.get_device_name() if on_gpu else "",
        driver=_driver() if on_gpu else "",
        cpu=_cpu(),
        cores=os.cpu_count() or 1,
        system=platform.platform(),
    )


def these_versions() -> Versions:
    return Versions(
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=_version("triton"),
        cuda=torch.version.cuda or "",
        grpc=_version("grpcio"),
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
