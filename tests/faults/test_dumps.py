"""The flight recorder's files, in a folder whose name any user of the machine can guess."""

import os
import tempfile
from types import SimpleNamespace

import pytest

from mpiddp.faults.dumps import Dumps


@pytest.fixture
def dumps(monkeypatch, tmp_path):
    (tmp_path / "tmp").mkdir()
    monkeypatch.delenv("MPIDDP_FLIGHT_RECORDER", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(Dumps, "lines", lambda self, reason: [{"reason": reason}])
    return lambda: Dumps(SimpleNamespace(questions={}), SimpleNamespace(rank=0, job="job"))


def test_folder_is_this_users_alone(dumps, tmp_path):
    folder = tmp_path / "tmp" / f"mpiddp-{os.getuid()}-job"
    assert dumps().write("a test") and dumps().write("another")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == ["rank_0"]


@pytest.mark.parametrize("way", ["a link", "another user's"])
def test_folder_of_somebody_else_is_left_alone(monkeypatch, dumps, tmp_path, way):
    folder, private = tmp_path / "tmp" / f"mpiddp-{os.getuid()}-job", tmp_path / "private"
    private.mkdir()
    if way == "a link":
        folder.symlink_to(private)
    else:
        folder.mkdir()
        one = dumps()
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert not (dumps() if way == "a link" else one).write("a test")
    assert not list(private.iterdir()) and not list(folder.iterdir())


def test_link_at_a_name_that_is_given_is_replaced(monkeypatch, dumps, tmp_path):
    (tmp_path / "precious").write_text("kept")
    for name in ("rank_0", "rank_0.part"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    monkeypatch.setenv("MPIDDP_FLIGHT_RECORDER", f"{tmp_path}/rank_")
    assert dumps().write("a test")
    assert (tmp_path / "precious").read_text() == "kept" and not (tmp_path / "rank_0").is_symlink()
