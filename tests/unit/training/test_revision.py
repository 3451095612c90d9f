"""The commit that a run was made from."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from mpiddp.training.revision import commit_of


def git(folder, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    done = subprocess.run(["git", *identity, "-C", folder, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_and_whether_files_differ_from_it(tmp_path, monkeypatch):
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1")
    assert commit_of(tmp_path) is None, "nothing is known of yet"
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "m")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    found = commit_of(tmp_path / "a.py")
    assert found == git(tmp_path, "rev-parse", "HEAD") and re.fullmatch("[0-9a-f]{40}", found)
    (tmp_path / "b.py").write_text("2")
    assert commit_of(tmp_path / "b.py") is None, "as an installed package in somebody's checkout"
    assert commit_of(tmp_path) == found
    (tmp_path / "a.py").write_text("3")
    assert commit_of(tmp_path / "a.py") == found + "-dirty"


def test_no_repository_and_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert commit_of(tmp_path) is None
