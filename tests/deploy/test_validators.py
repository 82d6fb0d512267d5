"""What others' validators say of the manifests, and that each sees what is wrong: `make manifests` runs this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.deploy.queries import alerts
from tests.deploy.rendering import K8S, Manifests
from tests.deploy.validators import ALERT_TESTS, Validators, accepted, crd_of, strict

MakeManifests = Callable[[str], Manifests]
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def validators(request: pytest.FixtureRequest, tmp_path: Path) -> Validators:
    folder = request.config.getoption("--validators")
    if not folder:
        pytest.skip("the validators have an environment of their own: make manifests runs them")
    return Validators(Path(folder).resolve(), tmp_path)


def test_kubernetes_takes_all_that_is_rendered(validators: Validators, texts: Mapping[str, str]) -> None:
    assert validators.kubernetes({name: Manifests(text) for name, text in texts.items()}) == []


def test_custom_resources_are_as_their_projects_say(validators: Validators, texts: Mapping[str, str]) -> None:
    assert validators.custom({name: Manifests(text) for name, text in texts.items()}) == []


def test_kubernetes_and_checkov_take_the_pods_beside_the_service(validators: Validators) -> None:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in (K8S / "pods").glob("*.yaml")}
    assert len(texts) == 3
    assert validators.kubernetes({name: Manifests(text) for name, text in texts.items()}) == []
    pods = {name: text for name, text in texts.items() if "kind: Pod\n" in text}
    found = set().union(*validators.checkov(pods).values())
    # They listen on nothing, so that they have no probes and no network policy.
    assert found - accepted().keys() == {"CKV_K8S_8", "CKV_K8S_9", "CKV2_K8S_6"}


def test_yamllint_finds_nothing(validators: Validators) -> None:
    assert validators.yamllint(K8S) == []


def test_checkov_finds_what_is_accepted_and_nothing_else(validators: Validators, texts: Mapping[str, str]) -> None:
    assert validators.checkov(texts) == {name: set(accepted()) for name in texts}


def test_prometheus_takes_the_alerts_and_each_fires_when_it_should(
    validators: Validators, manifests: MakeManifests
) -> None:
    assert validators.alerts(manifests("monitoring")) == []


def test_each_alert_is_seen_to_fire(manifests: MakeManifests) -> None:
    tested = ALERT_TESTS.read_text(encoding="utf-8")
    for alert in alerts(manifests("monitoring")):
        assert f"alertname: {alert['alert']}\n        exp_alerts:\n          - exp_labels" in tested


# ---------------------------------------------------------------- the validators themselves


def test_a_field_that_kubernetes_has_not_is_seen(validators: Validators, manifests: MakeManifests) -> None:
    broken = manifests("base")
    broken.container["readynessProbe"] = broken.container.pop("readinessProbe")
    assert any("readynessProbe" in line for line in validators.kubernetes({"broken": broken}))


def test_an_api_that_kubernetes_has_not_is_seen(validators: Validators, manifests: MakeManifests) -> None:
    broken = manifests("base")
    broken.one("PodDisruptionBudget")["apiVersion"] = "policy/v1beta1"
    assert any("policy/v1beta1" in line for line in validators.kubernetes({"broken": broken}))


@pytest.mark.parametrize(
    ("name", "kind", "field"),
    [
        ("monitoring", "ServiceMonitor", "selectors"),
        ("monitoring", "PrometheusRule", "group"),
        ("keda", "ScaledObject", "minReplicas"),
        ("grpc-route", "GRPCRoute", "hostname"),
        ("inference-pool", "InferencePool", "targetPort"),
    ],
)
def test_a_field_that_a_custom_resource_has_not_is_seen(
    name: str, kind: str, field: str, validators: Validators, manifests: MakeManifests
) -> None:
    broken = manifests(name)
    next(broken.of(kind))["spec"][field] = 1
    assert any(f"'{field}' was unexpected" in line for line in validators.custom({"broken": broken}))


def test_a_value_that_a_custom_resource_does_not_take_is_seen(validators: Validators, manifests: MakeManifests) -> None:
    broken = manifests("inference-pool")
    broken.one("InferencePool")["spec"]["appProtocol"] = "h2c"
    assert any("is not one of ['http', 'kubernetes.io/h2c']" in line for line in validators.custom({"broken": broken}))


def test_a_custom_resource_without_a_schema_is_refused() -> None:
    with pytest.raises(LookupError, match=r"no schema of keda\.sh/v9 ScaledObject"):
        crd_of({"apiVersion": "keda.sh/v9", "kind": "ScaledObject"})


def test_a_schema_that_is_open_stays_open() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {}, "x-kubernetes-preserve-unknown-fields": True}},
    }
    assert strict(schema)["additionalProperties"] is False
    assert "additionalProperties" not in strict(schema)["properties"]["a"]


def test_a_pod_with_more_rights_is_seen(validators: Validators, texts: Mapping[str, str]) -> None:
    broken = texts["base"].replace("allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true")
    assert validators.checkov({"base": texts["base"], "broken": broken}) == {
        "base": set(accepted()),
        "broken": {*accepted(), "CKV_K8S_20"},
    }


def test_manifests_that_checkov_can_not_read_are_no_success(validators: Validators) -> None:
    (said,) = validators.checkov({"nothing": "nothing: here\n"})["nothing"]
    assert "could not read" in said


def test_yaml_that_is_badly_written_is_seen(validators: Validators, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("---\na: 1\na: 2\n")
    assert any("key-duplicates" in line for line in validators.yamllint(bad))


def test_an_alert_that_never_fires_is_seen(validators: Validators, manifests: MakeManifests) -> None:
    broken = manifests("monitoring")
    next(alert for alert in alerts(broken) if alert["alert"] == "RunaheadQueues")["expr"] = "vector(1) > 2"
    (said,) = validators.alerts(broken)
    assert "alertname: RunaheadQueues" in said


def test_an_alert_that_prometheus_can_not_read_is_seen(validators: Validators, manifests: MakeManifests) -> None:
    broken = manifests("monitoring")
    next(alerts(broken))["expr"] = "absent(up"
    assert "unclosed left parenthesis" in validators.alerts(broken)[0]
