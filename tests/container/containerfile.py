"""What the Containerfile says of a target: the steps that install it, and how it is started."""

from __future__ import annotations

import copy
import io
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dockerfile_parse import DockerfileParser

INSTALL: Final = "sh /srv/install.sh "
"""How a step begins. deploy/container is at /srv meanwhile, and the wheels at /mnt."""


@dataclass(slots=True)
class Target:
    """steps: of RUN, without the command that each begins with, those of the stages that it is made of first. copied:
    paths that COPY takes from the repository. args: defaults of ARG. The rest is named after its instruction."""

    steps: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    args: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)
    stop_signal: str = ""
    expose: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Containerfile:
    """args: those before the first stage. targets: by name, in the order of the file."""

    args: dict[str, str]
    targets: dict[str, Target]


def read_containerfile(path: Path) -> Containerfile:
    """Raises ValueError for an instruction that is not known here."""
    parser = DockerfileParser(fileobj=io.BytesIO(path.read_bytes()))
    read = Containerfile({}, {})
    target: Target | None = None
    for instruction in parser.structure:
        name, value = instruction["instruction"], instruction["value"]
        if name == "COMMENT":
            continue
        if name == "FROM":
            base, _, stage = value.partition(" AS ")
            target = copy.deepcopy(read.targets[base]) if base in read.targets else Target()
            target.args = {}  # Buildah hands none on
            read.targets[stage] = target
        elif target is None:
            read.args.update(_pairs(value))
        else:
            _apply(target, name, value)
    return read


def _apply(target: Target, name: str, value: str) -> None:
    """What one instruction of a stage says."""
    if name == "RUN":
        target.steps.append(re.sub(r"^(--mount=\S+\s+)*", "", value).removeprefix(INSTALL))
    elif name == "COPY":
        target.copied += value.split()[:-1]
    elif name == "ARG":
        target.args.update(_pairs(value))
    elif name == "ENV":
        target.env.update(_pairs(value))
    elif name == "LABEL":
        target.labels.update(_pairs(value))
    elif name == "USER":
        target.user = value
    elif name == "ENTRYPOINT":
        target.entrypoint = json.loads(value)
    elif name == "CMD":
        target.cmd = json.loads(value)
    elif name == "STOPSIGNAL":
        target.stop_signal = value
    elif name == "EXPOSE":
        target.expose += map(int, value.split())
    else:
        raise ValueError(f"the Containerfile has {name}, which what reads it does not know")


def _pairs(value: str) -> dict[str, str]:
    return {key: text for key, _, text in (word.partition("=") for word in shlex.split(value))}
