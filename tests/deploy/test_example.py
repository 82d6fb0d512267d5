"""deploy/k8s/example: a folder to copy, whose one file sets what is somebody's own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.rendering import K8S, Manifests, kustomized
from tests.deploy.rules import RULES

Copy = Callable[..., Manifests]


@pytest.fixture
def copied(tmp_path: Path) -> Copy:
    """The folder beside a checkout, with some texts replaced by others, rendered."""

    def copy(**changes: str) -> Manifests:
        (tmp_path / "runahead").mkdir()
        (tmp_path / "runahead" / "deploy").symlink_to(K8S.parent)
        shutil.copytree(K8S / "example", tmp_path / "my-cluster")
        path = tmp_path / "my-cluster" / "kustomization.yaml"
        text = path.read_text(encoding="utf-8")
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        path.write_text(text)
        return Manifests(kustomized(tmp_path / "my-cluster"))

    return copy


def test_it_renders_as_it_is_and_keeps_every_rule(copied: Copy) -> None:
    made = copied()
    assert [sentence for rule in RULES for sentence in rule(made)] == []


def test_it_sets_the_image_the_pods_the_name_the_secret_and_the_claim(copied: Copy) -> None:
    made = copied(
        **{
            "registry.example.com/team/runahead": "registry.local/mine",
            "0.1.0-cuda": "v9",
            "count: 1": "count: 3",
            "=my-model": "=qwen",
            "secretName: runahead-callers": "secretName: our-callers",
            "claimName: runahead-model": "claimName: qwen-weights",
        }
    )
    assert made.container["image"] == "registry.local/mine:v9"
    assert made.deployment["spec"]["replicas"] == 3
    assert made.settings["RUNAHEAD__SERVED_NAME"] == "qwen"
    assert made.volume("callers")["secret"]["secretName"] == "our-callers"
    assert made.volume("callers")["secret"]["items"] == [{"key": "callers", "path": "callers"}]
    assert made.volume("model")["persistentVolumeClaim"]["claimName"] == "qwen-weights"
    assert [sentence for rule in RULES for sentence in rule(made)] == []


def test_it_renders_on_cpus_as_its_comment_says(copied: Copy) -> None:
    made = copied(
        **{
            "/overlays/gpu": "/base",
            "components: [] #": "components: [../runahead/deploy/k8s/components/model-claim] #",
        }
    )
    assert made.settings["RUNAHEAD__MODEL"] == "/models/model"
    assert "nvidia.com/gpu" not in made.container["resources"]["limits"]
    assert [sentence for rule in RULES for sentence in rule(made)] == []
