"""The version names the commit where one is known, and no commit where none is."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import runahead
from runahead.service import version
from runahead.service.version import COMMIT_FILE, commit_of, full_version, write_commit

NUMBER = metadata.version("runahead-server")


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *who, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "file").write_text("1")
    git(folder, "add", "file")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def test_a_checkout_names_its_commit(checkout: Path) -> None:
    assert full_version(checkout / "package", checkout) == f"{NUMBER}+g{git(checkout, 'rev-parse', 'HEAD')[:12]}"


def test_a_checkout_with_changes_says_so(checkout: Path) -> None:
    (checkout / "file").write_text("2")
    assert full_version(checkout / "package", checkout) == f"{NUMBER}+g{git(checkout, 'rev-parse', 'HEAD')[:12]}.dirty"


def test_a_tag_does_not_stand_in_for_the_commit(checkout: Path) -> None:
    git(checkout, "tag", "--annotate", "v9", "--message", "nine")
    assert commit_of(checkout) == git(checkout, "rev-parse", "HEAD")[:12]


def test_a_package_says_the_commit_that_it_was_built_from(checkout: Path, tmp_path: Path) -> None:
    package = tmp_path / "site-packages/service"
    write_commit(checkout, package)
    assert full_version(package, package.parent) == f"{NUMBER}+g{git(checkout, 'rev-parse', 'HEAD')[:12]}"


def test_a_package_that_was_built_without_git_names_no_commit(tmp_path: Path) -> None:
    write_commit(tmp_path, tmp_path / "package")
    assert full_version(tmp_path / "package", tmp_path) == NUMBER


def test_a_package_of_sources_without_git_names_the_commit_that_its_build_was_told(tmp_path: Path) -> None:
    write_commit(tmp_path, tmp_path / "package", "0123456789ab.dirty")
    assert full_version(tmp_path / "package", tmp_path) == f"{NUMBER}+g0123456789ab.dirty"


def test_a_checkout_knows_its_commit_better_than_who_builds_it(checkout: Path) -> None:
    write_commit(checkout, checkout / "package", "0123456789ab")
    written = (checkout / "package" / COMMIT_FILE).read_text().strip()
    assert written.removesuffix(".dirty") == git(checkout, "rev-parse", "HEAD")[:12]


@pytest.mark.parametrize("told", ["main", "012345", "0123456789ab\n", "../../etc", "0" * 41])
def test_only_a_commit_is_taken_for_one(tmp_path: Path, told: str) -> None:
    with pytest.raises(ValueError, match="is not a commit"):
        write_commit(tmp_path, tmp_path / "package", told)
    assert not (tmp_path / "package").exists()


def test_a_build_without_git_keeps_no_commit_of_an_older_one(checkout: Path, tmp_path: Path) -> None:
    package = tmp_path / "build/service"
    write_commit(checkout, package)
    assert (package / COMMIT_FILE).exists()
    write_commit(tmp_path, package)
    assert not (package / COMMIT_FILE).exists()


def test_a_folder_inside_somebody_elses_checkout_does_not_name_their_commit(checkout: Path) -> None:
    inside = checkout / "vendored"
    inside.mkdir()
    assert full_version(inside / "package", inside) == NUMBER


def test_a_checkout_that_git_cannot_read_names_no_commit(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("nonsense")
    assert commit_of(tmp_path) is None


def test_the_package_says_what_the_command_says() -> None:
    assert runahead.__version__ == full_version()
    done = subprocess.run([sys.executable, "-m", "runahead", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"runahead {full_version()}\n"


def test_the_package_has_no_other_name_that_was_not_given_to_it() -> None:
    with pytest.raises(AttributeError, match="module 'runahead' has no attribute '__versoin__'"):
        getattr(runahead, "__versoin__")  # noqa: B009 - a type checker refuses it as an attribute


def test_sources_that_are_not_installed_have_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "DISTRIBUTION", "a-distribution-that-nobody-has-installed")
    assert full_version(tmp_path, tmp_path) == "0"
