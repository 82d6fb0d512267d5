"""Changes of the contract are compared with its image, protos/contract.yaml; those that break a client are refused."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).with_name("buf")
IMAGE = ROOT / "protos/contract.yaml"

needs_buf = pytest.mark.skipif(not BUF.exists(), reason="buf is not installed")


@pytest.fixture
def protos(tmp_path: Path) -> Path:
    """A copy of the contract's files, to be changed."""
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    shutil.copytree(ROOT / "protos", tmp_path / "protos", ignore=shutil.ignore_patterns("*.py", "*.pyi", "*.yaml"))
    return tmp_path / "protos/runahead/v1"


def breaking(folder: Path) -> tuple[int, str]:
    """Exit status and findings of the command that `make check` runs, for the contract in a folder with a buf.yaml."""
    command = [str(BUF), "breaking", "--against", str(IMAGE)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{path.name} must hold {old!r} once"
    path.write_text(text.replace(old, new), encoding="utf-8")


@needs_buf
def test_the_contract_breaks_nothing_that_its_image_holds() -> None:
    assert breaking(ROOT) == (0, "")


@needs_buf
@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("generate.proto", "  optional float min_p = 4;\n", "", 'field "4" with name "min_p"'),
        ("generate.proto", "optional float min_p = 4;", "optional float min_p = 99;", 'field "4" with name "min_p"'),
        ("generate.proto", "optional float min_p = 4;", "optional double min_p = 4;", "float"),
        ("generate.proto", "optional float min_p = 4;", "optional float least_p = 4;", "least_p"),
        ("generate.proto", "  FINISH_REASON_ABORTED = 5;\n", "", 'value "5" on enum "FinishReason"'),
        ("generate.proto", 'ruby_package = "Runahead::V1"', 'ruby_package = "Other::V1"', "ruby_package"),
        (
            "generation_service.proto",
            "  rpc Detokenize(DetokenizeRequest) returns (DetokenizeResponse);\n",
            "",
            'RPC "Detokenize"',
        ),
    ],
    ids=["field removed", "number", "type", "name", "value removed", "language option", "method removed"],
)
def test_a_change_that_breaks_a_client_is_refused(file: str, old: str, new: str, named: str, protos: Path) -> None:
    change(protos / file, old, new)
    code, findings = breaking(protos.parents[2])
    assert code != 0
    assert file in findings and named in findings


@needs_buf
def test_what_is_added_breaks_nobody(protos: Path) -> None:
    change(
        protos / "generate.proto", "  optional float min_p = 4;\n", "  optional float min_p = 4;\n  bool more = 99;\n"
    )
    assert breaking(protos.parents[2]) == (0, "")


def test_a_decision_record_names_the_image_that_changes_are_compared_with() -> None:
    """Whoever renews the image says why."""
    digest = hashlib.sha256(IMAGE.read_bytes()).hexdigest()
    records = [path.name for path in (ROOT / "docs/decisions").glob("*.md") if digest in path.read_text()]
    assert records, f"no decision record names the image {digest}"
