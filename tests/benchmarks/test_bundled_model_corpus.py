"""What may become training text of the bundled model, how it is cut, and how its completions are judged."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks.bundled_model.completions import choose_heads, head_of
from benchmarks.bundled_model.corpus import held_out_files, read_file
from benchmarks.bundled_model.evaluate import check_files

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


def test_definitions_keep_their_decorators() -> None:
    file = read_file("a.py", SOURCE, SOURCE.encode())
    assert file is not None
    assert [text.splitlines()[0] for text in file.definitions] == ["@cached", "class Box:", "def one_line(): return 1"]
    for text in file.definitions:
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
    files = held_out_files(tmp_path)
    assert [file.path for file in files] == ["functools.py"], "the list of files decides"
    assert "Of 1 held-out files here, 1 differ; 28 are missing" in check_files(files)
