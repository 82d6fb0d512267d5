"""Formats tables as Markdown, for the README and the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from benchmarks.gpu_table.merge import Merged
from benchmarks.gpu_table.published import (
    FIRST_TOKEN_GOALS_MS,
    GOALS_MS,
    MIXED_IDLE,
    MIXED_IDLE_FROM,
    MODEL_GOALS_MS,
    OVERLAP,
    PEERS_MS,
    VLLM_FIRST_TOKEN_MS,
    VLLM_MODELS_MS,
    best_peer_ms,
    known,
)
from benchmarks.gpu_table.results import Breakdown, Cell, PromptTime, Sampling, Way

NONE: Final = "–"
_KERNELS_SHOWN = 20
_STATES = (
    "Recurrent states are float32, and so in the floor. In which dtype vLLM kept those of 7B-A1B when it was measured "
    "is not known."
)


class Steps:
    """The table of steps, looked up. Cells without a figure count as not measured."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = {(cell.shape, cell.rows, cell.way, cell.sampling): cell for cell in cells if cell.table == "step"}

    def cell(self, place: tuple[str, int], way: Way, sampling: Sampling = "greedy") -> Cell | None:
        cell = self._cells.get((*place, way, sampling))
        return cell if cell is not None and cell.step_ms is not None else None

    def ms(self, place: tuple[str, int], way: Way, sampling: Sampling = "greedy") -> float | None:
        cell = self.cell(place, way, sampling)
        return None if cell is None else cell.step_ms

    def places(self) -> list[tuple[str, int]]:
        """Shapes and rows, in order."""
        return sorted({(shape, rows) for shape, rows, _, _ in self._cells})


def idle_share(cell: Cell) -> float | None:
    """Return the fraction of a step in which the device is idle between launches."""
    return None if cell.idle_us is None or cell.step_ms is None else cell.idle_us / 1e3 / cell.step_ms


def tables(merged: Merged) -> str:
    """Everything that was measured, and what was not."""
    cells = [cell for part in merged.parts for cell in part.cells]
    breakdowns = [breakdown for part in merged.parts for breakdown in part.breakdowns]
    steps = Steps(cells)
    blocks = [_heading(merged)]
    for sampling in ("greedy", "sampled"):
        blocks.append(_step_table(steps, sampling))
    blocks += [
        _ways_table(cells),
        _one_among_table(steps, cells),
        _length_table(cells),
        _model_table(cells),
    ]
    blocks += [_breakdown_table(breakdown) for breakdown in breakdowns]
    blocks.append(_prompt_table([found for part in merged.parts for found in part.prompts]))
    failures = [f"- figures of {part.part} are missing: {part.failure}" for part in merged.parts if part.failure]
    blocks.append(failures + _skipped(cells))
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _heading(merged: Merged) -> list[str]:
    first = merged.parts[0]
    machines = sorted({f"{part.machine.cpu}, {part.machine.cores} cores, driver {part.machine.driver or NONE}"
                       for part in merged.parts})  # fmt: skip
    dates = sorted(part.date for part in merged.parts)
    versions = first.versions
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return [
        f"Commit {merged.commit}, {merged.gpu or 'no GPU'}; {'; '.join(machines)}; torch {versions.torch}, triton "
        f"{versions.triton or NONE}, CUDA {versions.cuda or NONE}, Python {versions.python}; {when}.",
        f"Parts: {', '.join(part.part for part in merged.parts)}.",
    ]


def _step_table(steps: Steps, sampling: Sampling) -> list[str]:
    rows = []
    for place in steps.places():
        graph, engine = steps.ms(place, "graph", sampling), steps.ms(place, "engine", sampling)
        cells = [cell for way in ("graph", "engine") if (cell := steps.cell(place, way, sampling))]
        if not cells:
            continue
        row = [place[0], str(place[1]), number(cells[0].floor_ms), number(graph), number(engine)]
        row.append(over(engine, graph))
        if sampling == "greedy":
            peer, goal = best_peer_ms(*place), known(GOALS_MS, *place)
            row += [number(known(times, *place)) for times in PEERS_MS.values()]
            row += [over(peer, engine), number(goal), at_most(engine, goal)]
        rows.append(row)
    if not rows:
        return []
    head = ["shape", "batch", "floor", "graphs", "engine", "engine ÷ graphs"]
    title = "greedy" if sampling == "greedy" else "temperature 0.8, top-p 0.9"
    if sampling == "greedy":
        head += [*PEERS_MS, "best of these ÷ engine", "goal", ""]
    return [f"**Milliseconds a decode step, {title}**", "", *table(head, rows)]


