"""The manifests as `kubectl kustomize` renders them: base, overlays, and components as somebody puts them together."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.project.repository import ROOT

K8S: Final = ROOT / "deploy" / "k8s"
NAME: Final = "runahead"
_FIELDS: Final = {"status.podIP": "10.0.0.1"}  # of a pod

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Composition:
    """What somebody's own kustomization.yaml names. overlay, components: folders below deploy/k8s. more: further keys
    of the file."""

    overlay: str
    components: Sequence[str] = ()
    more: str = ""


_IMAGES: Final = """
images:
  - name: runahead
    newName: registry.example.com/team/runahead
    newTag: "7"
  - name: runahead-model
    newName: registry.example.com/models/qwen3
    newTag: v1
"""
# Every overlay, every component, and combinations that people will have.
COMPOSITIONS: Final[Mapping[str, Composition]] = {
    "base": Composition("base"),
    "gpu": Composition("overlays/gpu"),
    "gpu-2": Composition("overlays/gpu-2"),
    "tls": Composition("overlays/tls"),
    "monitoring": Composition("base", ["monitoring"]),
    "hpa": Composition("base", ["monitoring", "hpa"]),
    "keda": Composition("base", ["monitoring", "keda"]),
    "grpc-route": Composition("base", ["grpc-route"]),
    "inference-pool": Composition("base", ["inference-pool"]),
    "router": Composition("base", ["router"]),
    "tls-router-elsewhere": Composition("overlays/tls", ["router", "router-tls"], "namespace: elsewhere\n"),
    "kv-events": Composition("base", ["kv-events"]),
    "model-claim": Composition("base", ["model-claim"]),
    "model-image": Composition("base", ["model-image"], _IMAGES),
    "gpu-with-all": Composition(
        "overlays/gpu", ["model-image", "monitoring", "hpa", "grpc-route", "inference-pool"], _IMAGES
    ),
    "tls-elsewhere": Composition("overlays/tls", ["monitoring", "keda", "grpc-route"], "namespace: elsewhere\n"),
}


class RenderingError(RuntimeError):
    """kubectl refused, with its words."""


def kubectl() -> Path:
    """The command of this environment, or else the machine's. Raises RenderingError."""
    beside = Path(sysconfig.get_path("scripts")) / "kubectl"
    if beside.exists():
        return beside
    if found := shutil.which("kubectl"):
        return Path(found)
    raise RenderingError(f"no kubectl beside {sys.executable} or on the PATH; the extra `test` installs one on Linux")


def render(composition: Composition, folder: Path) -> str:
    """The YAML of a composition, whose kustomization.yaml is written into `folder`. Raises RenderingError."""

    def from_there(path: Path) -> str:
        return os.path.relpath(path.resolve(), folder.resolve())

    lines = ["apiVersion: kustomize.config.k8s.io/v1beta1", "kind: Kustomization", "resources:"]
    lines.append(f"  - {from_there(K8S / composition.overlay)}")
    if composition.components:
        lines += ["components:", *(f"  - {from_there(K8S / 'components' / name)}" for name in composition.components)]
    folder.joinpath("kustomization.yaml").write_text("\n".join(lines) + "\n" + composition.more, encoding="utf-8")
    return kustomized(folder)


def kustomized(folder: Path) -> str:
    """What `kubectl kustomize` makes of a folder. Raises RenderingError."""
    done = subprocess.run([kubectl(), "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RenderingError(done.stderr.strip())
    return done.stdout


def is_of_router(each: Object) -> bool:
    """An object of the component `router`."""
    return bool(each["metadata"].get("labels", {}).get("app.kubernetes.io/component") == "router")


def _value(variable: Object) -> str:
    """As kubelet gives it. Raises KeyError for a source that is not known here."""
    value: str = variable["value"] if "value" in variable else _FIELDS[variable["valueFrom"]["fieldRef"]["fieldPath"]]
    return value


class Manifests:
    """Rendered objects, to be looked through. A test may change them.

    What is looked for by its kind is the service's own: a router's objects have the component `router`.
    """

    def __init__(self, text: str) -> None:
        self.objects: list[Object] = [each for each in yaml.safe_load_all(text) if each]

    def of(self, kind: str) -> Iterator[Object]:
        """All of a kind."""
        return (each for each in self.objects if each["kind"] == kind and not is_of_router(each))

    def one(self, kind: str, name: str = NAME) -> Object:
        """Raises LookupError where it is not there, or several are."""
        found = [each for each in self.of(kind) if each["metadata"]["name"] == name]
        if len(found) != 1:
            raise LookupError(f"{len(found)} objects {kind} {name}")
        return found[0]

    @property
    def deployment(self) -> Object:
        return self.one("Deployment")

    @property
    def template(self) -> Object:
        """Of the pods."""
        template: Object = self.deployment["spec"]["template"]
        return template

    @property
    def pod(self) -> Object:
        spec: Object = self.template["spec"]
        return spec

    @property
    def container(self) -> Object:
        (container,) = self.pod["containers"]
        found: Object = container
        return found

    @property
    def settings(self) -> dict[str, str]:
        """The variables that the container gets, by name."""
        variables: dict[str, str] = {}
        for source in self.container.get("envFrom", ()):
            variables |= self.one("ConfigMap", source["configMapRef"]["name"])["data"]
        return variables | {each["name"]: _value(each) for each in self.container.get("env", ())}

    def ports(self) -> dict[str, int]:
        """The container's, by name."""
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    def volume(self, name: str) -> Object:
        """Raises LookupError."""
        for volume in self.pod["volumes"]:
            if volume["name"] == name:
                found: Object = volume
                return found
        raise LookupError(f"no volume {name}")
