"""Pods that docs/operations.md has people make beside the service: the namespace admits them, and they fit it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.deploy.rendering import K8S, Manifests, Object, kustomized

MakeManifests = Callable[[str], Manifests]
PODS: Final = ("client", "fill")
# What `restricted` takes, of the kinds that are used here.
_VOLUMES: Final = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}


def not_restricted(spec: Object) -> Iterator[str]:
    """A sentence for each thing that the Pod Security Standard `restricted` refuses."""
    of_pod = spec.get("securityContext", {})
    for container in spec["containers"]:
        own = of_pod | container.get("securityContext", {})
        wanted: dict[str, Any] = {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        yield from (
            f"{container['name']}: {name} is {own.get(name)}" for name in wanted if own.get(name) != wanted[name]
        )
        if own.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{container['name']}: no seccomp profile"
        if (
            own.get("runAsUser") == 0
            or own.get("privileged")
            or any("hostPort" in port for port in container.get("ports", ()))
        ):
            yield f"{container['name']} has too many rights"
    yield from (f"{name} is set" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name))
    for volume in spec.get("volumes", ()):
        if other := volume.keys() - {"name"} - _VOLUMES:
            yield f"a volume is {other}"


def pod(name: str) -> Object:
    made: Object = yaml.safe_load((K8S / "pods" / f"{name}.yaml").read_text(encoding="utf-8"))
    return made


@pytest.fixture
def picker(tmp_path: Path) -> Manifests:
    """A picker that is rendered as the document says."""
    shutil.copytree(K8S / "picker", tmp_path / "picker")
    shutil.copy(Path(__file__).with_name("picker.yaml"), tmp_path / "picker" / "rendered.yaml")
    return Manifests(kustomized(tmp_path / "picker"))


@pytest.mark.parametrize("name", PODS)
def test_the_namespace_admits_the_pods(name: str) -> None:
    assert list(not_restricted(pod(name)["spec"])) == []


def test_the_check_of_pods_sees_one_that_is_not_admitted() -> None:
    assert (
        len(list(not_restricted({"containers": [{"name": "bare"}], "volumes": [{"name": "v", "hostPath": {}}]}))) == 5
    )


@pytest.mark.parametrize("name", PODS)
def test_the_pods_are_none_of_the_services(name: str, manifests: MakeManifests) -> None:
    assert pod(name)["metadata"]["labels"].items().isdisjoint(manifests("base").template["metadata"]["labels"].items())


def test_the_pod_that_fills_the_claim_writes_what_the_service_reads(manifests: MakeManifests) -> None:
    service = manifests("gpu")
    claim = pod("fill")["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim == service.volume("model")["persistentVolumeClaim"]["claimName"] == pod("claim")["metadata"]["name"]
    for key in ("runAsUser", "fsGroup"):
        assert pod("fill")["spec"]["securityContext"][key] == service.pod["securityContext"][key]


def test_pruning_by_the_label_leaves_the_claim() -> None:
    assert "labels" not in pod("claim")["metadata"]


def test_the_namespace_admits_the_picker(picker: Manifests) -> None:
    assert list(not_restricted(picker.one("Deployment", "runahead-epp")["spec"]["template"]["spec"])) == []


def test_the_pool_is_the_components_and_names_the_picker(picker: Manifests, manifests: MakeManifests) -> None:
    assert [each["kind"] for each in picker.objects if each["kind"] == "InferencePool"] == []
    pool = manifests("inference-pool").one("InferencePool")
    (by_the_chart,) = (
        each
        for each in yaml.safe_load_all(Path(__file__).with_name("picker.yaml").read_text(encoding="utf-8"))
        if each["kind"] == "InferencePool"
    )
    assert pool["spec"] == by_the_chart["spec"]
    args = picker.one("Deployment", "runahead-epp")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--pool-name") + 1] == pool["metadata"]["name"]
    service = picker.one("Service", pool["spec"]["endpointPickerRef"]["name"])
    assert service["spec"]["ports"][0]["port"] == pool["spec"]["endpointPickerRef"]["port"]["number"]


def test_the_policy_lets_the_picker_read_metrics_where_it_asks_for_them(
    picker: Manifests, manifests: MakeManifests
) -> None:
    service = manifests("inference-pool")
    labels = picker.one("Deployment", "runahead-epp")["spec"]["template"]["metadata"]["labels"]
    (rule,) = service.one("NetworkPolicy", "runahead-endpoint-picker")["spec"]["ingress"]
    assert any(each["podSelector"]["matchLabels"].items() <= labels.items() for each in rule["from"])
    assert [port["port"] for port in rule["ports"]] == ["metrics"]
    values = yaml.safe_load((K8S / "picker" / "values.yaml").read_text(encoding="utf-8"))["router"]
    plugins = yaml.safe_load(values["epp"]["pluginsCustomConfig"][values["epp"]["pluginsConfigFile"]])["plugins"]
    (asked,) = (plugin["parameters"]["port"] for plugin in plugins if plugin["type"] == "metrics-data-source")
    assert asked == service.ports()["metrics"]
    assert values["modelServers"]["targetPorts"] == [{"number": service.ports()["grpc"]}]
    assert values["modelServers"]["matchLabels"].items() <= service.template["metadata"]["labels"].items()
