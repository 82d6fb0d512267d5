"""What kubectl sends to a cluster for the commands of docs/operations.md."""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.api_server import ApiServer, api_server
from tests.deploy.documented import block_with, blocks_of, line_with
from tests.deploy.rendering import K8S, kubectl

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True, slots=True)
class Operator:
    """Somebody with a folder that has `runahead` and `my-cluster` in it, as the document says."""

    server: ApiServer
    folder: Path

    def writes(self, *lines: str) -> None:
        """my-cluster/kustomization.yaml, further than the base."""
        text = "\n".join(["resources:", "  - ../runahead/deploy/k8s/base", *lines, ""])
        (self.folder / "my-cluster").mkdir(exist_ok=True)
        (self.folder / "my-cluster" / "kustomization.yaml").write_text(text)

    def types(self, commands: str, status: int = 0) -> str:
        """What the commands print, which end with this status."""
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.folder / "kubeconfig"),
            "HOME": str(self.folder),
            "PATH": path,
        }
        done = subprocess.run(
            ["sh", "-ec", commands],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    for name, target in (("runahead/deploy", K8S.parent), ("bin/kubectl", kubectl())):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).symlink_to(target)
    with api_server(tmp_path) as (server, _):
        yield Operator(server, tmp_path)


def replicas(operator: Operator) -> int:
    number: int = operator.server.one("Deployment")["spec"]["replicas"]
    return number


def grown(operator: Operator) -> None:
    """Six pods, as an autoscaler or `kubectl scale` leaves them, and a folder with an autoscaler in it."""
    operator.writes()
    operator.types("kubectl apply -k my-cluster")
    operator.server.one("Deployment")["spec"]["replicas"] = 6
    operator.writes("components:", "  - ../runahead/deploy/k8s/components/hpa")


def test_an_autoscaler_is_added_with_the_documents_lines_and_no_pod_goes(operator: Operator) -> None:
    grown(operator)
    operator.server.patches.clear()
    operator.types(block_with("set-last-applied"))
    assert replicas(operator) == 6
    assert operator.server.named("HorizontalPodAutoscaler") == {"runahead"}
    assert not any(
        "replicas" in patch.get("spec", {}) for kind, _, patch in operator.server.patches if kind == "Deployment"
    )
    operator.types("kubectl apply -k my-cluster")
    assert replicas(operator) == 6


def test_an_autoscaler_that_is_added_without_them_cuts_the_service_to_one_pod(operator: Operator) -> None:
    """Why the lines are needed."""
    grown(operator)
    operator.types("kubectl apply -k my-cluster")
    assert [patch["spec"] for kind, _, patch in operator.server.patches if kind == "Deployment"] == [{"replicas": None}]
    assert replicas(operator) == 1


def test_an_autoscaler_is_taken_out_with_the_documents_lines_and_the_folder_has_the_number(operator: Operator) -> None:
    grown(operator)
    operator.types(block_with("set-last-applied"))
    operator.writes("replicas:", "  - name: runahead", "    count: 5")
    operator.types(block_with("delete horizontalpodautoscaler"))
    assert operator.server.named("HorizontalPodAutoscaler") == set()
    assert replicas(operator) == 5


def first_pod(operator: Operator) -> None:
    """The commands before the first pod, but for the last, which waits for it."""
    operator.writes("components:", "  - ../runahead/deploy/k8s/components/hpa")
    operator.types(block_with("openssl rand").replace("kubectl -n runahead rollout status", ": "))


def test_removing_leaves_the_namespace_the_tokens_and_the_model(operator: Operator) -> None:
    first_pod(operator)
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "runahead-model"}}
    operator.server.objects["PersistentVolumeClaim", "runahead", "runahead-model"] = claim
    other = "configMapGenerator: [{name: runahead-settings, behavior: merge, literals: [RUNAHEAD__MAX_ROWS=32]}]"
    operator.writes("components:", "  - ../runahead/deploy/k8s/components/hpa", other)
    operator.types("kubectl apply -k my-cluster")
    assert len(operator.server.named("ConfigMap")) == 2
    operator.types(block_with("kubectl delete -k"))
    assert set(operator.server.objects) == {
        ("Namespace", "", "runahead"),
        ("Secret", "runahead", "runahead-callers"),
        ("PersistentVolumeClaim", "runahead", "runahead-model"),
    }


def test_all_but_the_first_line_stay_inside_the_namespace(operator: Operator) -> None:
    """So that whoever is `admin` of it may run them."""
    first_pod(operator)
    assert {kind for kind, space, _ in operator.server.objects if not space} == {"Namespace"}
    operator.server.objects["Namespace", "", "runahead"].clear()
    operator.types("kubectl apply -k my-cluster")
    assert operator.server.objects["Namespace", "", "runahead"] == {}


def test_prune_by_the_label_keeps_the_folders_objects_the_namespace_and_the_model(operator: Operator) -> None:
    first_pod(operator)
    operator.types("kubectl apply -f runahead/deploy/k8s/pods/claim.yaml")
    before = set(operator.server.objects)
    operator.types("kubectl apply -k my-cluster --prune -l app.kubernetes.io/name=runahead")
    assert set(operator.server.objects) == before


def test_prune_by_the_label_finds_no_autoscaler_as_the_document_says(operator: Operator) -> None:
    first_pod(operator)
    operator.writes()
    operator.types("kubectl apply -k my-cluster --prune -l app.kubernetes.io/name=runahead")
    assert operator.server.named("HorizontalPodAutoscaler") == {"runahead"}


