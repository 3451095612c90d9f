from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mpiddp.data import download, mnist, mnist_idx
from mpiddp.data.download import download as fetch_file

from .test_sets import write_mnist

CONTENT = bytes(range(256)) * 40
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves a folder, or misbehaves as its address says: /slow/, /cut/, /wrong/, /gone/, /dead/."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.asked: list[str] = []
        self.over = threading.Event()

    def address(self, way: str = "good") -> str:
        return f"http://127.0.0.1:{self.server_port}/{way}/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        _, way, name = self.path.split("/")
        self.server.asked.append(self.path)
        if way == "gone":
            self.send_error(404)
            return
        if way == "dead":
            self.server.over.wait(20)
            return
        content = b"<html>log in here</html>" if way == "wrong" else (self.server.folder / name).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        for start in range(0, len(content), 1024):
            if way == "slow":
                time.sleep(0.02)
            if way == "cut" and start > len(content) // 2:
                return
            self.wfile.write(content[start : start + 1024])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "file").write_bytes(CONTENT)
    made = Server(folder)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.over.set()
    made.shutdown()
    made.server_close()
    thread.join()


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
    monkeypatch.setattr(download, "STALLED_S", 0.3)
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


def served_mnist(server: Server, monkeypatch: pytest.MonkeyPatch, way: str = "good") -> None:
    write_mnist(server.folder, packed=True)
    digest: Callable[[str], str] = lambda name: hashlib.sha256((server.folder / name).read_bytes()).hexdigest()  # noqa: E731
    monkeypatch.setattr(mnist_idx, "SHA256", {name: digest(name) for name in mnist_idx.SHA256})
    monkeypatch.setattr(mnist_idx, "SOURCES", (server.address(way),))


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
