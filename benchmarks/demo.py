"""What `make demo` runs: several prompts at once over gRPC, one aborted, one stopped by a string, then `Stats`.

Lines are printed as they arrive, each behind the name of its stream. Exits 0 only if everything ended as it should.
Arguments are flags for the service: `python -m benchmarks.demo --run-ahead serial`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from benchmarks.local_service import ServiceFailed, local_service
from runahead.service.commands.stats_command import stats_lines
from runahead.v1 import control_pb2, generate_pb2, generation_service_pb2_grpc, model_pb2, stats_pb2

TIMEOUT_S: Final = 120.0
ABORT_AFTER_LINES: Final = 5
SEED: Final = 7

_STOP: Final = generate_pb2.FINISH_REASON_STOP
_ABORTED: Final = generate_pb2.FINISH_REASON_ABORTED


@dataclass(frozen=True, slots=True)
class Scene:
    """One stream: a prompt, its options, and how it must end (None: however the model likes)."""

    name: str
    prompt: str
    note: str
    sampling: dict[str, Any]
    stopping: dict[str, Any] = field(default_factory=dict)
    must_end: generate_pb2.FinishReason | None = None

    def request(self) -> generate_pb2.GenerateRequest:
        return generate_pb2.GenerateRequest(
            request_id=f"demo-{self.name}",
            text=self.prompt,
            sampling=generate_pb2.SamplingOptions(seed=SEED, **self.sampling),
            stopping=generate_pb2.StoppingOptions(**{"max_tokens": 160, **self.stopping}),
        )


_STACK: Final = (
    'class Stack:\n    """A list where the last one in is the first one out."""\n\n    def __init__(self):\n'
)
_PARSE: Final = 'def parse_header(line):\n    """Split a header line into a name and a value."""\n'
_WALK: Final = "def walk(top, topdown=True):\n    for name in os.listdir(top):\n"
SCENES: Final = (
    Scene("copy", "def copy_file(source, target):\n", "greedy", {"temperature": 0.0}),
    Scene("stack", _STACK, "temperature 0.7, top-p 0.9", {"temperature": 0.7, "top_p": 0.9}),
    Scene("parse", _PARSE, "temperature 0.8, top-k 20", {"temperature": 0.8, "top_k": 20}),
    Scene("walk", _WALK, "temperature 0.6, min-p 0.05", {"temperature": 0.6, "min_p": 0.05}),
    Scene(
        "line", "def is_empty(items):\n    return ", "one line: stopped by the string '\\n'", {"temperature": 0.5},
        {"stop": ["\n"], "ignore_eos": True}, _STOP,
    ),
    Scene(
        "endless", "def main(argv=None):\n", f"no end of its own: aborted after {ABORT_AFTER_LINES} lines",
        {"temperature": 0.9, "top_p": 0.95}, {"max_tokens": 1500, "ignore_eos": True}, _ABORTED,
    ),
)  # fmt: skip


class DemoFailed(RuntimeError):
    """Something did not end as it should."""


@dataclass(slots=True)
class Transcript:
    """Prints whole lines of several streams, each behind its name."""

    colour: bool
    start: float = field(default_factory=time.monotonic)
    _partial: dict[str, str] = field(default_factory=dict)
    _names: list[str] = field(default_factory=lambda: [scene.name for scene in SCENES])

    def text(self, name: str, text: str) -> int:
        """Takes more text of a stream; prints the lines it completes and returns how many they are."""
        *lines, rest = (self._partial.get(name, "") + text).split("\n")
        self._partial[name] = rest
        for line in lines:
            self.line(name, line)
        return len(lines)

    def end(self, name: str, what: str) -> None:
        """Prints what is left of a stream's last line, and how it ended."""
        if rest := self._partial.pop(name, ""):
            self.line(name, rest)
        self.line(name, f"── {what}")

    def line(self, name: str, line: str) -> None:
        shade = 31 + self._names.index(name) % 6
        label = f"{name:>8}"
        if self.colour:
            label = f"\x1b[{shade}m{label}\x1b[0m"
        print(f"{time.monotonic() - self.start:6.2f} s {label} │ {line}", flush=True)