def test_a_component_is_taken_out_with_the_documents_lines(operator: Operator) -> None:
    first_pod(operator)
    operator.types(block_with("--applyset"))
    assert "HorizontalPodAutoscaler" in {kind for kind, *_ in operator.server.objects}
    operator.writes()
    operator.types(block_with("--applyset"))
    left = {kind for kind, *_ in operator.server.objects}
    assert "HorizontalPodAutoscaler" not in left
    assert {"Deployment", "Secret", "Namespace"} <= left
    assert operator.server.named("Secret") == {"runahead", "runahead-callers"}


@pytest.mark.parametrize("name", ["fill", "client"])
def test_the_pods_beside_the_service_are_made_with_the_documents_lines(name: str, operator: Operator) -> None:
    first_pod(operator)
    (operator.folder / "token").write_text("x")
    block = block_with(f"pods/{name}.yaml").replace("=IMAGE ", "=registry.example.com/team/runahead:7 ")
    applied = "\n".join(line for line in block.splitlines() if "apply" in line or "create" in line)
    operator.types(applied)
    made = operator.server.one("Pod", f"runahead-{name}")
    assert made["spec"]["containers"][0]["image"] == "registry.example.com/team/runahead:7"
    wanted = {volume.get("secret", {}).get("secretName") for volume in made["spec"]["volumes"]} - {None}
    assert wanted <= operator.server.named("Secret")


def tokens_in(operator: Operator) -> bytes:
    return base64.b64decode(operator.server.one("Secret", "runahead-callers")["data"]["callers"])


def test_the_lines_of_the_first_pod_run_twice_leave_one_token(operator: Operator) -> None:
    operator.writes()
    lines = block_with("openssl rand").replace("kubectl -n runahead rollout status", ": ")
    operator.types(lines)
    assert "already exists" in operator.types(f"set +e\n{lines}")
    assert tokens_in(operator) == (operator.folder / "callers").read_bytes()


def test_nobody_else_of_the_machine_reads_the_tokens(operator: Operator) -> None:
    first_pod(operator)
    operator.types(line_with("sed -n"))
    assert [(operator.folder / name).stat().st_mode & 0o777 for name in ("callers", "token")] == [0o600, 0o600]


def test_tokens_that_are_replaced_stand_in_no_annotation(operator: Operator) -> None:
    first_pod(operator)
    with (operator.folder / "callers").open("a") as callers:
        callers.write("you generate token 0123456789abcdef0123456789abcdef\n")
    operator.types(block_with("--dry-run=client"))
    assert tokens_in(operator) == (operator.folder / "callers").read_bytes()
    assert not operator.server.one("Secret", "runahead-callers")["metadata"].get("annotations")


def test_settings_that_no_revision_names_are_deleted(operator: Operator) -> None:
    for rows in (8, 16, 32):
        literals = f"literals: [RUNAHEAD__MAX_ROWS={rows}]"
        operator.writes(f"configMapGenerator: [{{name: runahead-settings, behavior: merge, {literals}}}]")
        operator.types("kubectl apply -k my-cluster")
        if rows > 8:  # as the controller of Deployments makes them; the first one has been given up
            template = operator.server.one("Deployment")["spec"]["template"]
            made = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": f"of-{rows}"}}
            operator.server.objects["ReplicaSet", "runahead", f"of-{rows}"] = made | {"spec": {"template": template}}
    operator.types(block_with("get replicasets"))
    left = {
        operator.server.one("ConfigMap", name)["data"]["RUNAHEAD__MAX_ROWS"]
        for name in operator.server.named("ConfigMap")
    }
    assert left == {"16", "32"}


def test_the_line_about_image_volumes_shows_whether_the_cluster_has_kept_it(operator: Operator) -> None:
    operator.writes("components:", "  - ../runahead/deploy/k8s/components/model-image")
    operator.types("kubectl apply -k my-cluster")
    assert "runahead-model" in operator.types(block_with("jsonpath='{.spec.template.spec.volumes"))


@pytest.mark.parametrize("cluster", ["kind load", "podman push"])
def test_from_a_clone_to_a_pod_whose_image_its_node_can_find(cluster: str, operator: Operator) -> None:
    (block,) = (block for block in blocks_of("container.md") if cluster in block and "kubectl apply" in block)
    assert block.count("\n") < 10
    for program in ("podman", "kind"):
        (operator.folder / "bin" / program).write_text(f'#!/bin/sh\necho {program} "$@" >>"{operator.folder}/calls"\n')
        (operator.folder / "bin" / program).chmod(0o755)
    operator.types(
        "export REGISTRY=registry.example.org/team; cd runahead\n" + block.replace("kubectl -n runahead rollout", ": ")
    )
    assert replicas(operator) == (1 if cluster == "kind load" else 2)
    image: str = operator.server.one("Deployment")["spec"]["template"]["spec"]["containers"][0]["image"]
    full = image if "/" in image else f"docker.io/library/{image}"
    calls = (operator.folder / "calls").read_text().splitlines()
    assert calls[0].startswith("podman build") and f" --tag {full} " in calls[0]
    assert calls[1:] == (
        [f"podman save --output runahead.tar {full}", "kind load image-archive runahead.tar"]
        if cluster == "kind load"
        else [f"podman push {full}"]
    )
    assert operator.server.named("Secret") == {"runahead-callers"}