def _ways_table(cells: Sequence[Cell]) -> list[str]:
    rows = [
        [
            cell.shape, str(cell.rows), cell.sampling, cell.way, number(cell.step_ms, 3), str(cell.nodes or NONE),
            number(cell.idle_us, 1), percent(idle_share(cell)), number(cell.overlap, 3), number(cell.host_us, 0),
        ]
        for cell in cells
        if cell.table == "step" and cell.step_ms is not None
    ]  # fmt: skip
    head = ["shape", "batch", "sampling", "way", "ms", "nodes", "idle µs", "of a step", "overlap", "host µs"]
    return ["**Each way in detail**", "", *table(head, rows)] if rows else []


def _one_among_table(steps: Steps, cells: Sequence[Cell]) -> list[str]:
    """What sampling and log-probabilities add to a greedy step through the engine."""
    rows = []
    for place in steps.places():
        greedy = steps.ms(place, "engine")
        added = [steps.ms(place, "engine", kind) for kind in ("sampled", "one sampled", "one with log-probabilities")]
        if greedy is None or not any(added):
            continue
        less = [None if one is None else one - greedy for one in added]
        rows.append([place[0], str(place[1]), number(greedy, 3), *(number(one, 3) for one in less)])
    head = ["shape", "batch", "greedy", "all sampled", "one sampled", "one with log-probabilities"]
    return ["**Milliseconds that sampling adds to a greedy step**", "", *table(head, rows)] if rows else []


def _length_table(cells: Sequence[Cell]) -> list[str]:
    rows = [
        [
            cell.shape, str(cell.rows), cell.prompt, f"{cell.context:,.0f}", number(cell.floor_ms),
            number(cell.step_ms, 3), over(cell.step_ms, cell.floor_ms), number(cell.idle_us, 1),
        ]
        for cell in cells
        if cell.table == "lengths"
    ]  # fmt: skip
    head = ["shape", "batch", "prompts", "mean context", "floor", "ms", "÷ floor", "idle µs"]
    return ["**Long contexts and ragged lengths, greedy, through the engine**", "", *table(head, rows)] if rows else []


def _model_table(cells: Sequence[Cell]) -> list[str]:
    rows = []
    for cell in cells:
        if cell.table != "models":
            continue
        peer, goal = (known(times, cell.shape, cell.rows) for times in (VLLM_MODELS_MS, MODEL_GOALS_MS))
        rows.append([
            cell.shape, str(cell.rows), cell.way, number(cell.experts, 1), number(cell.floor_ms),
            number(cell.step_ms, 3), over(cell.step_ms, cell.floor_ms), str(cell.nodes or NONE),
            _one_graph(cell), number(cell.overlap, 3), at_least(cell.overlap, OVERLAP), number(peer), number(goal),
            at_most(cell.step_ms, goal),
        ])  # fmt: skip
    head = ["shape", "batch", "way", "experts a layer", "floor", "ms", "÷ floor", "nodes", "launches of one graph",
            "overlap", f"at least {OVERLAP:g}", "vLLM 0.26.0", "goal", ""]  # fmt: skip
    title = "**Models with experts or recurrent states: milliseconds a decode step, greedy**"
    return [title, "", _STATES, "", *table(head, rows)] if rows else []


def _one_graph(cell: Cell) -> str:
    """Format how many of the engine's launches were one graph, and why others were not."""
    if cell.launches is None or cell.not_one_graph is None:
        return NONE
    others = sum(cell.not_one_graph.values())
    whole = f"{cell.launches - others} of {cell.launches}"
    return f"{whole}; not {counts(cell.not_one_graph)}" if others else whole


