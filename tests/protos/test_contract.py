"""The contract's own rules."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

import runahead.v1
from runahead.runtime.wire.parameters import FinishReason
from runahead.v1 import control_pb2, generate_pb2, generation_service_pb2, model_pb2, stats_pb2, trace_pb2

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).with_name("buf")
FILES = (control_pb2, generate_pb2, model_pb2, stats_pb2, trace_pb2)
MESSAGES = {name: message for file in FILES for name, message in file.DESCRIPTOR.message_types_by_name.items()}
ENUMS = {name: enum for file in FILES for name, enum in file.DESCRIPTOR.enum_types_by_name.items()}


def reachable(message: Descriptor) -> set[str]:
    """Messages of the contract inside a message, itself included."""
    found = {message.name}
    for field in message.fields:
        if field.message_type is not None and field.message_type.name in MESSAGES:
            found |= reachable(field.message_type)
    return found


ASKED = sorted(set().union(*(reachable(message) for name, message in MESSAGES.items() if name.endswith("Request"))))


def repeated(field: FieldDescriptor) -> bool:
    return field.is_repeated


@pytest.mark.parametrize("name", ASKED)
def test_every_scalar_that_a_client_sends_knows_unset_from_zero(name: str) -> None:
    for field in MESSAGES[name].fields:
        assert repeated(field) or field.has_presence, f"{name}.{field.name} must be optional"


@pytest.mark.parametrize("name", sorted(reachable(MESSAGES["ServerStats"])))
def test_every_figure_of_stats_has_64_bits(name: str) -> None:
    number = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_DOUBLE)
    wide = (*number, FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING)  # a name is no figure
    for field in MESSAGES[name].fields:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        value = field.message_type.fields_by_name["value"] if is_map else field
        assert value.type in wide, f"{name}.{field.name} may grow for as long as the engine runs"


def test_every_message_and_enum_is_exported() -> None:
    assert {*MESSAGES, *ENUMS} <= set(runahead.v1.__all__)
    assert all(hasattr(runahead.v1, name) for name in runahead.v1.__all__)


def test_generate_once_takes_exactly_what_generate_takes() -> None:
    def shape(name: str) -> list[tuple[object, ...]]:
        return [
            (field.name, field.number, field.type, repeated(field), field.message_type and field.message_type.name)
            for field in MESSAGES[name].fields
        ]

    assert shape("GenerateOnceRequest") == shape("GenerateRequest")


def test_finish_reasons_are_the_engines_but_for_those_that_are_never_sent() -> None:
    served = {
        name.removeprefix("FINISH_REASON_"): value.number
        for name, value in ENUMS["FinishReason"].values_by_name.items()
    }
    engine = {reason.name: int(reason) for reason in FinishReason}
    assert served.pop("UNSPECIFIED") == engine.pop("NOT_FINISHED") == 0
    of_structures = ("NOTHING_LEFT", "STRUCTURE_LOST", "STRUCTURE_COST", "STRUCTURE_MISMATCH")
    assert all(engine.pop(name) for name in ("NON_FINITE", "CANCELLED", *of_structures))
    assert served == engine


def test_every_field_message_and_method_has_a_comment() -> None:
    declaration = re.compile(
        r"^\s*(message|enum|service|rpc|oneof|optional|repeated|map<|\w[\w.]* \w+ = \d|[A-Z_]+ = )"
    )
    for path in sorted((ROOT / "protos").rglob("*.proto")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for before, line in itertools.pairwise(lines):
            if declaration.match(line):
                assert before.strip().startswith("//"), f"{path.name}: {line.strip()!r} has no comment"


@pytest.mark.parametrize("file", [*FILES, generation_service_pb2], ids=lambda file: Path(file.DESCRIPTOR.name).name)
def test_every_file_says_where_the_generated_code_of_each_language_lives(file: ModuleType) -> None:
    options = {option.name: value for option, value in file.DESCRIPTOR.GetOptions().ListFields()}
    assert options == {
        "csharp_namespace": "Runahead.V1",
        "go_package": "runahead/v1;runaheadv1",
        "java_multiple_files": True,
        "java_package": "runahead.v1",
        "objc_class_prefix": "RAH",
        "php_namespace": "Runahead\\V1",
        "ruby_package": "Runahead::V1",
    }


def test_every_proto_file_is_among_those_that_are_looked_at() -> None:
    names = {file.DESCRIPTOR.name for file in (*FILES, generation_service_pb2)}
    assert names == {path.relative_to(ROOT / "protos").as_posix() for path in (ROOT / "protos").rglob("*.proto")}


@pytest.mark.skipif(not BUF.exists(), reason="buf is not installed")
def test_the_contract_is_clean_under_buf_lint() -> None:
    done = subprocess.run([BUF, "lint"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
