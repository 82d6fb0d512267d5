"""Files of strangers: refused with a sentence of a bounded length, and for memory in proportion to their bytes."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runahead.runtime.checkpoint import CheckpointError, check_files, open_checkpoint, open_head
from runahead.runtime.checkpoint.folder import FolderCheckpoint

STRING, ARRAY, UINT8, UINT32 = 8, 9, 0, 4
MIB = 1 << 20


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content.encode())) + content.encode()


def gguf(folder: Path, *pairs: tuple[str, int, bytes]) -> Path:
    """A file without tensors. pairs: keys, kinds of values, and values as they are stored."""
    path = folder / "hostile.gguf"
    body = b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in pairs)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + body)
    return path


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Python's own memory, in bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        check_files(path, has_weights=True)
    sentence = str(error.value)
    assert len(sentence) <= 2000
    return sentence


@pytest.mark.parametrize(
    ("kind", "value", "sentence"),
    [
        (ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000, "an array has values of the kind 9, which are neither numbers"),
        (ARRAY, struct.pack("<IQ", UINT8, 1 << 62), "has a corrupt header"),
        (ARRAY, struct.pack("<IQ", STRING, 1 << 62), "has a corrupt header"),
        (STRING, struct.pack("<Q", (1 << 64) - 1), "has a corrupt header"),
        (STRING, struct.pack("<Q", 1) + b"\xff", "has a corrupt header"),
        (77, b"", "a value is of the unknown kind 77"),
        (STRING, text("1"), "has split.count '1', which must be a number"),
        (STRING, text("1" * MIB), "has split.count '1111"),
        (ARRAY, struct.pack("<IQ", STRING, 1) + text("1"), r"has split.count \['1'\], which must be a number"),
    ],
)  # fmt: skip
def test_metadata_of_gguf_that_make_no_sense_are_refused(
    kind: int, value: bytes, sentence: str, tmp_path: Path
) -> None:
    path = gguf(tmp_path, ("split.count", kind, value))
    with pytest.raises(CheckpointError, match=sentence):
        check_files(path, has_weights=True)
    refused(path)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    pair = ("split.count", UINT32, struct.pack("<I", 1))
    assert "the key split.count is there twice" in refused(gguf(tmp_path, pair, pair))


@pytest.mark.parametrize(
    "value",
    [
        struct.pack("<IQ", UINT8, MIB) + bytes(MIB),
        struct.pack("<IQ", STRING, MIB // 8) + bytes(MIB),
    ],
    ids=["numbers", "texts"],
)
def test_an_array_of_gguf_takes_memory_in_proportion_to_its_bytes(tmp_path: Path, value: bytes) -> None:
    path = gguf(tmp_path, ("general.architecture", STRING, text("llama")), ("tokenizer.ggml.scores", ARRAY, value))
    with at_most(40 * MIB):
        assert "has no llama.embedding_length" in refused(path)
        metadata = open_checkpoint(path).metadata  # type: ignore[attr-defined]
    assert not any(metadata["tokenizer.ggml.scores"])


def test_tokens_that_are_no_texts_give_a_template_none(tmp_path: Path) -> None:
    for kind, value in ((UINT32, struct.pack("<I", 7)), (ARRAY, struct.pack("<IQI", UINT32, 1, 7))):
        pairs = ("tokenizer.ggml.tokens", kind, value), ("tokenizer.ggml.bos_token_id", UINT32, struct.pack("<I", 0))
        assert open_checkpoint(gguf(tmp_path, *pairs)).template_tokens() == {}


@pytest.mark.parametrize("inner", [b"[],", b'{"a":[1]},', b"1e400,", b'"",'])
def test_a_header_that_describes_no_tensors_takes_memory_in_proportion_to_its_bytes(
    tmp_path: Path, inner: bytes
) -> None:
    header = b'{"a":[' + inner * (4 * MIB // len(inner)) + b"0]}"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with at_most(4 * len(header)):
        assert "has a corrupt header" in refused(tmp_path)


@pytest.mark.parametrize("deep", [65, 5000, 1_000_000])
def test_objects_that_are_nested_too_deep_are_refused(tmp_path: Path, deep: int) -> None:
    nested = '{"a":' * deep + "{}" + "}" * deep
    (tmp_path / "config.json").write_text(nested)
    assert "config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text('{"a":' * 63 + "{}" + "}" * 63)
    assert FolderCheckpoint(tmp_path).config()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(nested)) + nested.encode())
    assert "has a corrupt header" in refused(tmp_path)


def test_an_index_that_is_no_map_of_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for index in ("[" * MIB, json.dumps({"weight_map": {"a": ["b"] * 100_000}}), json.dumps([[]] * 100_000)):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with at_most(4 * len(index) + MIB):
            assert "can't be read" in refused(tmp_path)


@pytest.mark.parametrize("program", [b"](" * 300_000, b"]" * 300_000 + b"a" * 299_999, b"(" * 600_000])
def test_a_program_of_nested_lists_is_refused_with_a_sentence(tmp_path: Path, program: bytes) -> None:
    from runahead.runtime.models.drafters.head_files import read_torch_file

    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + program + b".")
    with pytest.raises(CheckpointError) as error:
        open_head(tmp_path)
        read_torch_file(path, MIB)
    assert len(str(error.value)) <= 2000


def test_a_sentence_that_quotes_much_keeps_its_ends() -> None:
    sentence = str(CheckpointError("begins " + "x" * MIB + " ends"))
    assert len(sentence) < 2010
    assert sentence.startswith("begins x") and sentence.endswith("x ends") and " … " in sentence
    assert str(CheckpointError("short")) == "short"
