"""The doorbell: who rings, and who answers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from mpiddp.faults import doorbell
from mpiddp.faults.doorbell import Address, Doorbell

ME = os.getuid()


def test_doorbell_answers_its_user():
    bell = Doorbell("test-of-the-bell", os.getpid())
    bell.sockets[0].setblocking(True)
    answering = threading.Thread(target=bell.answer, args=(lambda: "told",))
    answering.start()
    (address,) = (each for each in doorbell.addresses() if each.rank == os.getpid())
    assert doorbell.ring(address) == "told"
    answering.join()
    bell.close()


@pytest.mark.parametrize("owner", [ME, ME + 1])
def test_another_users_socket_is_not_believed(monkeypatch, owner):
    """Any user may take the name of a doorbell before the rank does."""
    name = f"mpiddp-{ME}-test-of-an-impostor-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as impostor:
        impostor.bind(f"\0{name}")
        impostor.listen()
        monkeypatch.setattr(doorbell, "_user", lambda peer: owner)
        told = []
        ringing = threading.Thread(target=lambda: told.append(doorbell.ring(Address("job", 0, name))))
        ringing.start()
        caller, _ = impostor.accept()
        with caller, contextlib.suppress(BrokenPipeError):
            caller.sendall(b"text")
        ringing.join()
    assert told == (["text"] if owner == ME else [""])


def test_user_of_a_socket_is_known():
    one, other = socket.socketpair()
    with one, other:
        assert doorbell._user(one) == doorbell._user(other) == os.geteuid()
