"""What kubectl sends to a cluster for the commands of docs/operations.md."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.api_server import ApiServer, api_server
from tests.deploy.documented import block_with
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
            ["sh", "-c", commands],
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
