"""A real router in front of replicas of the bundled model that ask who calls, with the proxy between them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.local_service import LocalService, started_service
from tests.project.repository import ROOT
from tests.router.hop import Hop, hop

TOKEN: Final = "router-token-0123456789"
KEY: Final = "key-of-clients"
HOSTS: Final = ("127.0.0.1", "127.0.0.2")
FLAGS: Final = ("--vllm-facade", "--threads", "1", "--max-rows", "8", "--num-blocks", "600")
CHAT_TEMPLATE: Final = "{% for message in messages %}{{ message.content }}{% endfor %}"
_START_S: Final = 90.0


@dataclass(frozen=True, slots=True)
class Router:
    """environment: the one that it is installed in. url: of the OpenAI endpoint. replicas: in the order of HOSTS."""

    environment: Path
    url: str
    log: Path
    hop: Hop
    replicas: Sequence[LocalService]

    def openai(self, *names: str) -> dict[str, Any]:
        """The answers of `openai_calls`, in the router's environment."""
        command = [self.environment / "bin" / "python", ROOT / "tests" / "router" / "openai_calls.py", self.url, KEY]
        done = subprocess.run([*command, *names], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def get(self, path: str) -> Any:
        """What the router says of itself. Raises HTTPError."""
        request = urllib.request.Request(self.url + path, headers={"authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


@contextmanager
def replica(folder: Path, host: str, port: int = 0) -> Iterator[LocalService]:
    callers = folder / "callers"
    callers.write_text(f"router generate,control token {TOKEN}\n")
    flags = ["--host", host, "--callers", str(callers), *FLAGS]
    with started_service(flags, port=port) as started:
        yield started


@contextmanager
def router(environment: Path, folder: Path) -> Iterator[Router]:
    """A router that knows both replicas. environment: in which it is installed. folder: for its files."""
    with ExitStack() as stack:
        first = stack.enter_context(replica(folder, HOSTS[0]))
        port = first.ports["service"]
        replicas = [first, stack.enter_context(replica(folder, HOSTS[1], port))]
        proxy = stack.enter_context(hop(folder, HOSTS, port, TOKEN))
        template, log = folder / "template.jinja", folder / "router.log"
        template.write_text(CHAT_TEMPLATE)
        own, metrics = (free_port() for _ in range(2))
        command = [str(environment / "bin" / "smg"), "launch", "--backend", "vllm", "--policy", "round_robin"]
        command += ["--host", "127.0.0.1", "--port", str(own)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--api-key", KEY]
        command += ["--chat-template", str(template), "--worker-startup-check-interval", "2"]
        command += ["--health-check-interval-secs", "2", "--load-monitor-interval", "2"]
        command += ["--worker-urls", *(f"grpc://127.0.0.1:{each}" for each in proxy.ports)]
        output = stack.enter_context(log.open("wb"))
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
        process = stack.enter_context(subprocess.Popen(command, env=offline, stdout=output, stderr=output))
        stack.callback(process.kill)  # by itself it waits for connections that are idle
        made = Router(environment, f"http://127.0.0.1:{own}", log, proxy, replicas)
        wait_for_workers(made, 2)
        yield made


def healthy(made: Router) -> list[dict[str, Any]]:
    """The workers that the router would choose."""
    return [worker for worker in made.get("/workers")["workers"] if worker["is_healthy"]]


def wait_for_workers(made: Router, count: int) -> None:
    """Raises AssertionError with the end of the router's log."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            if len(healthy(made)) == count and made.openai("completion")["completion"].get("answer"):
                return
        except OSError:
            pass  # it does not listen yet
        assert time.monotonic() < deadline, made.log.read_text(errors="replace")[-3000:]
        time.sleep(0.5)


def free_port() -> int:
    """Of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
