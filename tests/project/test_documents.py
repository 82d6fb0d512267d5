"""What the documents name is there, and they name it as it is."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from runahead.service.commands import (
    abort_command,
    chat_command,
    client_channel,
    engine_commands,
    request_flags,
    stats_command,
    trace_command,
)
from runahead.service.commands.bench import command as bench_command
from runahead.service.settings import setting_flags, settings
from runahead.service.settings.cli_parser import Parser
from runahead.v1 import generate_pb2
from tests.project.repository import ROOT, TESTS, TOOLS, calls, documents, name_of, sources
from tests.project.settings_table import COMMAND, PAGE, tables, tables_of

README: Final = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE: Final = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Flags of programs that are not ours.
OTHERS: Final = {
    "--against": "buf",
    "--api-key": "smg",
    "--applyset": "kubectl",
    "--build-arg": "podman",
    "--cacert": "buf",
    "--cap-drop": "podman",
    "--chat-template": "smg",
    "--data": "buf",
    "--device": "podman",
    "--dry-run": "kubectl",
    "--field-selector": "kubectl",
    "--file": "docker",
    "--for": "kubectl",
    "--from-file": "kubectl",
    "--go_opt": "protoc",
    "--grpc_python_out": "protoc",
    "--header": "buf",
    "--list-methods": "buf",
    "--list-services": "buf",
    "--local": "kubectl",
    "--local-dir": "hf",
    "--merge": "llama-gguf-split",
    "--namespace": "helm",
    "--no-cache": "podman",
    "--no-deps": "pip",
    "--output": "podman",
    "--previous": "kubectl",
    "--protocol": "buf",
    "--prune": "kubectl",
    "--publish": "podman",
    "--python_out": "protoc",
    "--raw": "kubectl",
    "--read-only": "podman",
    "--reflect-header": "buf",
    "--replicas": "kubectl",
    "--rm": "podman",
    "--short": "git",
    "--strict": "kubernetes-validate",
    "--tag": "podman",
    "--target": "podman",
    "--tmpfs": "podman",
    "--values": "helm",
    "--volume": "podman",
    "--wheel-dir": "pip",
    "--worker-urls": "smg",
}
_TOML: Final = re.compile(r"^```toml\n(.*?)^```", re.DOTALL | re.MULTILINE)
_BLOCK: Final = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FLAG: Final = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def code(path: Path) -> Iterator[str]:
    """What a document sets as code: the lines of its blocks, and the spans between backticks."""
    text = path.read_text(encoding="utf-8")
    for block in _BLOCK.findall(text):
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", _BLOCK.sub("", text))


@cache
def anchors(path: Path) -> set[str]:
    """What a link may have behind `#`: of each heading its words in small letters, without signs, joined by hyphens."""
    headings = re.findall(r"^#+ (.+)$", _BLOCK.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def flags_of(*commands: str) -> set[str]:
    """Flags of commands of `runahead`."""
    clients = {
        "generate": request_flags,
        "chat": chat_command,
        "stats": stats_command,
        "trace": trace_command,
        "abort": abort_command,
        "bench": bench_command,
    }
    parsers = [Parser() for _ in commands]
    for command, parser in zip(commands, parsers, strict=True):
        if command in ("serve", "tune"):
            setting_flags.add_flags(parser)
            if command == "tune":
                engine_commands.add_tune_flags(parser)
        else:
            clients[command].add_flags(parser)
            client_channel.add_connection_flags(parser)
    return {flag for parser in parsers for action in parser.actions for flag in action.option_strings}


@cache
def flags_of_tools() -> set[str]:
    """Flags that our benchmarks and tests declare."""
    return {
        argument.value
        for path in sources(*TOOLS, *TESTS)
        for call in calls(path)
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("add_argument", "addoption")
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


@pytest.mark.parametrize("path", list(documents()), ids=name_of)
def test_every_make_target_that_a_document_names_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
    assert {"test", "check"} <= targets
    named = {target for line in code(path) for target in re.findall(r"\bmake ([a-z0-9-]+)", line)}
    assert not named - targets


@pytest.mark.parametrize("path", list(documents()), ids=name_of)
def test_every_flag_that_a_document_names_exists(path: Path) -> None:
    commands = ("serve", "tune", "generate", "chat", "stats", "trace", "abort", "bench")
    everywhere = flags_of(*commands) | flags_of_tools() | {"--version", *OTHERS}
    if path.name == "CHANGELOG.md":
        everywhere |= {"--exact"}  # a former one
    for line in code(path):
        command = re.match(r"runahead (serve|tune|generate|chat|stats|trace|abort|bench)\b", line)
        known = flags_of(command[1]) if command else everywhere
        assert not set(_FLAG.findall(line)) - known, line


def test_the_documents_name_flags_and_targets_at_all() -> None:
    lines = [line for path in documents() for line in code(path)]
    assert sum(bool(_FLAG.search(line)) for line in lines) > 20
    assert sum(line.startswith("make ") for line in lines) > 5


def test_the_page_of_settings_lists_every_one_as_it_is_declared() -> None:
    found = tables_of(PAGE.read_text(encoding="utf-8"))
    assert found == tables(), f"{COMMAND} writes them"
    assert (
        "| `--max-queue` | `RUNAHEAD__MAX_QUEUE` | `1024` | maximum number of waiting requests |" in found.splitlines()
    )


def test_every_file_of_settings_that_a_document_shows_is_taken_as_it_is(tmp_path: Path) -> None:
    shown = [block for path in documents() for block in _TOML.findall(path.read_text(encoding="utf-8"))]
    assert shown
    for block in shown:
        file = tmp_path / "runahead.toml"
        file.write_text(block, encoding="utf-8")
        assert settings.load_settings({}, {}, str(file)) != settings.Settings()


def test_what_the_documents_commands_write_in_a_checkout_is_no_part_of_it(tmp_path: Path) -> None:
    """The tokens above all. git is asked in a folder with the same .gitignore: the sources may be no checkout."""
    written = {
        name
        for path in documents()
        for line in code(path)
        if re.match(r"(\(umask 077; .*)?(printf|sed|runahead|podman) ", line)
        for name in re.findall(r"(?:>|--out |--output |--picture )([\w.]+)(?![\w./-])", line)
    }
    assert {"callers", "token", "chain.svg", "trace.json", "runahead.tar"} <= written
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / ".gitignore").write_bytes((ROOT / ".gitignore").read_bytes())
    names = sorted(written)
    done = subprocess.run(["git", "check-ignore", *names], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == names


def test_the_readme_the_makefile_and_the_package_name_the_same_versions_of_python() -> None:
    (bounds,) = re.findall(r"^>=3\.(\d+),<3\.(\d+)$", PROJECT["project"]["requires-python"])
    versions = [f"3.{minor}" for minor in range(int(bounds[0]), int(bounds[1]))]
    sentence = "Python " + " or ".join(versions)
    assert f"need {sentence} and make" in README
    assert f"Needs {sentence} and make" in MAKEFILE
    assert PROJECT["tool"]["mypy"]["python_version"] == versions[0]
    assert PROJECT["tool"]["ruff"]["target-version"] == versions[0].replace("3.", "py3")


@pytest.mark.parametrize("path", list(documents()), ids=name_of)
def test_every_file_that_a_document_links_to_is_there(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", _BLOCK.sub("", path.read_text(encoding="utf-8")))
    files = [link for link in links if "://" not in link]
    assert [link for link in files if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", list(documents()), ids=name_of)
def test_every_heading_that_a_document_links_to_is_there(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", _BLOCK.sub("", path.read_text(encoding="utf-8")))
    assert [
        f"{file}#{anchor}" for file, anchor in links if anchor not in anchors(path.parent / file if file else path)
    ] == []


def test_the_page_of_the_contract_names_every_field_of_a_request() -> None:
    page = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    request: Any = generate_pb2.GenerateRequest.DESCRIPTOR  # its class depends on protobuf's implementation
    groups = [field.message_type for field in request.fields if field.name in ("sampling", "stopping", "output")]
    names = {field.name for message in (request, *groups) for field in message.fields}
    assert len(names) >= 30
    assert {name for name in names if f"`{name}`" not in page} == set()
