from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.serving import Server, digests

from mpiddp.data import builtin, mnist
from mpiddp.data.builtin import fetch_file

from .test_builtin import write_mnist

CONTENT = bytes(range(256)) * 40
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "file").write_bytes(CONTENT)
    with Server(folder) as made:
        yield made


@pytest.mark.parametrize("way", ["good", "slow"])
def test_fetched_once(tmp_path: Path, server: Server, way: str) -> None:
    folder = tmp_path / "made" / "here"
    for _ in range(2):
        path = fetch_file("file", folder, [server.address(way)], DIGEST)
        assert path == folder / "file" and path.read_bytes() == CONTENT
    assert server.asked == [f"/{way}/file"]
    path.write_bytes(CONTENT[:-1])
    fetch_file("file", folder, [server.address()], DIGEST)
    assert path.read_bytes() == CONTENT, "a damaged file is replaced"
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("gone", "HTTP Error 404"),
        ("wrong", "it sent 24 bytes of SHA-256"),
        ("cut", "IncompleteRead"),
        ("dead", "timed out"),
    ],
)
def test_failure_says_which_file_from_where_and_what_to_do(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, way: str, text: str
) -> None:
    monkeypatch.setattr(builtin, "STALLED_S", 0.3)
    folder = tmp_path / "folder"
    nobody = "http://127.0.0.1:9/"
    with pytest.raises(OSError, match="cannot fetch file ") as caught:
        fetch_file("file", folder, [nobody, server.address(way)], DIGEST)
    said = str(caught.value)
    for part in (nobody, "refused", server.address(way), text, f"put it into {folder}", DIGEST):
        assert part in said, said
    assert not folder.exists() or not list(folder.iterdir())
    fetch_file("file", folder, [nobody, server.address(way), server.address()], DIGEST)
    assert (folder / "file").read_bytes() == CONTENT, "the next place is asked"


def test_folder_that_cannot_be_written_to(tmp_path: Path, server: Server) -> None:
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(OSError, match="folder"):
        fetch_file("file", tmp_path / "folder", [server.address()], DIGEST)


def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        fetch_file("file", tmp_path / "folder", [server.address()], DIGEST)
    assert not list((tmp_path / "folder").iterdir())


def served_mnist(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(server.folder, packed=True)
    monkeypatch.setattr(builtin, "SHA256", digests(server.folder))
    monkeypatch.setattr(builtin, "SOURCES", (server.address(),))


def test_mnist_fetches_what_is_missing(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    served_mnist(server, monkeypatch)
    folder = tmp_path / "data"
    assert len(mnist(folder, download=True)) == 6 and len(mnist(folder, train=False, download=True)) == 3
    assert len(server.asked) == 4
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    mnist(folder, download=True)
    assert len(server.asked) == 5, "the other three are there"


def test_mnist_as_torchvision_left_it_is_not_fetched(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_mnist(server, monkeypatch)
    write_mnist(tmp_path / "MNIST" / "raw")
    assert len(mnist(tmp_path, download=True)) == 6
    assert server.asked == []
