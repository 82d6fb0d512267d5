"""A pod as the manifests describe it starts, is probed, serves who has a token, and ends in time: with the rendered
command, variables, user and volumes, on a root that it can't write to and a network of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from tests.deploy.asking import Answers, Questions
from tests.deploy.pods import Pod, started_pod, why_no_pods
from tests.deploy.rendering import Manifests
from tests.deploy.rules import PROBES
from tests.service.certificates import Authority

TOKEN: Final = "0123456789abcdef" * 4
CALLERS: Final = {"runahead-callers": {"callers": f"alice generate token {TOKEN}\n"}}
END_S: Final = 60.0

MakeManifests = Callable[[str], Manifests]


@pytest.fixture(scope="module")
def machine_for_pods(request: pytest.FixtureRequest) -> None:
    """Skips where there can be none, and fails where that may not be."""
    if why := why_no_pods():
        must = request.config.getoption("--validators")
        (pytest.fail if must else pytest.skip)(f"no pod can be started here: {why}")


def answers(pod: Pod, manifests: Manifests, folder: Path, **more: Any) -> Answers:
    questions = Questions(
        probes={name: manifests.container[name]["grpc"] for name in PROBES},
        port=manifests.ports()["grpc"],
        metrics_port=manifests.ports()["metrics"],
        **{"token": TOKEN, **more},
    )
    file = folder / "questions"
    file.write_bytes(msgspec.json.encode(questions))
    try:
        told = pod.python("-m", "tests.deploy.asking", str(file), timeout_s=questions.start_s + 100)
    except (subprocess.SubprocessError, OSError) as error:
        raise AssertionError(f"{error}; the container said:\n{pod.log.read_text()}") from error
    return msgspec.json.decode(told, type=Answers)


def with_secrets(secrets: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    return {**CALLERS, **secrets}


@pytest.mark.usefixtures("machine_for_pods")
@pytest.mark.timeout(400)
def test_a_pod_of_the_base_answers_its_probes_and_serves_who_has_a_token(
    manifests: MakeManifests, tmp_path: Path
) -> None:
    base = manifests("base")
    with started_pod(base, CALLERS) as pod:
        told = answers(pod, base, tmp_path)
        assert told.probes == dict.fromkeys(PROBES, "SERVING")
        assert told.text
        assert told.others == ["UNAUTHENTICATED"]
        assert "runahead_engine_up 1.0" in told.metrics.splitlines()
        status = Path(f"/proc/{pod.container}/status").read_text().splitlines()
        assert "Uid:\t10001\t10001\t10001\t10001" in status
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        assert pod.terminate(END_S) == 0, pod.log.read_text()


@pytest.mark.usefixtures("machine_for_pods")
@pytest.mark.timeout(400)
def test_a_pod_with_a_certificate_is_probed_in_plain_text_and_served_through_tls(
    manifests: MakeManifests, tmp_path: Path
) -> None:
    tls, authority = manifests("tls"), Authority()
    with started_pod(tls, with_secrets({"runahead-tls": files_of(authority)})) as pod:
        told = answers(pod, tls, tmp_path, authority=authority.pem.decode())
        assert told.probes == dict.fromkeys(PROBES, "SERVING")
        assert told.text
        assert told.others == ["UNAUTHENTICATED"]
        assert pod.terminate(END_S) == 0, pod.log.read_text()


@pytest.mark.usefixtures("machine_for_pods")
@pytest.mark.timeout(400)
def test_a_pod_takes_another_token_and_certificate_when_its_secrets_change(
    manifests: MakeManifests, tmp_path: Path
) -> None:
    tls, before, after = manifests("tls"), Authority("before"), Authority("after")
    new = "fedcba9876543210" * 4
    with started_pod(tls, with_secrets({"runahead-tls": files_of(before)})) as pod:
        assert answers(pod, tls, tmp_path, authority=before.pem.decode()).text
        pod.change_secret("/etc/runahead/tls", files_of(after))
        pod.change_secret("/etc/runahead/callers", {"callers": f"alice generate token {new}\n"})
        told = answers(pod, tls, tmp_path, authority=after.pem.decode(), token=new, others=[TOKEN])
        assert told.text
        assert told.others == ["UNAUTHENTICATED"]
        assert pod.terminate(END_S) == 0, pod.log.read_text()


def files_of(authority: Authority) -> dict[str, str]:
    """Of the Secret with a certificate."""
    pair = authority.server()
    return {"tls.crt": pair.certificate.decode(), "tls.key": pair.key.decode()}


@pytest.mark.usefixtures("machine_for_pods")
@pytest.mark.timeout(400)
def test_a_pod_that_can_write_nowhere_says_so_and_ends(manifests: MakeManifests) -> None:
    """What the volumes are there for: without them the root is as the manifests have it, and can't be written to."""
    base = manifests("base")
    base.container["volumeMounts"] = [each for each in base.container["volumeMounts"] if each["name"] == "callers"]
    with started_pod(base, CALLERS) as pod:
        assert pod.process.wait(END_S) == 2, pod.log.read_text()
        assert "no folder for temporary files can be written to" in pod.log.read_text()


@pytest.mark.usefixtures("machine_for_pods")
@pytest.mark.timeout(400)
def test_a_pod_whose_secret_names_nobody_says_so_and_ends(manifests: MakeManifests) -> None:
    with started_pod(manifests("base"), {"runahead-callers": {"callers": "# nobody\n"}}) as pod:
        assert pod.process.wait(END_S) == 2, pod.log.read_text()
        assert "/etc/runahead/callers/callers has no callers" in pod.log.read_text()
