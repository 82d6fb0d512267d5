"""Draft heads in a `pytorch_model.bin`: read as they are in safetensors, and refused, in a sentence, for anything else.

Each file that would run something would leave a file behind, and none is there afterwards.
"""

from __future__ import annotations

import json
import os
import pickletools
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runahead.runtime.checkpoint import CheckpointError, open_head, torch_archive
from runahead.runtime.checkpoint.torch_archive import MOST_AROUND, MOST_BYTES, check_archive
from runahead.runtime.models.drafters import head_files
from runahead.runtime.models.drafters.eagle import open_eagle
from runahead.runtime.models.drafters.head_files import read_torch_file
from tests.runtime.models import eagle3_heads, eagle_heads
from tests.runtime.models.eagle3_heads import OWN, write_head3
from tests.runtime.models.eagle_heads import CONFIG, HIDDEN, VOCAB, write_head
from tests.runtime.models.test_eagle import TARGET, as_it_is, fused, opened
from tests.runtime.models.test_head_padding import PADDED, padded
from tests.runtime.models.wrapped_heads import wrapped

TENSORS = eagle_heads.random_head()
MOST = 1 << 30


def written(folder: Path, held: Any, config: dict[str, Any] = CONFIG, **how: Any) -> Path:
    """A head's folder whose weights are what torch.save makes of an object."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.save(held, folder / "pytorch_model.bin", **how)
    return folder


def packed_anew(folder: Path, change: Callable[[dict[str, bytes]], None], how: int = zipfile.ZIP_STORED) -> Path:
    """A head's folder whose archive has other parts. change: of its parts, by name."""
    path = written(folder, TENSORS) / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    change(parts)
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return folder


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_head_is_the_one_that_it_is_in_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    """With a copy of the embedding, which published heads have."""
    tensors = {name: tensor.to(dtype) for name, tensor in TENSORS.items()}
    theirs = opened(write_head(tmp_path / "safetensors", tensors))
    copied = OrderedDict({"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN, dtype=dtype), **tensors})
    ours = opened(written(tmp_path / "torch", copied))
    assert ours.weights(as_it_is).parameters == theirs.weights(as_it_is).parameters
    assert torch.equal(fused(ours).weight, fused(theirs).weight) and fused(ours).weight.dtype == torch.float32
    for part in ("qkv", "o"):
        both = [getattr(each.weights(as_it_is).mixer, part).weight for each in (ours, theirs)]
        assert torch.equal(*both)


def test_one_of_eagle_3_too_with_its_vocabulary_and_padding(tmp_path: Path) -> None:
    tensors = eagle3_heads.random_head()
    theirs = opened(write_head3(tmp_path / "safetensors", tensors)).weights(as_it_is)
    more = {**tensors, "lm_head.weight": torch.nn.Parameter(padded(tensors["lm_head.weight"], 128))}
    more["t2d"] = torch.cat([tensors["t2d"], torch.zeros(PADDED - VOCAB, dtype=torch.bool)])
    ours = opened(written(tmp_path / "torch", more, {**CONFIG, **OWN, "vocab_size": PADDED})).weights(as_it_is)
    assert ours.lm_head is not None and torch.equal(ours.lm_head, tensors["lm_head.weight"])
    assert ours.targets is not None and theirs.targets is not None and torch.equal(ours.targets, theirs.targets)
    assert torch.equal(ours.mixer.qkv.weight, theirs.mixer.qkv.weight)


def test_a_wrapped_one_too(tmp_path: Path) -> None:
    tensors = {name.replace("midlayer.", "layers.0."): each for name, each in eagle3_heads.random_head().items()}
    head = opened(written(tmp_path, tensors, wrapped("eagle3"))).weights(as_it_is)
    assert torch.equal(head.mixer.o.weight, tensors["layers.0.self_attn.o_proj.weight"])


def test_safetensors_beside_it_are_read_in_its_place(tmp_path: Path) -> None:
    folder = write_head(tmp_path, TENSORS)
    (folder / "pytorch_model.bin").write_bytes(b"whatever it is")
    assert torch.equal(fused(opened(folder)).weight, TENSORS["fc.weight"])


def test_a_large_tensor_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_files, "_NUMBERS_AT_ONCE", 300)
    expected = torch.randn(1000, 7)
    stored = read_torch_file(written(tmp_path, {"one": expected}) / "pytorch_model.bin", MOST)["one"]
    pieces = list(stored.pieces())
    assert len(pieces) == 24 and (stored.shape, stored.size_bytes) == ((1000, 7), 28000)
    assert torch.equal(torch.cat([torch.from_numpy(numbers) for _, numbers in pieces]), expected)


# ---------------------------------------------------------------- what would run


class Calls:
    """What makes a pickle that calls a function when it is read."""

    def __init__(self, function: Any, *given: Any) -> None:
        self._call = (function, given)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call


def harmful(folder: Path, **how: Any) -> tuple[Path, Path]:
    """A head's folder, and the file that is there when its program has run."""
    left = folder.parent / "left_behind"
    return written(folder, {**TENSORS, "fc.weight": Calls(os.system, f"touch {left}")}, **how), left


def test_a_program_that_runs_a_command_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    folder, left = harmful(tmp_path / "head")
    with pytest.raises(CheckpointError, match=r"would call posix.system, which no file of tensors does: nothing of it"):
        open_head(folder)
    with pytest.raises(CheckpointError, match=r"would call posix.system"):
        read_torch_file(folder / "pytorch_model.bin", MOST)
    assert not left.exists()


def test_who_reads_it_would_run_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody had looked at the program before."""
    folder, left = harmful(tmp_path / "head")
    monkeypatch.setattr(head_files, "check_archive", lambda path: None)
    with pytest.raises(CheckpointError, match=r"can't be read as tensors \(UnpicklingError\); fetch the file again"):
        read_torch_file(folder / "pytorch_model.bin", MOST)
    assert not left.exists()


@pytest.mark.parametrize(
    "how", [{"pickle_protocol": 4}, {"pickle_protocol": 4, "_use_new_zipfile_serialization": False}], ids=str
)
def test_nor_does_one_in_another_dialect(how: dict[str, Any], tmp_path: Path) -> None:
    folder, left = harmful(tmp_path / "head", **how)
    with pytest.raises(
        CheckpointError, match=r"would call something by STACK_GLOBAL|torch.save does not write|is not a zip archive"
    ):
        opened(folder)
    assert not left.exists()


@pytest.mark.parametrize(
    ("held", "sentence"),
    [
        ({"fc.weight": torch.eye(3).to_sparse()}, r"would call torch._utils._rebuild_sparse_tensor, which no"),
        ({"fc.weight": torch.eye(3, device="meta")}, r"would call torch._utils._rebuild_meta_tensor_no_storage"),
        ({"fc.weight": torch.eye(3).double()}, r"would call torch.DoubleStorage"),
        ({"fc.weight": torch.zeros(3, dtype=torch.uint8)}, r"would call torch.ByteStorage"),
        ({"fc.weight": {3}}, r"would call __builtin__.set|would call builtins.set|holds fc.weight, an object of set"),
        ({"model": TENSORS}, "holds model, an object of dict; tensors alone are read"),
        ({**TENSORS, "epoch": 3}, "holds epoch, an object of int; tensors alone are read"),
        ({**TENSORS, "note": None}, "holds note, an object of NoneType; tensors alone are read"),
        ({3: TENSORS["fc.weight"]}, "calls a tensor 3; a name must be a text"),
        ([TENSORS["fc.weight"]], "holds no dictionary of tensors, but an object of list"),
        (TENSORS["fc.weight"], "holds no dictionary of tensors, but an object of Tensor"),
        (
            {**TENSORS, "fc.weight": torch.zeros(4, 4)},
            r"fc.weight of .* has shape \[4, 4\]; config.json asks for \[64,",
        ),
        ({**TENSORS, "fc.weight": torch.zeros(64, 128).int()}, "fc.weight of .* is of torch.int32; supported are"),
        ({**TENSORS, "scale": torch.ones(1)}, "has a tensor scale, which a head of EAGLE-1 does not have"),
        ({**TENSORS, "d2t": torch.zeros(4)}, "tensor d2t must be 4 integers of 64 or 32 bits"),
        ({**TENSORS, "fc.weight": torch._neg_view(torch.zeros(64, 128))}, "would call|ordinary ones of|does not write"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_of_the_head_alone_are_read(held: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        opened(written(tmp_path, held))


def test_a_tensor_that_says_it_is_larger_than_it_is_takes_no_memory(tmp_path: Path) -> None:
    """All of its numbers are one in the file."""
    held = {**TENSORS, "fc.weight": torch.zeros(1).expand(1 << 30, 1 << 20)}
    with pytest.raises(CheckpointError, match=r"fc.weight of .* has shape \[1073741824, 1048576\]; config.json asks"):
        opened(written(tmp_path, held))


def test_nor_does_one_whose_numbers_are_looked_at(tmp_path: Path) -> None:
    held = {**TENSORS, "d2t": torch.zeros(1, dtype=torch.int64).expand(1 << 40)}
    with pytest.raises(CheckpointError, match=r"tensor d2t has 1099511627776 tokens, and the model 160"):
        opened(written(tmp_path, held))


# ---------------------------------------------------------------- files that are not what they should be


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, TENSORS) / "pytorch_model.bin"
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) - 100, len(whole) // 2, 1000, 60):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"pytorch_model.bin is cut off or damaged: .*; fetch the file again"):
            opened(tmp_path)


def test_a_damaged_program_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, TENSORS) / "pytorch_model.bin"
    content = path.read_bytes()
    place = content.index(b"OrderedDict") if b"OrderedDict" in content else content.index(b"_rebuild_tensor_v2")
    path.write_bytes(content[:place] + b"X" + content[place + 1 :])
    with pytest.raises(CheckpointError, match=r"is cut off or damaged: Bad CRC-32"):
        opened(tmp_path)


def test_the_older_form_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = written(tmp_path, TENSORS, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"is not a zip archive, the format of torch.save since .*save_file"):
        opened(folder)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer and not the file itself"),
        (b"", "is not a zip archive"),
        (b"PK\x03\x04", "is cut off or damaged"),
    ],
)
def test_what_is_no_archive_at_all_is_refused(content: bytes, sentence: str, tmp_path: Path) -> None:
    folder = written(tmp_path, TENSORS)
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=sentence):
        opened(folder)


def not_opened(*given: Any, **named: Any) -> Any:
    raise AssertionError("it was opened")


def test_a_file_larger_than_its_head_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tensor more it is, by its size, while the size of what a head may have leaves room for it."""
    room = (2 * 512 * HIDDEN + 2 * HIDDEN) * 4 + MOST_AROUND
    with pytest.raises(CheckpointError, match="has a tensor more, which a head of EAGLE-1 does not have"):
        opened(written(tmp_path, {**TENSORS, "more": torch.zeros(room // 8)}))
    folder = written(tmp_path, {**TENSORS, "more": torch.zeros(room // 4 + VOCAB * HIDDEN + 9 * (VOCAB + 512))})
    checkpoint = open_head(folder)
    monkeypatch.setattr(head_files, "check_archive", not_opened)
    monkeypatch.setattr(torch, "load", not_opened)
    with pytest.raises(CheckpointError, match=r"has \d+ bytes, and the tensors of a head as its .* was not opened"):
        open_eagle(checkpoint, TARGET, 256, "--draft-model", "--context-length")


def test_a_huge_file_is_refused_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path, TENSORS)
    os.truncate(folder / "pytorch_model.bin", MOST_BYTES + 1)  # it has a hole, and takes no room
    monkeypatch.setattr(zipfile, "ZipFile", not_opened)
    with pytest.raises(CheckpointError, match=f"has {MOST_BYTES + 1} bytes, and a draft head's file at most"):
        open_head(folder)


def test_a_second_directory_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    """Where the records at the end name one directory, and another one lies right in front of them, Python reads the
    latter and torch the former."""
    path = written(tmp_path, TENSORS) / "pytorch_model.bin"
    whole = path.read_bytes()
    place = whole.rindex(b"PK\x06\x06")
    length, begin = struct.unpack("<2Q", whole[place + 40 : place + 56])
    assert begin + length == place, "as torch.save writes it"
    directory = whole[begin:place]
    moved = whole[place + 56 : place + 64] + struct.pack("<Q", place + length) + whole[place + 72 :]
    path.write_bytes(whole[:place] + directory + whole[place : place + 56] + moved)
    with pytest.raises(CheckpointError, match="damaged: its directory is not where it is said to be"):
        check_archive(path)
    place_alone = whole[: place + 64] + struct.pack("<Q", place - 1) + whole[place + 72 :]
    path.write_bytes(place_alone)
    with pytest.raises(CheckpointError, match="damaged: its directory's record is not where it is said to be"):
        check_archive(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(CheckpointError, match="damaged: it does not end as an archive does"):
        check_archive(path)


def test_a_program_that_would_run_without_end_is_refused(tmp_path: Path) -> None:
    """A tuple of a tuple twice, of that one twice, and so on 64 times, as the key of a dictionary."""
    program = b"\x80\x02})q\x00" + b"h\x00h\x00\x86q\x00" * 64 + b"Ns."
    with pytest.raises(CheckpointError, match=r"a program that torch.save does not write \(BINGET\)"):
        opened(packed_anew(tmp_path / "twice", add("data.pkl", program)))
    with pytest.raises(CheckpointError, match=r"a program that torch.save does not write \(DUP\)"):
        opened(packed_anew(tmp_path / "doubled", add("data.pkl", b"\x80\x02})" + b"2\x86" * 64 + b"Ns.")))


def program_in(parts: dict[str, bytes]) -> str:
    return next(name for name in parts if name.endswith("/data.pkl"))


def add(name: str, content: bytes = b"") -> Callable[[dict[str, bytes]], None]:
    return lambda parts: parts.update({f"{program_in(parts).partition('/')[0]}/{name}": content})


@pytest.mark.parametrize(
    ("change", "how", "sentence"),
    [
        (add("code/__torch__.py"), zipfile.ZIP_STORED, "has a part '.*/code/__torch__.py', which no file of tensors"),
        (lambda parts: parts.update({"data.pkl": b""}), zipfile.ZIP_STORED, "has a part 'data.pkl', which no file"),
        (lambda parts: parts.update({"b/data.pkl": b""}), zipfile.ZIP_STORED, "has 2 parts data.pkl, or a part twice"),
        (lambda parts: parts.pop(program_in(parts)), zipfile.ZIP_STORED, "has 0 parts data.pkl, or a part twice"),
        (lambda parts: None, zipfile.ZIP_DEFLATED, "that is packed, and torch.save packs none"),
        (lambda parts: add("data.pkl", bytes(MOST_AROUND + 1))(parts), zipfile.ZIP_STORED, "is no tensor takes over"),
        (lambda parts: add("data.pkl", b"\x80\x02.")(parts), zipfile.ZIP_STORED, "can't be read as tensors"),
        (lambda parts: add("data.pkl", b"\xff\xff")(parts), zipfile.ZIP_STORED, "is cut off or damaged"),
        (lambda parts: add("data.pkl", b"\x80\x02")(parts), zipfile.ZIP_STORED, "is cut off or damaged"),
        (
            lambda parts: parts.update({f"a/data/{number}": b"" for number in range(20000)}),
            zipfile.ZIP_STORED,
            "is no tensor takes over",
        ),
    ],
)
def test_an_archive_that_is_none_of_tensors_is_refused(
    change: Callable[[dict[str, bytes]], None], how: int, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        opened(packed_anew(tmp_path, change, how))


def test_what_may_be_named_is_what_torch_names_of_tensors(tmp_path: Path) -> None:
    """All of it, and nothing more: another release of torch that names more is met here first."""
    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool]
    held = OrderedDict({str(kind): torch.zeros(2, dtype=kind) for kind in kinds})
    held["parameter"] = torch.nn.Parameter(torch.zeros(2))
    path = written(tmp_path, held) / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        program = archive.read(program_in(dict.fromkeys(archive.namelist(), b"")))
    named = {given for found, given, _ in pickletools.genops(program) if found.name == "GLOBAL"}
    assert named == torch_archive._MAY_NAME
    assert read_torch_file(path, MOST).keys() == held.keys()
