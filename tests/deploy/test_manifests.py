"""The rendered manifests fit the server and each other, and each rule about that sees what breaks it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.mistakes import MISTAKES
from tests.deploy.rendering import COMPOSITIONS, K8S, Composition, Manifests, RenderingError, kustomized, render
from tests.deploy.rules import RULES, Rule
from tests.deploy.validators import crd_of

MakeManifests = Callable[[str], Manifests]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.__name__))
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_what_is_rendered_keeps_every_rule(name: str, rule: Rule, manifests: MakeManifests) -> None:
    assert list(rule(manifests(name))) == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen_by_its_rule(mistake: str, manifests: MakeManifests) -> None:
    composition, break_it, words = MISTAKES[mistake]
    rule = next(each for each in RULES if mistake.startswith(f"{each.__name__}: "))
    broken = manifests(composition)
    break_it(broken)
    assert [sentence for sentence in rule(broken) if words in sentence]


def test_every_rule_has_been_seen_to_fail() -> None:
    assert {rule.__name__ for rule in RULES} == {mistake.partition(":")[0] for mistake in MISTAKES}


def test_every_overlay_and_every_component_is_rendered() -> None:
    overlays = {f"overlays/{path.name}" for path in (K8S / "overlays").iterdir()} | {"base"}
    components = {path.name for path in (K8S / "components").iterdir()}
    assert {each.overlay for each in COMPOSITIONS.values()} == overlays
    assert {name for each in COMPOSITIONS.values() for name in each.components} == components


def test_the_namespace_enforces_restricted_pods_and_has_no_label_that_prune_looks_for() -> None:
    space = yaml.safe_load((K8S / "base" / "namespace.yaml").read_text(encoding="utf-8"))
    assert space["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert "app.kubernetes.io/name" not in space["metadata"]["labels"]


def test_the_base_needs_no_custom_resource(manifests: MakeManifests) -> None:
    groups = {each["apiVersion"].partition("/")[0] for each in manifests("base").objects}
    assert groups == {"v1", "apps", "policy", "networking.k8s.io"}


def test_another_setting_gives_another_pod(manifests: MakeManifests) -> None:
    names = {name: manifests(name).container["envFrom"][0]["configMapRef"]["name"] for name in ("base", "gpu", "tls")}
    assert len(set(names.values())) == len(names)


def test_two_gpus_need_no_more_rights_than_one(manifests: MakeManifests) -> None:
    one, two = manifests("gpu"), manifests("gpu-2")
    for name in ("nvidia.com/gpu", "memory", "cpu"):
        two.container["resources"]["requests"][name] = one.container["resources"]["requests"][name]
        if name != "cpu":
            two.container["resources"]["limits"][name] = one.container["resources"]["limits"][name]
    assert two.settings == {**one.settings, "RUNAHEAD__TENSOR_PARALLEL": "2"}
    two.container["envFrom"] = one.container["envFrom"]  # the name of the settings ends with a hash of them
    assert two.deployment == one.deployment


def test_images_are_replaced_by_their_names(manifests: MakeManifests) -> None:
    changed = manifests("gpu-with-all")
    assert changed.container["image"] == "registry.example.com/team/runahead:7"
    assert changed.volume("model") == {
        "name": "model",
        "image": {"reference": "registry.example.com/models/qwen3:v1", "pullPolicy": "IfNotPresent"},
    }


def test_two_autoscalers_are_refused(tmp_path: Path) -> None:
    both = Composition("base", ["hpa", "keda"])
    with pytest.raises(RenderingError, match="nonexistent key: replicas"):
        render(both, tmp_path)


def test_a_pool_that_speaks_no_tls_is_refused_beside_pods_that_do(tmp_path: Path) -> None:
    both = Composition("overlays/tls", ["inference-pool"])
    with pytest.raises(RenderingError, match=re.escape("/spec/ports/0/appProtocol")):
        render(both, tmp_path)


@pytest.mark.parametrize("name", ["gpu-with-all", "tls-elsewhere"])
def test_routes_have_the_defaults_that_the_server_writes_into_lists(name: str, manifests: MakeManifests) -> None:
    """A patch of a custom resource replaces a whole list: without its defaults an apply always finds a difference."""
    routes = list(manifests(name).of("GRPCRoute"))
    assert routes
    for route in routes:
        schema = crd_of(route)
        assert schema
        assert list(defaults_left_out(route, schema)) == []


def test_a_default_that_is_left_out_is_seen(manifests: MakeManifests) -> None:
    route = manifests("grpc-route").one("GRPCRoute")
    del route["spec"]["rules"][0]["backendRefs"][0]["weight"]
    schema = crd_of(route)
    assert schema
    assert list(defaults_left_out(route, schema)) == ["spec.rules[0].backendRefs[0].weight"]


def defaults_left_out(value: Any, schema: Mapping[str, Any], where: str = "", in_list: bool = False) -> Iterator[str]:
    """Fields inside of lists that the server fills in by the schema of the custom resource."""
    if isinstance(value, list):
        for place, each in enumerate(value):
            yield from defaults_left_out(each, schema["items"], f"{where}[{place}]", True)
    elif isinstance(value, dict):
        for name, of_field in schema.get("properties", {}).items():
            path = f"{where}.{name}".lstrip(".")
            if name in value:
                yield from defaults_left_out(value[name], of_field, path, in_list)
            elif in_list and "default" in of_field:
                yield path


def test_a_folder_that_names_what_is_not_there_is_refused(tmp_path: Path) -> None:
    tmp_path.joinpath("kustomization.yaml").write_text("resources: [missing.yaml]\n")
    with pytest.raises(RenderingError, match=re.escape("missing.yaml")):
        kustomized(tmp_path)


@pytest.mark.parametrize("folder", ["base", "overlays/gpu", "overlays/gpu-2", "overlays/tls"])
def test_a_folder_applies_as_it_is(folder: str, texts: Mapping[str, str]) -> None:
    assert kustomized(K8S / folder) == texts[folder.rpartition("/")[2]]
