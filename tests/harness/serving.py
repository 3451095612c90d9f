"""A web server on this machine that misbehaves on request."""

from __future__ import annotations

import hashlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mpiddp.data import builtin


class _Handler(BaseHTTPRequestHandler):
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


class Server(ThreadingHTTPServer):
    """Serves a folder, in the way that the address says: good, slow, cut, wrong, gone or dead; a context manager."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.asked: list[str] = []
        """The paths of all requests."""
        self.over = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def address(self, way: str = "good") -> str:
        return f"http://127.0.0.1:{self.server_port}/{way}/"

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()
        self._thread.join()


def digests(folder: Path) -> dict[str, str]:
    """Return `builtin.SHA256` as if these were MNIST's files."""
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in builtin.SHA256}
