"""`python -m tests.container.serving`, in namespaces of its own, without a network: the image's last step in a
root, and the service in it as the Containerfile starts it.

The root is read-only then, but for /tmp and /dev/shm, and the service runs as the image's user, without a capability.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from tests.container.containerfile import Target, read_containerfile
from tests.container.steps import mount, run_step
from tests.project.repository import ROOT

STOP_S: Final = 60.0
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("root", "wheels", "target", "commit"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    root = Path(arguments.root)
    log = root.parent / "service.log"
    target = read_containerfile(ROOT / "Containerfile").targets[arguments.target]
    begun = time.monotonic()
    run_step(root, target.steps[-1], Path(arguments.wheels))
    check_version(root, arguments.commit)
    print(f"installed after {time.monotonic() - begun:.0f} s", flush=True)
    loopback_up()
    close(root)
    begun = time.monotonic()
    try:
        serve(root, target, log)
    except BaseException:
        sys.stdout.write(log.read_text(errors="replace") if log.exists() else "")
        raise
    print(f"served and ended after {time.monotonic() - begun:.0f} s", flush=True)


def check_version(root: Path, commit: str) -> None:
    """What is installed was built of this commit."""
    command = ["chroot", str(root), "/opt/runahead/bin/runahead", "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.endswith(f"+g{commit}\n"), said


def loopback_up() -> None:
    """A new network namespace has the interface, but not up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def close(root: Path) -> None:
    """Makes the tree read-only, with what a container has besides."""
    mount("--bind", root, root)
    mount("-o", "remount,bind,ro,nosuid", root)
    mount("-t", "proc", "-o", "nosuid,nodev,noexec", "proc", root / "proc")
    mount("-t", "sysfs", "-o", "ro,nosuid,nodev,noexec", "sysfs", root / "sys")
    mount("-t", "tmpfs", "-o", "nosuid,nodev,mode=1777,size=64m", "tmpfs", root / "tmp")
    mount("-t", "tmpfs", "-o", "nosuid,nodev,mode=1777,size=64m", "tmpfs", root / "dev/shm")


def serve(root: Path, target: Target, log: Path) -> None:
    """Starts the service, sends the visitor, and stops it as a cluster does. Raises where any of this is not as it
    should be."""
    user, _, group = target.user.partition(":")
    nobody = ["setpriv", "--reuid", user, "--regid", group, "--clear-groups"]
    nobody += ["--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs"]
    chroot = shutil.which("chroot")
    assert chroot is not None
    inside = [chroot, str(root), *nobody]
    with log.open("wb") as output:
        service = subprocess.Popen(
            [*inside, *target.entrypoint, *target.cmd],
            env=target.env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    with (Path(__file__).parent / "visitor.py").open("rb") as text:
        visitor = subprocess.Popen([*inside, "/opt/runahead/bin/python", "-"], env=target.env, stdin=text)
    while visitor.poll() is None:
        assert service.poll() is None, f"the service has ended with status {service.returncode}"
        time.sleep(0.1)
    assert visitor.returncode == 0, "the service, or its surroundings, are not as they should be; see above"
    service.send_signal(signal.Signals[target.stop_signal])
    assert service.wait(STOP_S) == 0, f"the service ended with status {service.returncode}"
    # Beside this process there is the first of its namespace.
    left = [
        path.name
        for path in (root / "proc").iterdir()
        if path.name.isdigit() and int(path.name) not in (1, os.getpid())
    ]
    assert not left, f"processes {left} are left of the service"
    print(f"{target.stop_signal}: it has ended with status 0 and left nothing running", flush=True)


if __name__ == "__main__":
    main()
