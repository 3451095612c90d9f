"""The socket of `python -m mpiddp where`: who asks, and who answers."""

import contextlib
import os
import socket
import threading

import pytest

from mpiddp.faults import where_socket
from mpiddp.faults.where_socket import WhereSocket

ME = os.getuid()


def test_where_answers_its_user():
    bell = WhereSocket("test-of-the-bell", os.getpid())
    bell.sockets[0].setblocking(True)
    answering = threading.Thread(target=bell.answer, args=(lambda: "told",))
    answering.start()
    (address,) = (each for each in where_socket.ranks() if each[1] == os.getpid())
    assert where_socket.ask(*address) == "told"
    answering.join()
    bell.close()


@pytest.mark.parametrize("owner", [ME, ME + 1])
def test_another_users_socket_is_not_believed(monkeypatch, owner):
    """Any user may take the name of a socket before the rank does."""
    job, rank = "test-of-an-impostor", os.getpid()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as impostor:
        impostor.bind(f"\0mpiddp-{ME}-{job}-{rank}")
        impostor.listen()
        monkeypatch.setattr(where_socket, "_user", lambda peer: owner)
        told = []
        ringing = threading.Thread(target=lambda: told.append(where_socket.ask(job, rank)))
        ringing.start()
        caller, _ = impostor.accept()
        with caller, contextlib.suppress(BrokenPipeError):
            caller.sendall(b"text")
        ringing.join()
    assert told == (["text"] if owner == ME else [""])
