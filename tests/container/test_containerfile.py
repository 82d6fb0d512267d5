"""The Containerfile, read: what `make container` can't see of it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

from runahead.service.processes.ports import FIRST
from runahead.service.settings.settings import FrontEndSettings
from tests.container.__main__ import PYTHONS, TARGET
from tests.container.containerfile import read_containerfile
from tests.container.steps import SCRIPTS
from tests.project.repository import PACKAGES, ROOT

TEXT: Final = (ROOT / "Containerfile").read_text(encoding="utf-8")
READ: Final = read_containerfile(ROOT / "Containerfile")
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SCRIPT: Final = (SCRIPTS / "install.sh").read_text(encoding="utf-8")
SERVED: Final = ("cpu", "cuda", "cuda-sealed")


def test_whatever_runs_in_a_build_is_a_step_of_the_one_script() -> None:
    commands = re.findall(r"^RUN (?:--mount=\S+ \\\n *)*(.*)$", TEXT, re.MULTILINE)
    assert len(commands) == TEXT.count("\nRUN "), "each was found"
    for command in commands:
        assert re.fullmatch(
            r"sh /srv/install\.sh (system|tools|compiler|package /mnt|wheels \w+ /sources /wheels)", command
        )


def test_a_target_is_installed_by_the_steps_that_are_tried() -> None:
    assert READ.targets["cpu"].steps == ["system", "package /mnt"]
    assert READ.targets["cuda-sealed"].steps == ["system", "package /mnt"]
    assert READ.targets["cuda"].steps == ["system", "package /mnt", "compiler"]
    assert READ.targets["wheels-cpu"].steps[-1] == "wheels cpu /sources /wheels"


@pytest.mark.parametrize("name", SERVED)
def test_an_image_is_started_by_a_user_with_a_number_and_ends_when_it_is_asked(name: str) -> None:
    target = READ.targets[name]
    (user,) = re.findall(r"^user=(\d+)", SCRIPT, re.MULTILINE)
    (home,) = re.findall(r"^home=(\S+)$", SCRIPT, re.MULTILINE)
    assert target.user == f"{user}:{user}" == "10001:10001"
    assert (target.entrypoint, target.cmd) == ([f"{home}/bin/runahead"], ["serve"])
    assert target.env["PATH"].startswith(f"{home}/bin:")
    assert target.stop_signal == "SIGTERM"


def test_the_ports_that_an_image_names_are_those_of_the_settings_that_others_may_reach() -> None:
    settings = FrontEndSettings()
    assert READ.targets[TARGET].expose == [settings.port, FIRST["health"], FIRST["metrics"]]


def test_what_is_built_where_no_target_is_named_is_for_cpus() -> None:
    assert list(READ.targets)[-1] == TARGET == "cpu"


def test_an_image_says_what_it_is() -> None:
    labels = {key.removeprefix("org.opencontainers.image."): text for key, text in READ.targets["cpu"].labels.items()}
    assert labels["title"] == "runahead"
    assert labels["description"] == PROJECT["description"]
    assert labels["licenses"] == "Apache-2.0"
    assert READ.targets["serving"].args["VERSION"] == PROJECT["version"]


def test_the_sources_that_are_copied_are_all_that_the_package_is_built_from() -> None:
    copied = READ.targets["sources"].copied
    wanted = {folder.partition("/")[0] for folder in PACKAGES}
    assert {*wanted, PROJECT["readme"], *PROJECT["license-files"]} <= set(copied)
    assert all((ROOT / path).exists() for path in copied)


def test_a_build_reads_what_is_copied_and_the_steps_and_nothing_else() -> None:
    lines = (ROOT / ".containerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"
    read = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert read == {*READ.targets["sources"].copied, "deploy/container"}
    generated = {f"**/{Path(line).name}" for line in (ROOT / ".gitignore").read_text().splitlines() if "_pb2" in line}
    assert generated
    assert generated < set(rules[len(read) + 1 :]), "an older build's stubs are left out"


def test_the_python_of_the_base_is_one_that_runahead_supports() -> None:
    suite = READ.args["BASE"].removeprefix("debian:").removesuffix("-slim")
    low, high = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    assert int(low) <= int(PYTHONS[suite].partition(".")[2]) < int(high)


@pytest.mark.parametrize("stage", ["wheels-cpu", "wheels-cuda"])
def test_each_stage_that_makes_wheels_is_given_what_a_build_may_say(stage: str) -> None:
    assert set(READ.targets[stage].args) == {"EXTRAS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "REVISION"}
    assert READ.targets[stage].args == READ.targets["wheels-cpu"].args


def test_the_extras_of_an_image_are_there() -> None:
    extras = READ.targets["wheels-cpu"].args["EXTRAS"]
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert f"${{EXTRAS-{extras}}}" in SCRIPT, "the script's default is the image's"
