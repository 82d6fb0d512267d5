"""The router of deploy/k8s fits the pods behind it, its proxy and its Secret."""

from __future__ import annotations

import base64
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from runahead.service.credentials.callers import Caller, CallersFile
from tests.deploy.rendering import Manifests, Object, is_of_router, kubectl
from tests.project.repository import ROOT
from tests.service.certificates import Authority
from tests.service.hostile.proxy import HAPROXY

MakeManifests = Callable[[str], Manifests]
NAMES: Final = ("router", "tls-router-elsewhere")
POD: Final = {"app.kubernetes.io/name": "runahead-router"}
_BETWEEN: Final = re.compile(r"\$\((\w+)\)")


def of_router(manifests: Manifests, kind: str) -> Object:
    (found,) = (each for each in manifests.objects if each["kind"] == kind and is_of_router(each))
    return found


def pod(manifests: Manifests) -> Object:
    spec: Object = of_router(manifests, "Deployment")["spec"]["template"]["spec"]
    return spec


def proxy_and_router(manifests: Manifests) -> tuple[Object, Object]:
    (proxy,), (router,) = pod(manifests)["initContainers"], pod(manifests)["containers"]
    return proxy, router


def variables(container: Object, namespace: str) -> dict[str, str]:
    """As kubelet gives them: a variable may name those before it. Those of a Secret are its name and key."""
    found: dict[str, str] = {}
    for each in container["env"]:
        if secret := each.get("valueFrom", {}).get("secretKeyRef"):
            found[each["name"]] = f"{secret['name']}/{secret['key']}"
            assert not secret.get("optional")
        elif "valueFrom" in each:
            assert each["valueFrom"] == {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}} or (
                each["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}
            )
            found[each["name"]] = namespace
        else:
            found[each["name"]] = _BETWEEN.sub(lambda name: found[name[1]], each["value"])
    return found


def configuration(manifests: Manifests) -> str:
    text: str = of_router(manifests, "ConfigMap")["data"]["haproxy.cfg"]
    return text


@pytest.mark.parametrize("name", NAMES)
def test_the_proxy_listens_where_the_router_asks_and_asks_where_the_pods_listen(
    name: str, manifests: MakeManifests
) -> None:
    made = manifests(name)
    proxy, router = proxy_and_router(made)
    listeners = re.findall(r'presetenv RUNAHEAD_LISTEN_\d "(127\.0\.0\.1:\d+)"', configuration(made))
    assert [f"grpc://{listener}" for listener in listeners] == [
        each for each in router["args"] if each.startswith("grpc://")
    ]
    space = made.deployment["metadata"]["namespace"]
    given = variables(proxy, space)
    headless = made.one("Service", "runahead-pods")
    assert headless["spec"]["clusterIP"] == "None"
    port = headless["spec"]["ports"][0]["port"]
    assert given["RUNAHEAD_REPLICAS"] == f"runahead-pods.{space}.svc.cluster.local:{port}"
    assert made.settings["RUNAHEAD__VLLM_FACADE"] == "true"
    mounted = next(each for each in pod(made)["volumes"] if each["name"] == "proxy")["configMap"]["name"]
    assert mounted == of_router(made, "ConfigMap")["metadata"]["name"]
    assert re.fullmatch(r"runahead-router-proxy-[a-z0-9]{10}", mounted), "another configuration is another pod"


@pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed: `make proxy` does it")
@pytest.mark.parametrize("name", NAMES)
def test_the_proxy_takes_its_configuration_with_the_pods_variables(
    name: str, manifests: MakeManifests, tmp_path: Path
) -> None:
    made = manifests(name)
    given = variables(proxy_and_router(made)[0], made.deployment["metadata"]["namespace"])
    (tmp_path / "ca.crt").write_bytes(Authority().pem)
    given["RUNAHEAD_REPLICA_OPTIONS"] = given["RUNAHEAD_REPLICA_OPTIONS"].replace("/etc/runahead/ca", str(tmp_path))
    assert ("verify required" in given["RUNAHEAD_REPLICA_OPTIONS"]) == ("RUNAHEAD__TLS_CERT" in made.settings)
    (tmp_path / "haproxy.cfg").write_text(configuration(made))
    command: list[Any] = [HAPROXY, "-c", "-dW", "-f", tmp_path / "haproxy.cfg"]
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_credentials_are_of_a_secret_that_is_named_and_required(name: str, manifests: MakeManifests) -> None:
    proxy, router = proxy_and_router(manifests(name))
    assert variables(proxy, "x")["RUNAHEAD_TOKEN"] == "runahead-router/token"
    assert variables(router, "x")["API_KEY"] == "runahead-router/api-key"
    assert "--api-key=$(API_KEY)" in router["args"]


@pytest.mark.skipif(not Path("/usr/bin/openssl").exists(), reason="this machine has no openssl")
def test_the_lines_of_the_document_make_the_secret_and_a_caller_with_the_rights(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "routers.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    *before, create = lines.splitlines()
    create = create.replace("kubectl", str(kubectl())) + " --dry-run=client -o yaml"
    script = "\n".join([*before, create])
    done = subprocess.run(["sh", "-ec", script], cwd=tmp_path, check=True, capture_output=True, text=True)
    secret = yaml.safe_load(done.stdout)
    assert (secret["metadata"]["name"], secret["metadata"]["namespace"]) == ("runahead-router", "runahead")
    given = {key: base64.b64decode(value) for key, value in secret["data"].items()}
    assert set(given) == {"token", "api-key"} and all(value.isalnum() for value in given.values()), "no line's end"
    caller = CallersFile(tmp_path / "callers").by_token(given["token"])
    assert caller == Caller("router", frozenset({"generate", "control"}))


@pytest.mark.parametrize("name", NAMES)
def test_the_routers_pods_are_no_pods_of_the_service(name: str, manifests: MakeManifests) -> None:
    made = manifests(name)
    deployment, service = (of_router(made, kind) for kind in ("Deployment", "Service"))
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == POD
    assert labels.items().isdisjoint(made.template["metadata"]["labels"].items())
    ports = {port["name"]: port["containerPort"] for port in proxy_and_router(made)[1]["ports"]}
    (offered,) = service["spec"]["ports"]
    assert ports[offered["targetPort"]] == offered["port"]
    assert f"--port={offered['port']}" in proxy_and_router(made)[1]["args"]
    spaces = {each["metadata"]["namespace"] for each in made.objects if is_of_router(each)}
    assert spaces == {made.deployment["metadata"]["namespace"]}
    assert {each["metadata"]["labels"]["app.kubernetes.io/name"] for each in made.objects if is_of_router(each)} == {
        "runahead"
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_router_calls_the_pods_and_asks_for_names_and_reaches_nothing_else(
    name: str, manifests: MakeManifests
) -> None:
    made = manifests(name)
    policy = of_router(made, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == POD
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert policy["ingress"][0]["from"] == made.one("NetworkPolicy", "runahead-clients")["spec"]["ingress"][0]["from"]
    assert [port["port"] for port in policy["ingress"][0]["ports"]] == ["http"]
    pods, resolver = policy["egress"]
    assert pods["to"] == [{"podSelector": {"matchLabels": made.template["metadata"]["labels"]}}]
    assert [port["port"] for port in pods["ports"]] == ["grpc"]
    assert [port["port"] for port in resolver["ports"]] == [53, 53]


@pytest.mark.parametrize("name", NAMES)
def test_the_routers_pod_is_restricted(name: str, manifests: MakeManifests) -> None:
    made = manifests(name)
    spec, service = pod(made), made.container["securityContext"]
    assert {**spec["securityContext"], "fsGroupChangePolicy": "OnRootMismatch"} == made.pod["securityContext"]
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
    for container in proxy_and_router(made):
        assert container["securityContext"] == service
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
        assert "cpu" in container["resources"]["requests"]