def _breakdown_table(found: Breakdown) -> list[str]:
    total = sum(kernel.total_us for kernel in found.kernels)
    title = (
        f"**{found.shape}, batch {found.rows}, kernel by kernel**: {found.launches} launches at a context of "
        f"{found.context:,.0f}, {found.step_us:,.1f} µs a step while traced, {total:,.1f} µs in kernels, floor "
        f"{found.floor_us:,.1f} µs"
    )
    roles = [
        [one.role, number(one.own_us, 1), number(one.floor_us, 1), over(one.own_us, one.floor_us),
         number(one.total_us, 1)]
        for one in found.roles
    ]  # fmt: skip
    kernels = [
        [f"`{one.name[:80]}`", one.role, number(one.count, 1), number(one.mean_us, 2), number(one.total_us, 1),
         number(one.own_us, 1), percent(one.share)]
        for one in found.kernels[:_KERNELS_SHOWN]
    ]  # fmt: skip
    lines = [title, "", *table(["work", "adds µs", "floor", "÷ floor", "runs µs"], roles), ""]
    lines += table(["kernel", "work", "a step", "mean µs", "runs µs", "adds µs", "share"], kernels)
    left = len(found.kernels) - _KERNELS_SHOWN
    return [*lines, "", f"{left} more kernels are in the result file."] if left > 0 else lines


def _prompt_table(found_times: Sequence[PromptTime]) -> list[str]:
    rows = []
    for time in found_times:
        found, held_against = time.first_token_ms, (VLLM_FIRST_TOKEN_MS, FIRST_TOKEN_GOALS_MS)
        alone = not time.rows and time.together == 1
        peer, goal = (known(times, time.shape, time.tokens) if alone else None for times in held_against)
        rows.append([
            time.shape, _prompts(time), str(time.rows or "alone"), time.setting, number(time.products_ms, 1),
            number(time.met_ms, 1), number(found, 1), over(found, time.products_ms), percent(time.idle_between),
            percent(time.idle_inside), _idle_verdict(time), number(time.gap_p50_ms, 1), number(time.gap_p99_ms, 1),
            number(peer, 1), number(goal, 1), at_most(found, goal),
        ])  # fmt: skip
    head = ["shape", "prompt", "rows beside", "set for", "products", "met first", "first token", "÷ products",
            "idle between", "idle inside", f"at most {100 * MIXED_IDLE:.0f} %", "gap p50", "gap p99", "vLLM 0.26.0",
            "goal", ""]  # fmt: skip
    return ["**Milliseconds to the first token, and between two tokens of the rows beside**", "",
            *table(head, rows)] if rows else []  # fmt: skip


def _idle_verdict(time: PromptTime) -> str:
    if time.tokens < MIXED_IDLE_FROM or time.idle_between is None or time.idle_inside is None:
        return NONE
    return at_most(time.idle_between + time.idle_inside, MIXED_IDLE)


def _prompts(time: PromptTime) -> str:
    return f"{time.tokens:,}" if time.together == 1 else f"{time.together} x {time.tokens:,}"


def _skipped(cells: Sequence[Cell]) -> list[str]:
    return [
        f"- no figure for {cell.shape}, batch {cell.rows}, prompts of {cell.prompt}, {cell.sampling}, {cell.way}: "
        f"{cell.skipped}"
        for cell in cells
        if cell.skipped
    ]


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def over(one: float | None, other: float | None) -> str:
    return number(ratio(one, other), 3)


def ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other is not None else None


def percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.2%}"


def counts(of: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(of.items())) or NONE


def at_most(found: float | None, goal: float | None) -> str:
    """The verdict."""
    return NONE if goal is None or found is None else "met" if found <= goal else "missed"


def at_least(found: float | None, goal: float) -> str:
    """The verdict."""
    return NONE if found is None else "met" if found >= goal else "missed"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
