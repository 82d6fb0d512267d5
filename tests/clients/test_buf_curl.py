"""What one does with grpcurl, done with buf curl: the script of clients/buf-curl, against a whole service."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.toolchains import CLIENTS, Program

BUF = Path(sys.executable).with_name("buf")
SERVICE = "runahead.v1.GenerationService"

pytestmark = pytest.mark.skipif(not BUF.exists(), reason="buf is not installed")


def sections(output: str) -> dict[str, str]:
    """What the script has printed under each of its titles."""
    parts = output.split("== ")[1:]
    return {title: body for title, _, body in (part.partition("\n") for part in parts)}


def messages(text: str) -> list[dict[str, Any]]:
    """JSON documents, one behind the other."""
    decoder, found = json.JSONDecoder(), []
    while text := text.lstrip():
        document, end = decoder.raw_decode(text)
        found.append(document)
        text = text[end:]
    return found


def check(said: dict[str, str]) -> None:
    """That each part of the script has done what it is for."""
    assert SERVICE in said["services"].splitlines()
    assert {f"{SERVICE}/{method}" for method in ("Generate", "Abort", "Stats")} <= set(said["methods"].splitlines())

    assert "- name: GenerationService\n" in said[f"describe {SERVICE}"]
    assert "- name: GenerateOnce\n" in said[f"describe {SERVICE}"]
    described = said[f"describe {SERVICE}.Abort"]
    assert "inputType: .runahead.v1.AbortRequest\n" in described
    assert "- name: GenerateOnce\n" not in described, "of the one method that was asked for"
    assert "- name: request_ids\n            number: 1\n" in said["describe runahead.v1.AbortRequest"]

    generated = messages(said["Generate"])
    assert [next(iter(event)) for event in (generated[0], generated[-1])] == ["accepted", "finished"]
    assert "".join(event.get("delta", {}).get("text", "") for event in generated).strip()
    abort, _, reason = said["Abort"].rpartition("}\n")
    (answer,) = messages(abort + "}")
    assert [result["outcome"] for result in answer["results"]] == ["ABORT_OUTCOME_ABORTED"]
    assert "FINISH_REASON_ABORTED" in reason
    (stats,) = messages(said["Stats"])
    assert int(stats["stats"]["requests"]["submitted"]) >= 2

    refusal, _, status = said["refused"].rpartition("}\n")
    (error,) = messages(refusal + "}")
    assert error["code"] == "invalid_argument"
    assert "stopping.max_tokens" in error["message"]
    assert {"google.rpc.ErrorInfo", "google.rpc.BadRequest"} <= {detail["type"] for detail in error["details"]}
    assert status == "exit status 24\n"


def test_buf_curl_lists_describes_and_calls_by_reflection(address: str) -> None:
    done = Program([CLIENTS / "buf-curl/calls.sh"], CLIENTS).run(f"http://{address}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    check(sections(done.stdout))


def test_buf_curl_does_the_same_through_tls_with_a_token(secured: tuple[str, Path, Path]) -> None:
    address, authority, token = secured
    bearer = f"authorization: Bearer {token.read_text().strip()}"
    flags: list[str | Path] = ["--cacert", authority, "--header", bearer, "--reflect-header", "*"]
    done = Program([CLIENTS / "buf-curl/calls.sh"], CLIENTS).run(f"https://{address}", *flags)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    check(sections(done.stdout))


def test_a_symbol_that_the_server_does_not_know_is_no_description(address: str) -> None:
    done = Program([CLIENTS / "buf-curl/describe.sh"], CLIENTS).run(f"http://{address}", "runahead.v1.Nothing")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "the server knows no such symbol\n")
