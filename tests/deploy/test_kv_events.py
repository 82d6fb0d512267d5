"""The component of the KV cache's events opens its ports to labelled pods alone, and names each pod by its address."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.deploy.rendering import Manifests
from tests.deploy.served_settings import front_end_settings

MakeManifests = Callable[[str], Manifests]
PORTS = {"kv-events": 5557, "kv-replay": 5558}


@pytest.fixture
def made(manifests: MakeManifests) -> Manifests:
    return manifests("kv-events")


def test_the_ports_are_those_of_the_settings_and_a_service_has_them(made: Manifests) -> None:
    settings = front_end_settings(made)
    assert (settings.kv_events_port, settings.kv_events_replay_port) == tuple(PORTS.values())
    assert made.ports().items() >= PORTS.items()
    (name,) = made.container["env"]
    assert name["name"] == "RUNAHEAD__KV_EVENTS_POD" and name["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    service = made.one("Service", "runahead-kv-events")["spec"]
    assert service["clusterIP"] == "None" and {each["name"]: each["port"] for each in service["ports"]} == PORTS
    assert {each["targetPort"] for each in service["ports"]} == PORTS.keys()


def test_labelled_pods_alone_are_let_in(made: Manifests) -> None:
    policy = made.one("NetworkPolicy", "runahead-kv-readers")["spec"]
    assert policy["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "runahead"}}
    (rule,) = policy["ingress"]
    assert {each["port"] for each in rule["ports"]} == PORTS.keys()
    labelled = {"matchLabels": {"runahead-kv-reader": "true"}}
    assert rule["from"] == [{"podSelector": labelled}, {"namespaceSelector": labelled, "podSelector": labelled}]
    others = [
        each
        for each in made.objects
        if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] != "runahead-kv-readers"
    ]
    assert not [
        port
        for each in others
        for rule in each["spec"].get("ingress", [])
        for port in rule["ports"]
        if port["port"] in PORTS
    ]


def test_calls_still_need_a_token_and_prefixes_are_shared(made: Manifests) -> None:
    settings = front_end_settings(made)
    assert settings.callers and settings.share_prefix_cache and settings.insecure
    assert settings.kv_events_host == "0.0.0.0"
