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

import yaml

from benchmarks.local_service import LocalService, started_service
from tests.deploy.rendering import K8S
from tests.project.repository import ROOT
from tests.router.hop import Hop, hop

TOKEN: Final = "router-token-0123456789"
KEY: Final = "key-of-clients"
HOSTS: Final = ("127.0.0.1", "127.0.0.2")
FLAGS: Final = ("--vllm-facade", "--threads", "1", "--max-rows", "8", "--num-blocks", "600", "--max-streams", "12")
DEPLOYMENT: Final = K8S / "components" / "router" / "deployment.yaml"
CHAT_TEMPLATE: Final = "{% for message in messages %}{{ message.content }}{% endfor %}"
_START_S: Final = 90.0


@dataclass(frozen=True, slots=True)
class Launched:
    """A router's process. environment: the one that it is installed in. url: of the OpenAI endpoint."""

    environment: Path
    url: str
    log: Path

    def openai(self, *names: str) -> dict[str, Any]:
        """The answers of `openai_calls`, in the router's environment."""
        calls = ROOT / "tests" / "router" / "openai_calls.py"
        command = [str(self.environment / "bin" / "python"), str(calls), self.url, KEY]
        done = subprocess.run([*command, *names], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def get(self, path: str) -> Any:
        """What the router says of itself. Raises HTTPError."""
        request = urllib.request.Request(self.url + path, headers={"authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


@dataclass(frozen=True, slots=True)
class Router(Launched):
    """replicas: in the order of HOSTS."""

    hop: Hop
    replicas: Sequence[LocalService]


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
        urls = [f"127.0.0.1:{each}" for each in proxy.ports]
        made = stack.enter_context(launched(environment, folder, urls, "round_robin"))
        yield Router(made.environment, made.url, made.log, proxy, replicas)


@contextmanager
def launched(environment: Path, folder: Path, urls: Sequence[str], policy: str) -> Iterator[Launched]:
    """A router that knows the two replicas behind these, HOST:PORT."""
    template, log = folder / "template.jinja", folder / "router.log"
    template.write_text(CHAT_TEMPLATE)
    own, metrics = (free_port() for _ in range(2))
    command = [str(environment / "bin" / "smg"), "launch", *_arguments(own, metrics, policy)]
    command += ["--chat-template", str(template)]
    command += ["--health-check-interval-secs", "2", "--load-monitor-interval", "2"]
    command += ["--worker-urls", *(f"grpc://{url}" for url in urls)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output, subprocess.Popen(command, env=offline, stdout=output, stderr=output) as process:
        try:
            made = Launched(environment, f"http://127.0.0.1:{own}", log)
            wait_for_workers(made, 2)
            yield made
        finally:
            process.kill()  # by itself it waits for connections that are idle


def _arguments(port: int, metrics_port: int, policy: str) -> list[str]:
    """The router's arguments in deploy/k8s, on this machine."""
    (made,) = yaml.safe_load_all(DEPLOYMENT.read_text(encoding="utf-8"))
    given: list[str] = made["spec"]["template"]["spec"]["containers"][0]["args"]
    here = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--prometheus-host": "127.0.0.1",
        "--prometheus-port": str(metrics_port),
        "--api-key": KEY,
        "--policy": policy,
    }
    pairs = [each.partition("=") for each in given[: given.index("--worker-urls")]]
    assert here.keys() <= {name for name, _, _ in pairs}
    return [f"{name}={here.get(name, value)}" for name, _, value in pairs]


def healthy(made: Launched) -> list[dict[str, Any]]:
    """The workers that the router would choose."""
    return [worker for worker in made.get("/workers")["workers"] if worker["is_healthy"]]


def wait_for_workers(made: Launched, count: int) -> None:
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
