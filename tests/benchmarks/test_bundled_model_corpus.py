"""What may become training text of the bundled model, how it is cut, and how its completions are judged."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import benchmarks.bundled_model
from benchmarks.bundled_model.completions import choose_heads, head_of
from benchmarks.bundled_model.corpus import collect, read_file, split_of
from benchmarks.bundled_model.evaluate import check_files
from benchmarks.bundled_model.licences import reason_to_leave_out

SOURCE = '''import os

LIMIT = 3


@cached
def outer(x,
          y=1):
    """Say what it does."""
    def inner():
        return x
    return inner


class Box:
    @property
    def size(self):
        return len(self.items)


def one_line(): return 1
'''


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("test/test_os.py", ""),
        ("tkinter/test/support.py", ""),
        ("ensurepip/__init__.py", ""),
        ("asyncio/sslproto.py", "import ssl\n"),
        ("a.py", "# Permission to use, copy, modify, and distribute this software\n"),
        ("a.py", "# Licensed under the Apache License, Version 2.0\n"),
        ("a.py", "# SPDX-License-Identifier: PSF-2.0 AND (MIT OR Apache-2.0)\n"),
        ("a.py", "# Redistribution and use in source and binary forms\n"),
        ("a.py", '""" Codec generated from a table with gencodec.py.\n"""\n'),
    ],
)
def test_tests_vendored_and_generated_files_and_other_licences_are_left_out(path: str, text: str) -> None:
    assert reason_to_leave_out(path, text) is not None


def test_a_file_under_the_psf_licence_is_taken() -> None:
    text = "# Copyright 2006 Google, Inc. All Rights Reserved.\n# Licensed to PSF under a Contributor Agreement.\n"
    assert reason_to_leave_out("ipaddress.py", text) is None


def test_the_split_depends_on_the_path_alone() -> None:
    assert split_of("functools.py") == "held_out"
    assert split_of("argparse.py") == "train"
    listing = json.loads((Path(benchmarks.bundled_model.__path__[0]) / "held_out.json").read_text())
    assert {split_of(path) for path in listing["files"]} == {"held_out"}


def test_definitions_keep_their_decorators_and_methods_move_to_the_margin() -> None:
    file = read_file("a.py", SOURCE, SOURCE.encode())
    assert file is not None
    assert [text.splitlines()[0] for text in file.definitions] == ["@cached", "class Box:", "def one_line(): return 1"]
    assert file.methods == ("@property\ndef size(self):\n    return len(self.items)\n",)
    for text in (*file.definitions, *file.methods):
        assert len(ast.parse(text).body) == 1


def test_a_file_of_another_release_is_skipped() -> None:
    assert read_file("a.py", "print 'two'\n", b"") is None


def test_a_head_ends_after_signature_and_docstring_and_a_body_remains() -> None:
    file = read_file("a.py", SOURCE, SOURCE.encode())
    assert file is not None
    expected = '@cached\ndef outer(x,\n          y=1):\n    """Say what it does."""\n'
    assert [head_of(text) for text in file.definitions] == [expected, None, None]
    assert choose_heads([file], 50) == [expected]


def test_the_running_library_is_told_apart_from_the_one_that_was_measured(tmp_path: Path) -> None:
    for name in ("functools.py", "new.py", "argparse.py"):
        (tmp_path / name).write_text("def f():\n    return 1\n")
    assert [file.path for file in collect(tmp_path)[0]] == ["argparse.py", "functools.py", "new.py"]
    files, left_out = collect(tmp_path, ("held_out",))
    assert [file.path for file in files] == ["functools.py", "new.py"] and left_out == {}
    assert "Of 2 held-out files here, 1 differ and 1 are new; 28 are missing" in check_files(files)
