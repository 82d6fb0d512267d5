"""Where a checkpoint lies and what its files say is read without torch, which a front end does not load."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from safetensors import safe_open

from runahead.runtime.checkpoint import BUNDLED_FOLDER, CheckpointError, check_files, folder
from runahead.runtime.checkpoint.folder import FolderCheckpoint


@pytest.mark.parametrize("name", ["CONFIG", "GENERATION_CONFIG", "WEIGHTS", "TOKENIZER", "TOKENIZER_CONFIG"])
def test_the_bundled_model_has_the_file(name: str) -> None:
    assert (BUNDLED_FOLDER / getattr(folder, name)).is_file()


def test_the_headers_of_the_weights_are_read_without_torch() -> None:
    program = (
        "import sys\nfrom runahead.runtime.checkpoint import BUNDLED_FOLDER, check_files, open_checkpoint\n"
        "check_files(BUNDLED_FOLDER, has_weights=True)\nprint(len(open_checkpoint(BUNDLED_FOLDER).tensors()))\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


def test_a_header_says_what_the_library_reads() -> None:
    stored = FolderCheckpoint(BUNDLED_FOLDER).tensors()
    with safe_open(BUNDLED_FOLDER / folder.WEIGHTS, framework="np") as file:
        assert set(stored) == set(file.keys())
        for name, tensor in stored.items():
            piece = file.get_slice(name)
            assert (tensor.dtype, list(tensor.shape)) == (piece.get_dtype(), piece.get_shape())


def write_weights(place: Path, header: bytes) -> None:
    (place / folder.WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1e999]}}', "has a corrupt header"),
        (b"[" * 100_000, "has a corrupt header"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', "tensor a is cut off"),
    ],
    ids=["infinite", "endless", "cut off"],
)
def test_a_header_that_makes_no_sense_is_refused_by_the_file(tmp_path: Path, header: bytes, sentence: str) -> None:
    write_weights(tmp_path, header)
    with pytest.raises(CheckpointError, match=sentence):
        FolderCheckpoint(tmp_path).tensors()


def test_a_file_that_can_not_be_opened_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights(tmp_path, b"{}")

    def refuse(path: Path, mode: str) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"model\.safetensors can't be read: Permission denied"):
        FolderCheckpoint(tmp_path).tensors()


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / folder.CONFIG).write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        check_files(tmp_path, has_weights=False)
