"""A pod of the rendered Deployment, with its Secrets, on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from tests.deploy.container import ContainerOrders, Volume, secret_behind, write_secret
from tests.deploy.rendering import Manifests
from tests.project.repository import ROOT

_START_S: Final = 30.0  # for the namespaces
# What an image sets, here to find our own code: a copy of it, where a test runs on one.
_OF_THE_IMAGE: Final = {"PATH": f"{sysconfig.get_path('scripts')}:/usr/bin:/bin"} | {
    name: value for name, value in os.environ.items() if name == "PYTHONPATH"
}
_NAMESPACES: Final = ("--net", "--mount", "--pid", "--ipc", "--fork", "--kill-child=SIGKILL", "--propagation=private")


@dataclass(frozen=True, slots=True)
class Pod:
    """process: that holds the namespaces, and ends when the container has. log: all that the container says."""

    process: subprocess.Popen[bytes]
    log: Path
    orders: ContainerOrders

    def python(self, *arguments: str, timeout_s: float) -> str:
        """What a Python of this machine prints, in the pod's network. Raises CalledProcessError, TimeoutExpired."""
        enter = ["nsenter", "--net", f"--target={self.container}", sys.executable, *arguments]
        done = subprocess.run(enter, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=timeout_s, text=True)
        return done.stdout

    def change_secret(self, mount: str, files: Mapping[str, str]) -> None:
        """As kubelet does when a Secret has changed. mount: where the container has it."""
        (volume,) = (each for each in self.orders.volumes if each.mount == mount)
        folder = Path(f"/proc/{self.process.pid}/root") / self.orders.folder.removeprefix("/")
        write_secret(secret_behind(folder, mount), files, volume.mode, self.orders.group)

    @property
    def container(self) -> int:
        """The process id of the container's command, which itself sees a 1. Raises TimeoutError where there is none."""
        own, deadline = self.process.pid, time.monotonic() + _START_S
        while not (children := Path(f"/proc/{own}/task/{own}/children").read_text().split()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no container after {_START_S:.0f} s")
            time.sleep(0.01)
        return int(children[0])

    def terminate(self, within_s: float) -> int:
        """Ends it as kubelet does. Returns the exit status. Raises TimeoutExpired."""
        os.kill(self.container, signal.SIGTERM)
        return self.process.wait(within_s)


def why_no_pods() -> str:
    """Why this machine can't start one, empty where it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a pod's namespaces need Linux and root"
    tried = subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip()


@contextlib.contextmanager
def started_pod(manifests: Manifests, secrets: Mapping[str, Mapping[str, str]]) -> Iterator[Pod]:
    """A container with exactly the rendered command, variables, user and volumes. secrets: texts by Secret and key.

    Whatever is left of it in the end is killed.
    """
    context = manifests.pod["securityContext"]
    with tempfile.TemporaryDirectory(prefix="runahead-pod-") as made:
        folder = Path(made)
        root, log = folder / "root", folder / "log"
        root.mkdir()
        orders = ContainerOrders(
            folder=str(root),
            command=[*manifests.container["command"], *manifests.container.get("args", ())],
            variables=_OF_THE_IMAGE | manifests.settings,
            user=context["runAsUser"],
            group=context["runAsGroup"],
            volumes=_volumes(manifests, secrets),
        )
        file = folder / "orders"
        file.write_bytes(msgspec.json.encode(orders))
        command: Sequence[str] = ["unshare", *_NAMESPACES, sys.executable, "-m", "tests.deploy.container", str(file)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            yield Pod(process, log, orders)
        finally:
            process.kill()  # and with it the container, and all that it has started
            process.wait()


def _volumes(manifests: Manifests, secrets: Mapping[str, Mapping[str, str]]) -> list[Volume]:
    found = []
    for mount in manifests.container["volumeMounts"]:
        secret = manifests.volume(mount["name"]).get("secret")
        if secret is None:
            found.append(Volume(mount=mount["mountPath"]))
            continue
        texts = secrets[secret["secretName"]]
        files = {item["path"]: texts[item["key"]] for item in secret["items"]}
        found.append(Volume(mount=mount["mountPath"], files=files, mode=secret["defaultMode"]))
    return found
