"""What docs/operations.md tells people to do, and what it says they will find."""

from __future__ import annotations

import base64
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import yaml

from runahead.service.contract.errors import STATUS_OF
from runahead.service.credentials.callers import Caller, CallersFile
from tests.deploy.documented import BLOCKS, TEXT, line_with
from tests.deploy.rendering import K8S, Manifests, kubectl, kustomized
from tests.project.repository import PACKAGES, ROOT, sources

SPANS: Final = set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)))

MakeManifests = Callable[[str], Manifests]


@pytest.mark.skipif(not Path("/usr/bin/openssl").exists(), reason="this machine has no openssl")
def test_the_lines_before_apply_make_the_secret_that_the_pod_waits_for(
    tmp_path: Path, manifests: MakeManifests
) -> None:
    subprocess.run(["sh", "-ec", line_with("openssl rand")], cwd=tmp_path, check=True)
    make = (
        line_with("create secret generic runahead-callers").replace("kubectl", str(kubectl()))
        + " --dry-run=client -o yaml"
    )
    done = subprocess.run(["sh", "-ec", make], cwd=tmp_path, check=True, capture_output=True, text=True)
    secret = yaml.safe_load(done.stdout)
    base = manifests("base")
    wanted = base.volume("callers")["secret"]
    assert secret["metadata"]["name"] == wanted["secretName"]
    assert secret["metadata"]["namespace"] == base.deployment["metadata"]["namespace"]
    assert secret["data"].keys() == {item["key"] for item in wanted["items"]}
    given = tmp_path / "mounted"
    given.write_bytes(base64.b64decode(secret["data"]["callers"]))
    with (tmp_path / "callers").open("a") as callers:
        callers.write("you generate token 0123456789abcdef0123456789abcdef\n")  # as they may have more
    token = subprocess.run(
        ["sh", "-ec", line_with("sed -n") + "; cat token"], cwd=tmp_path, check=True, capture_output=True
    ).stdout.strip()
    caller = CallersFile(given).by_token(token)
    assert caller == Caller("me", frozenset({"generate", "control"}))


def test_the_front_page_has_the_same_lines_for_who_is_in_the_project_s_folder() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    for words in ("namespace.yaml", "openssl rand", "create secret generic runahead-callers"):
        assert line_with(words).replace(" runahead/deploy/", " deploy/") in readme


def test_folders_of_somebodys_own_render_as_they_are_written(tmp_path: Path) -> None:
    """The first one with the second one's lines behind it, beside a checkout of the project."""
    (tmp_path / "runahead").mkdir()
    (tmp_path / "runahead" / "deploy").symlink_to(K8S.parent)
    own = tmp_path / "my-cluster"
    own.mkdir()
    first, second = (block for kind, block in BLOCKS if kind == "yaml")
    own.joinpath("kustomization.yaml").write_text(first + second)
    rendered = Manifests(kustomized(own))
    assert rendered.container["image"] == "registry.example.com/team/runahead:0.1.0"
    assert rendered.settings["RUNAHEAD__MAX_ROWS"] == "32"
    assert rendered.one("ServiceMonitor")


def test_folders_that_are_named_are_all_that_there_are() -> None:
    named = {span for span in SPANS if re.fullmatch(r"base|(overlays|components)/[\w-]+", span)}
    there = {"base"} | {f"{path.parent.name}/{path.name}" for path in K8S.glob("*/*") if path.is_dir()}
    assert named == there


def test_settings_that_are_named_are_settings() -> None:
    from runahead.service.settings.settings import SETTINGS, variable_of

    named = {found for span in SPANS for found in re.findall(r"RUNAHEAD__\w+", span)}
    assert len(named) > 10
    assert named <= {variable_of(name) for name in SETTINGS}


def test_reasons_that_are_named_are_reasons() -> None:
    named = {span for span in SPANS if re.fullmatch(r"[A-Z]+(_[A-Z]+)*", span)} - {"CALLER_", "SHUTDOWN"}
    assert {"STREAMS_LIMIT", "NON_FINITE"} <= named
    assert named - STATUS_OF.keys() == set()


def test_events_of_the_log_that_are_named_are_logged() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources(*PACKAGES))
    kinds = re.findall(r'Keeper\(\s*"(\w+)"', code)
    logged = {*re.findall(r'"([a-z]+(?:_[a-z]+)+)"', code), *(f"{kind}_died" for kind in kinds)}
    named = {span for span in SPANS if re.fullmatch(r"[a-z]+(_[a-z]+)+", span)}
    others = {"round_robin", "grafana_dashboard", "vllm_num_requests_waiting", "vllm_kv_cache_usage_perc"}
    assert {"callers_read", "front_end_died", "device_failed"} <= named
    assert {name for name in named - others - logged if not name.startswith("runahead_")} == set()


def test_seconds_of_a_pods_end_are_those_of_the_base(manifests: MakeManifests) -> None:
    base = manifests("base")
    sleep = base.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    steps = re.findall(r"^\| (?:preStop|drain|) ?\|.*\| (\d+) s", TEXT, re.MULTILINE)
    grace = int(base.settings["RUNAHEAD__SHUTDOWN_GRACE_S"])
    assert list(map(int, steps)) == [sleep, grace, base.pod["terminationGracePeriodSeconds"]]


@pytest.mark.parametrize("folder", ["base", "overlays/gpu", "overlays/gpu-2", "overlays/tls"])
def test_what_a_pod_asks_for_is_what_sizing_says(folder: str, manifests: MakeManifests) -> None:
    (row,) = (line for line in TEXT.splitlines() if f"`{folder}`" in line and "Gi" in line)
    cpu, memory, storage, gpus = (cell.strip() for cell in row.split("|")[2:6])
    resources = manifests(folder.rpartition("/")[2]).container["resources"]
    requests, limits = resources["requests"], resources["limits"]
    assert (cpu, memory, gpus) == (requests["cpu"], requests["memory"], requests.get("nvidia.com/gpu", ""))
    assert (memory, gpus) == (limits["memory"], limits.get("nvidia.com/gpu", ""))
    assert storage == f"{requests['ephemeral-storage']}, {limits['ephemeral-storage']}"
