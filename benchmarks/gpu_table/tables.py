"""The tables as Markdown, for the README and for whoever reads the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.gpu_table.goals import Steps, goals, idle_share
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
    Place,
    Prompt,
    best_peer_ms,
)
from benchmarks.gpu_table.results import Agreement, Arrivals, Breakdown, Cell, PromptTime, Sampling

_NONE = "–"
_KERNELS_SHOWN = 20


def _number(value: float | None, digits: int = 2) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _over(one: float | None, other: float | None) -> str:
    return _number(one / other if one is not None and other is not None else None, 3)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


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
        _depth_table(cells),
        _length_table(cells),
        _model_table(cells),
    ]
    blocks += [_breakdown_table(breakdown) for breakdown in breakdowns]
    blocks.append(_prompt_table([found for part in merged.parts for found in part.prompts]))
    blocks.append(_arrival_table([found for part in merged.parts for found in part.arrivals]))
    blocks.append(_agreement_table([found for part in merged.parts for found in part.agreements]))
    failures = [f"- figures of {part.part} are missing: {part.failure}" for part in merged.parts if part.failure]
    blocks += [_goal_table(steps), failures + _skipped(cells)]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _heading(merged: Merged) -> list[str]:
    first = merged.parts[0]
    machines = sorted({f"{part.machine.cpu}, {part.machine.cores} cores, driver {part.machine.driver or _NONE}"
                       for part in merged.parts})  # fmt: skip
    dates = sorted(part.date for part in merged.parts)
    versions = first.versions
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return [
        f"Commit {merged.commit}, {merged.gpu or 'no GPU'}; {'; '.join(machines)}; torch {versions.torch}, triton "
        f"{versions.triton or _NONE}, CUDA {versions.cuda or _NONE}, Python {versions.python}; {when}.",
        f"Parts: {', '.join(part.part for part in merged.parts)}.",
    ]


def _step_table(steps: Steps, sampling: Sampling) -> list[str]:
    rows = []
    for place in steps.places():
        graph, engine, grpc = (steps.ms(place, way, sampling) for way in ("graph", "engine", "grpc"))
        known = [cell for way in ("graph", "engine", "grpc") if (cell := steps.cell(place, way, sampling))]
        if not known:
            continue
        row = [place.shape, str(place.rows), _number(known[0].floor_ms), *map(_number, (graph, engine, grpc))]
        row += [_over(engine, graph), _over(grpc, graph)]
        if sampling == "greedy":
            peer = best_peer_ms(place)
            row += [_number(times.get(place)) for times in PEERS_MS.values()]
            goal = GOALS_MS.get(place)
            row += [_over(peer, engine), _number(goal), _verdict(engine, goal)]
        rows.append(row)
    if not rows:
        return []
    head = ["shape", "batch", "floor", "graphs", "engine", "gRPC", "engine ÷ graphs", "gRPC ÷ graphs"]
    title = "greedy" if sampling == "greedy" else "temperature 0.8, top-p 0.9"
    if sampling == "greedy":
        head += [*PEERS_MS, "best of these ÷ engine", "goal", ""]
    return [f"**Milliseconds a decode step, {title}**", "", *_table(head, rows)]


def _ways_table(cells: Sequence[Cell]) -> list[str]:
    rows = [
        [
            cell.shape, str(cell.rows), cell.sampling, cell.way, _number(cell.step_ms, 3), str(cell.nodes or _NONE),
            _number(cell.idle_us, 1), _percent(idle_share(cell)), _number(cell.overlap, 3), _number(cell.host_us, 0),
            _number(cell.tokens_per_message, 2),
        ]
        for cell in cells
        if cell.table == "step" and cell.step_ms is not None
    ]  # fmt: skip
    head = ["shape", "batch", "sampling", "way", "ms", "nodes", "idle µs", "of a step", "overlap", "host µs",
            "tokens a message"]  # fmt: skip
    return ["**Each way in detail**", "", *_table(head, rows)] if rows else []


def _one_among_table(steps: Steps, cells: Sequence[Cell]) -> list[str]:
    """What sampling and log-probabilities add to a greedy step through the engine."""
    rows = []
    for place in steps.places():
        greedy = steps.ms(place, "engine")
        added = [steps.ms(place, "engine", kind) for kind in ("sampled", "one sampled", "one with log-probabilities")]
        if greedy is None or not any(added):
            continue
        less = [None if one is None else one - greedy for one in added]
        rows.append([place.shape, str(place.rows), _number(greedy, 3), *(_number(one, 3) for one in less)])
    head = ["shape", "batch", "greedy", "all sampled", "one sampled", "one with log-probabilities"]
    return ["**Milliseconds that sampling adds to a greedy step**", "", *_table(head, rows)] if rows else []


def _depth_table(cells: Sequence[Cell]) -> list[str]:
    rows = [
        [
            cell.shape, str(cell.rows), "serial" if cell.run_ahead == 0 else str(cell.run_ahead),
            "graph" if cell.captured else "eager", _number(cell.floor_ms), _number(cell.step_ms, 3),
            _number(cell.idle_us, 1), _percent(idle_share(cell)), _number(cell.overlap, 3), _number(cell.host_us, 0),
        ]
        for cell in cells
        if cell.table == "depths" and cell.step_ms is not None
    ]  # fmt: skip
    head = ["shape", "batch", "launches ahead", "launch", "floor", "ms", "idle µs", "of a step", "overlap", "host µs"]
    return ["**Launches ahead, and without graphs, greedy**", "", *_table(head, rows)] if rows else []


def _length_table(cells: Sequence[Cell]) -> list[str]:
    rows = [
        [
            cell.shape, str(cell.rows), cell.prompt, f"{cell.context:,.0f}", _number(cell.floor_ms),
            _number(cell.step_ms, 3), _over(cell.step_ms, cell.floor_ms), _number(cell.idle_us, 1),
        ]
        for cell in cells
        if cell.table == "lengths"
    ]  # fmt: skip
    head = ["shape", "batch", "prompts", "mean context", "floor", "ms", "÷ floor", "idle µs"]
    return ["**Long contexts and ragged lengths, greedy, through the engine**", "", *_table(head, rows)] if rows else []


def _model_table(cells: Sequence[Cell]) -> list[str]:
    rows = []
    for cell in cells:
        if cell.table != "models":
            continue
        place = Place(cell.shape, cell.rows)
        peer, goal = VLLM_MODELS_MS.get(place), MODEL_GOALS_MS.get(place)
        rows.append([
            cell.shape, str(cell.rows), cell.way, _number(cell.experts, 1), _number(cell.floor_ms),
            _number(cell.step_ms, 3), _over(cell.step_ms, cell.floor_ms), str(cell.nodes or _NONE),
            _number(cell.overlap, 3), _number(peer), _number(goal), _verdict(cell.step_ms, goal),
        ])  # fmt: skip
    head = ["shape", "batch", "way", "experts a layer", "floor", "ms", "÷ floor", "nodes", "overlap", "vLLM 0.26.0",
            "goal", ""]  # fmt: skip
    return ["**Models with experts: milliseconds a decode step, greedy**", "", *_table(head, rows)] if rows else []


def _breakdown_table(found: Breakdown) -> list[str]:
    total = sum(kernel.total_us for kernel in found.kernels)
    title = (
        f"**{found.shape}, batch {found.rows}, kernel by kernel**: {found.launches} launches at a context of "
        f"{found.context:,.0f}, {found.step_us:,.1f} µs a step while traced, {total:,.1f} µs in kernels, floor "
        f"{found.floor_us:,.1f} µs"
    )
    roles = [
        [one.role, _number(one.own_us, 1), _number(one.floor_us, 1), _over(one.own_us, one.floor_us),
         _number(one.total_us, 1)]
        for one in found.roles
    ]  # fmt: skip
    kernels = [
        [f"`{one.name[:80]}`", one.role, _number(one.count, 1), _number(one.mean_us, 2), _number(one.total_us, 1),
         _number(one.own_us, 1), _percent(one.share)]
        for one in found.kernels[:_KERNELS_SHOWN]
    ]  # fmt: skip
    lines = [title, "", *_table(["work", "adds µs", "floor", "÷ floor", "runs µs"], roles), ""]
    lines += _table(["kernel", "work", "a step", "mean µs", "runs µs", "adds µs", "share"], kernels)
    left = len(found.kernels) - _KERNELS_SHOWN
    return [*lines, "", f"{left} more kernels are in the result file."] if left > 0 else lines


def _prompt_table(times: Sequence[PromptTime]) -> list[str]:
    """A line for each prompt with the fastest kernels, and what it took with the exact ones beside it."""
    exactly = {_asked(time): time.first_token_ms for time in times if time.exact}
    fastest = {_asked(time): time for time in times if not time.exact}
    rows = []
    for time in (*fastest.values(), *(time for time in times if time.exact and _asked(time) not in fastest)):
        place = Prompt(time.shape, time.tokens)
        alone = not time.rows and not time.exact and time.together == 1
        peer, goal = (known.get(place) if alone else None for known in (VLLM_FIRST_TOKEN_MS, FIRST_TOKEN_GOALS_MS))
        found, exact = None if time.exact else time.first_token_ms, exactly.get(_asked(time))
        rows.append([
            time.shape, _prompts(time), str(time.rows or "alone"), time.setting, _number(time.products_ms, 1),
            _number(time.met_ms, 1), _number(found, 1), _over(found, time.products_ms), _percent(time.idle_between),
            _percent(time.idle_inside), _idle_verdict(time), _number(exact, 1), _over(exact, found),
            _number(time.gap_p50_ms, 1), _number(time.gap_p99_ms, 1), _number(peer, 1), _number(goal, 1),
            _verdict(found, goal),
        ])  # fmt: skip
    head = ["shape", "prompt", "rows beside", "set for", "products", "met first", "first token", "÷ products",
            "idle between", "idle inside", f"at most {100 * MIXED_IDLE:.0f} %", "exact", "exact ÷", "gap p50",
            "gap p99", "vLLM 0.26.0", "goal", ""]  # fmt: skip
    return ["**Milliseconds to the first token, and between two tokens of the rows beside**", "",
            *_table(head, rows)] if rows else []  # fmt: skip


def _idle_verdict(time: PromptTime) -> str:
    if time.tokens < MIXED_IDLE_FROM or time.idle_between is None or time.idle_inside is None:
        return _NONE
    return _verdict(time.idle_between + time.idle_inside, MIXED_IDLE)


def _prompts(time: PromptTime) -> str:
    return f"{time.tokens:,}" if time.together == 1 else f"{time.together} x {time.tokens:,}"


def _asked(time: PromptTime) -> tuple[str, str, int, int, int]:
    return time.shape, time.setting, time.tokens, time.rows, time.together


def _arrival_table(loads: Sequence[Arrivals]) -> list[str]:
    rows = [
        [
            load.shape, f"{load.requests} x {load.tokens:,}, {load.generated} out",
            f"every {load.every_s:g} s" if load.every_s else "at once", str(load.run_ahead or "serial"),
            _number(load.tokens_s, 0), _number(load.first_p50_ms, 0), _number(load.first_p99_ms, 0),
            _number(load.gap_p50_ms, 1), _number(load.gap_p99_ms, 1), _percent(load.overlap),
            _overlap_verdict(load), _percent(load.idle_between), _percent(load.idle_inside), _counts(load.launches),
            _counts(load.fallbacks), _counts(load.barriers), str(_NONE if load.held_back is None else load.held_back),
        ]
        for load in loads
    ]  # fmt: skip
    head = ["shape", "requests", "arrive", "launches ahead", "tokens/s", "first token p50", "p99", "gap p50", "p99",
            "overlap", f"at least {100 * OVERLAP:.0f} %", "idle between", "inside", "launches", "not one graph",
            "barriers", "held back"]  # fmt: skip
    left_out = [f"- {load.shape} {load.requests} x {load.tokens:,}, {load.run_ahead or 'serial'}: {load.skipped}"
                for load in loads if load.skipped]  # fmt: skip
    title = "**Requests that arrive while others decode: milliseconds, through the engine, set for the prompts' rate**"
    return [title, "", *_table(head, rows), *left_out] if rows else []


def _overlap_verdict(load: Arrivals) -> str:
    if load.overlap is None or not load.run_ahead:
        return _NONE
    return "met" if load.overlap >= OVERLAP else "missed"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or _NONE


def _verdict(found: float | None, goal: float | None) -> str:
    return _NONE if goal is None or found is None else "met" if found <= goal else "missed"


def _agreement_table(agreements: Sequence[Agreement]) -> list[str]:
    rows = [
        [
            found.exact, "one at a time" if found.alone else "together",
            "serial" if found.run_ahead == 0 else str(found.run_ahead),
            f"{found.other_tokens} of {found.requests}", f"{found.other_logprobs} of {found.with_logprobs}",
        ]
        for found in agreements
    ]  # fmt: skip
    head = ["exact", "requests", "launches ahead", "other tokens", "other log-probabilities"]
    title = "**Answers of the bundled model that are others than those one at a time, through gRPC**"
    return [title, "", *_table(head, rows)] if rows else []


def _goal_table(steps: Steps) -> list[str]:
    rows = [
        [goal.what, _number(goal.most, goal.digits), _number(goal.found, goal.digits), goal.verdict]
        for goal in goals(steps)
    ]
    return ["**Goals**", "", *_table(["what", "at most", "found", ""], rows)]


def _skipped(cells: Sequence[Cell]) -> list[str]:
    return [
        f"- no figure for {cell.shape}, batch {cell.rows}, prompts of {cell.prompt}, {cell.sampling}, {cell.way}: "
        f"{cell.skipped}"
        for cell in cells
        if cell.skipped
    ]


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{share:.2%}"
