"""A container of a pod as kubelet would start it, as far as Linux alone can: `python -m tests.deploy.container FILE`.

It is run as root in namespaces of its own (`unshare --net --mount --pid --fork`), and becomes the container's command,
with the process id 1. What it sees is this machine's root, which it can't write to; the pod's volumes, and nothing of
them that the pod has not; a network with nothing but loopback; and the user, group and rights of the pod.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from tests.project.repository import ROOT

_SIOCSIFFLAGS: Final = 0x8914  # of ioctl(2) on Linux: sets the flags of a network interface
_IFF_UP: Final = 1


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """mount: the folder. files: of a Secret, by name; None is an empty folder that can be written. mode: of files."""

    mount: str
    files: Mapping[str, str] | None = None
    mode: int = 0o444


class ContainerOrders(msgspec.Struct, frozen=True, kw_only=True):
    """folder: an empty one, in which the container's root is made. variables: all that the command gets."""

    folder: str
    command: list[str]
    variables: dict[str, str]
    user: int
    group: int
    volumes: list[Volume]


def become(orders: ContainerOrders) -> None:
    """Never returns. Raises CalledProcessError or OSError where the machine does not permit it."""
    folder = Path(orders.folder)
    _mount("-t", "tmpfs", "tmpfs", folder)
    root, upper, work = (folder / name for name in ("root", "upper", "work"))
    for each in (root, upper, work):
        each.mkdir()
    _mount("-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={upper},workdir={work}", root)
    _mount("--rbind", "/dev", root / "dev")
    _mount("-t", "proc", "proc", root / "proc")
    for volume in orders.volumes:
        _make(root, volume, orders.group)
    shown: list[Path] = []
    for needed in (ROOT, Path(sys.prefix), Path(sys.base_prefix)):
        if not any(map(needed.is_relative_to, shown)):
            _show(root, needed, [Path(volume.mount) for volume in orders.volumes])
            shown.append(needed)
    _mount("-o", "remount,ro", root)
    _raise_loopback()
    os.chroot(root)
    os.chdir("/")
    rights = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    who = [f"--reuid={orders.user}", f"--regid={orders.group}", f"--groups={orders.group}"]
    os.execvpe("setpriv", ["setpriv", *who, *rights, "--", *orders.command], orders.variables)


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _show(root: Path, path: Path, hidden: list[Path]) -> None:
    """Has a folder of this machine there, for everybody to enter and nobody to write, as an image has it. hidden: by
    volumes above it."""
    inside = root / path.relative_to("/")
    covered = any(map(path.is_relative_to, hidden)) or path.stat().st_dev != Path("/").stat().st_dev
    if covered:
        inside.mkdir(parents=True, exist_ok=True)
        upper, work = (root.parent / f"{each}-of-{path.name}" for each in ("upper", "work"))
        for each in (upper, work):
            each.mkdir()
        _mount("-t", "overlay", "overlay", "-o", f"lowerdir={path},upperdir={upper},workdir={work}", inside)
    for folder in (inside, *inside.parents):
        if folder == root:
            break
        folder.chmod(folder.stat().st_mode | 0o111)  # above the machine's own folder, which stays as it is
    if covered:
        _mount("-o", "remount,ro", inside)


def _make(root: Path, volume: Volume, group: int) -> None:
    """A folder that can be written; or a Secret, which the pod can't write and which changes under it."""
    folder = root / volume.mount.removeprefix("/")
    folder.mkdir(parents=True, exist_ok=True)
    if volume.files is None:
        _mount("-t", "tmpfs", "-o", "mode=0777", "tmpfs", folder)
        return
    secret = secret_behind(root.parent, volume.mount)
    secret.mkdir(parents=True)
    write_secret(secret, volume.files, volume.mode, group)
    _mount("--bind", "-o", "ro", secret, folder)


def secret_behind(folder: Path, mount: str) -> Path:
    """Where kubelet writes a Secret that a container has mounted. folder: of its orders."""
    return folder / "secrets" / mount.strip("/").replace("/", "-")


def write_secret(secret: Path, files: Mapping[str, str], mode: int, group: int) -> None:
    """All files at once, at first and when the Secret changes: by way of a link that is replaced, as kubelet does."""
    version = secret / f"..{time.monotonic_ns()}"
    version.mkdir(mode=0o755)
    for name, text in files.items():
        file = version / name
        file.write_text(text)
        os.chown(file, 0, group)
        file.chmod(mode)
        if not (secret / name).is_symlink():
            (secret / name).symlink_to(Path("..data") / name)
    (new := secret / "..data_tmp").symlink_to(version.name)
    new.rename(secret / "..data")


def _raise_loopback() -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


if __name__ == "__main__":
    become(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ContainerOrders))
