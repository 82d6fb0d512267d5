"""Services to call, each example made once, and the count of languages in the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc
import pytest

from benchmarks.local_service import local_service
from runahead.v1 import GenerationServiceStub
from tests.clients.languages import Languages
from tests.clients.toolchains import EXAMPLES, MissingToolchainError, Program
from tests.service.certificates import Authority

REQUIRED_IN_CI: Final = {"cpp", "node", "python"}
CHAT_TEMPLATE: Final = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}# answer:"
TOKEN: Final = "pUbXv5cQZcQyP2m8rK3sT1wE6hJ9"

_LANGUAGES: Final = pytest.StashKey[Languages]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LANGUAGES] = Languages()


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line of a run that has met any of them, behind pytest's own."""
    languages = config.stash.get(_LANGUAGES, None)
    if languages is not None and (languages.run or languages.skipped):
        config.get_terminal_writer().line(languages.line())


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where examples and the package of stubs are made, each once, unless it is in a folder of their own."""
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="session", params=EXAMPLES)
def example(request: pytest.FixtureRequest, scratch: Path) -> Program:
    """An example, made with its language's toolchain. Where that is missing, its tests are skipped; in CI some fail."""
    languages, (language, make) = request.config.stash[_LANGUAGES], EXAMPLES[request.param]
    try:
        program = make(scratch)
    except MissingToolchainError as missing:
        languages.skipped[language] = str(missing)
        if os.environ.get("CI") == "true" and language in REQUIRED_IN_CI:
            pytest.fail(f"CI must run the example in {language}: {missing}")
        pytest.skip(f"{language}: {missing}")
    languages.run.add(language)
    return program


@pytest.fixture(scope="session")
def chat_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with one, since the bundled model has none."""
    (file := tmp_path_factory.mktemp("template") / "template.jinja").write_text(CHAT_TEMPLATE)
    return file


@pytest.fixture(scope="session")
def address(chat_template: Path) -> Iterator[str]:
    """Of a service for everybody on this machine."""
    with local_service(["--num-blocks", "600", "--chat-template", str(chat_template)]) as running:
        yield running.url


@pytest.fixture(scope="session")
def without_chat_template() -> Iterator[str]:
    """Address of a service of the bundled model as it is."""
    with local_service() as running:
        yield running.url


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory, chat_template: Path) -> Iterator[tuple[str, Path, Path]]:
    """Address of a service that asks for TLS and a token, and the files with its authority and with the token."""
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority()
    certificate, key = authority.server().write(folder, "server")
    (ca := folder / "authority.crt").write_bytes(authority.pem)
    (token := folder / "token").write_text(f"{TOKEN}\n")
    (callers := folder / "callers").write_text(f"alice generate,control token {TOKEN}\n")
    security = ["--tls-cert", str(certificate), "--tls-key", str(key), "--callers", str(callers)]
    with local_service([*security, "--num-blocks", "600", "--chat-template", str(chat_template)]) as running:
        yield running.url, ca, token


@pytest.fixture(scope="session")
def stub(address: str) -> Iterator[GenerationServiceStub]:
    with grpc.insecure_channel(address) as channel:
        yield GenerationServiceStub(channel)