async def play(stub: Any, scene: Scene, transcript: Transcript) -> generate_pb2.Finished:
    """Streams one scene to its end. Raises DemoFailed if it does not end as it must."""
    lines = 0
    aborted = False
    finished: generate_pb2.Finished | None = None
    async for response in stub.Generate(scene.request(), timeout=TIMEOUT_S):
        event = response.WhichOneof("event")
        if event == "accepted":
            transcript.text(scene.name, scene.prompt)
        elif event == "delta":
            lines += transcript.text(scene.name, response.delta.text)
        elif event == "finished":
            finished = response.finished
        if scene.must_end == _ABORTED and lines >= ABORT_AFTER_LINES and not aborted:
            aborted = True
            await abort(stub, scene)
    if finished is None:
        raise DemoFailed(f"stream {scene.name} closed without an end")
    reason = generate_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_")
    transcript.end(scene.name, f"{reason}, {finished.usage.completion_tokens} tokens")
    if scene.must_end is not None and finished.reason != scene.must_end:
        raise DemoFailed(f"stream {scene.name} ended {reason}, and should not have")
    return finished


async def abort(stub: Any, scene: Scene) -> None:
    """Ends a running scene by its id. Raises DemoFailed if the server does not know it."""
    answer = await stub.Abort(control_pb2.AbortRequest(request_ids=[f"demo-{scene.name}"]), timeout=TIMEOUT_S)
    outcomes = [result.outcome for result in answer.results]
    if outcomes != [control_pb2.ABORT_OUTCOME_ABORTED]:
        raise DemoFailed(f"Abort answered {outcomes}")


async def perform(url: str) -> None:
    """The whole demo against a server. Raises DemoFailed, or grpc.RpcError."""
    async with grpc.aio.insecure_channel(url) as channel:
        stub: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)
        model = await stub.GetModelInfo(model_pb2.GetModelInfoRequest(), timeout=TIMEOUT_S)
        print(f"{url} serves {model.model}: {model.architecture}, {model.parameters / 1e6:.1f} M parameters, ", end="")
        print(f"context {model.context_length}, on {model.engine.device} in {model.engine.dtype}\n")
        for scene in SCENES:
            print(f"{scene.name:>8}: {scene.note}")
        print(flush=True)
        transcript = Transcript(colour=sys.stdout.isatty())
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play(stub, scene, transcript)) for scene in SCENES]
        elapsed_s = time.monotonic() - transcript.start
        tokens = sum(task.result().usage.completion_tokens for task in tasks)
        print(f"\n{len(tasks)} streams at once, {tokens} tokens in {elapsed_s:.2f} s\n\nStats")
        answer = await stub.Stats(stats_pb2.StatsRequest(), timeout=TIMEOUT_S)
        for line in stats_lines(answer.stats):
            print("  " + line)


def main(flags: Sequence[str] = ()) -> int:
    """Run the demo against a new service. flags: of `runahead serve`, after the flags of the bundled model on the
    CPU. Returns the exit status."""
    print("starting the service ...", flush=True)
    began = time.monotonic()
    try:
        with local_service(["--model", "bundled", "--device", "cpu", *flags]) as service:
            print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
            asyncio.run(perform(service.url))
    except ServiceFailed as error:
        reasons = [str(error)]
    except ExceptionGroup as group:
        reasons = [_reason(error) for error in _flatten(group)]
    except (DemoFailed, grpc.RpcError) as error:
        reasons = [_reason(error)]
    except KeyboardInterrupt:
        print("\ninterrupted; the service is stopped", file=sys.stderr)
        return 130
    else:
        print("\nthe service has stopped and left nothing running")
        return 0
    print("", *(f"demo failed: {reason}" for reason in reasons), sep="\n", file=sys.stderr)
    return 1


def _flatten(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flatten(error)
        else:
            yield error


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}" if not isinstance(error, DemoFailed) else str(error)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
