"""Dumps of the flight recorder, in the format of torch's.

``torchfrtrace`` reads one pickle of plain values a rank. It knows torch's backends only: operations stand under
``gloo``, with torch's or the nearest name; ours, and messages, under ``mpiddp``. It wants all ranks of a group in every
entry: a message is in a group of its sender, receiver and tag, while the ring holds all messages; one from any source
is left out.

References
----------
torch 2.13, ``torch/csrc/distributed/c10d/FlightRecorder.hpp``, format 2.10, and ``torch/distributed/flight_recorder``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpiddp import settings
from mpiddp.mpi import recorder
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.operation import Call, Operation
from mpiddp.mpi.world import World

from .liveness import Liveness, Tag

_VERSION = "2.10"
_WRITTEN_S, _POLL_S = 2.0, 0.01
"""For the others to write theirs; watchdogs look twice a second."""
_NAMES = {
    "all_gather_single": "_all_gather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_gather_object": "all_gather",
    "gather_object": "gather",
    "broadcast_object_list": "broadcast",
    "scatter_object_list": "scatter",
    "symmetric_empty": "new_window",
    "new_group": "split",
    "isend": "send",
    "irecv": "recv",
}
_SAME = (
    "send",
    "recv",
    "barrier",
    "broadcast",
    "reduce",
    "all_reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
)
_UNEQUAL = ("gather", "scatter")
"""Sizes may differ between ranks, which the tool does not allow."""
_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "uint8": "Byte",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}


def torch_name(name: str) -> str:
    """Return torch's name, or "barrier" for an operation that torch has not."""
    return name if name in _SAME else _NAMES.get(name, "barrier")


def _is_private(folder: Path) -> bool:
    """Make a folder in one that all users write to; return False if it is somebody else's, or a link."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


class Dumps:
    def __init__(self, liveness: Liveness, world: World) -> None:
        self._liveness, self._world, self._rank = liveness, world, world.rank
        given = settings.flight_recorder()
        default = Path(tempfile.gettempdir()) / f"mpiddp-{os.getuid()}-{world.job}" / "rank_"
        self._prefix = f"{Path.cwd()}/" * (not given.startswith("/")) + given if given else str(default)
        self._wanted, self._own_folder = given != "0", given is not None
        self._wrote: dict[int, bool] = {}
        liveness.handlers.update({Tag.DUMP: self._hear, Tag.DUMPED: self._note})

    def _hear(self, source: int, message: bytearray) -> None:
        self._liveness.send(source, Tag.DUMPED, bytes([self.write(message.decode())]))

    def _note(self, source: int, message: bytearray) -> None:
        self._wrote[source] = bool(message[0])

    def collect(self, reason: str) -> str:
        """Let all ranks write; return a line about it, if dumps are wanted."""
        if not self._wanted:
            return ""
        reason = f"rank {self._rank}: {reason}"
        self._wrote = {self._rank: self.write(reason)}
        with contextlib.suppress(MPI.Exception):  # a rank has failed
            if self._world.thread_multiple:
                for rank in self._world.ranks:
                    if rank != self._rank:
                        self._liveness.send(rank, Tag.DUMP, reason.encode())
                deadline = time.monotonic() + _WRITTEN_S
                while len(self._wrote) < self._world.size and time.monotonic() < deadline:
                    self._liveness.progress()
                    time.sleep(_POLL_S)
        where = ", each on its node" if len(set(self._world.hosts)) > 1 and not self._own_folder else ""
        count = sum(self._wrote.values())
        files = f"{self._prefix}*"
        return (
            f"flight recorder: {count} of {self._world.size} ranks wrote {files}{where};"
            f" `python -m mpiddp flight {files}` shows where they part"
        )

    def write(self, reason: str) -> bool:
        with contextlib.suppress(Exception):  # the watchdog must live on
            path = Path(f"{self._prefix}{self._rank}")
            if self._own_folder:
                path.parent.mkdir(parents=True, exist_ok=True)
            elif not _is_private(path.parent):
                return False
            # A new file: somebody else may have put a link at any name that can be guessed.
            descriptor, part = tempfile.mkstemp(prefix=".", dir=path.parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(pickle.dumps(self.contents(reason), protocol=2))
            Path(part).replace(path)
            return True
        return False

    def contents(self, reason: str) -> dict[str, Any]:
        entries, began = recorder.entries(), recorder.collectives()
        entries = [each for each in entries if each.members.number in recorder.groups]
        own_ns = time.time_ns() - time.monotonic_ns()
        links = [each.link for each in tuple(recorder.groups.values()) if each.link is not None]
        scheduled = {id(entry) for link in links for entry in link.queue.behind_the_head()}
        whole = len(entries) < recorder.SIZE
        of_group = Counter[str]()
        record = began - sum(entry.call.record is not None for entry in entries)
        listed, messages, config = [], [], {_uid(number): _config(group) for number, group in _groups(entries)}
        for entry in entries:
            found = self._entry(entry, own_ns, id(entry) in scheduled)
            if found["is_p2p"]:
                messages.append(found)
                pair = self._pair(entry)
                if not (whole and pair is not None):
                    continue
                uid, ranks, profiled = pair
                of_group[uid] += 1
                found = found | {
                    "process_group": (uid, found["process_group"][1]),
                    "collective_seq_id": of_group[uid],
                    "p2p_seq_id": of_group[uid],
                    "profiling_name": f"gloo:{profiled}",
                }
                config[uid] = {"name": uid, "desc": found["process_group"][1], "ranks": str(ranks)}
            else:
                record += 1
            listed.append(found | {"record_id": record})
        own = {"rank": self._rank, "job": self._world.job, "host": socket.gethostname(), "pid": os.getpid()}
        return {
            "version": _VERSION,
            "comm_lib_version": "",
            "entries": listed,
            "pg_config": config,
            "pg_status": _status(listed),
            "mpiddp": own | {"reason": reason, "time_ns": time.time_ns(), "messages": messages},
        }

    def _entry(self, entry: Operation, own_ns: int, scheduled: bool) -> dict[str, Any]:
        call, number, code, end = entry.call, entry.number, entry.code, entry.end
        group = recorder.groups[entry.members.number]
        is_message = call.record is None
        state = "completed" if end else "scheduled" if scheduled else "started"
        start_ns, end_ns = int(entry.start * 1e9) + own_ns, int(end * 1e9) + own_ns if end else None
        name = torch_name(call.operation)
        sizes = [_sizes(call, name, call.input_shape), _sizes(call, name, call.output_shape)]
        dtypes = [] if call.dtype is None or name == "barrier" else [_DTYPES.get(str(call.dtype), "Byte")]
        own = {
            "name": call.name,
            "text": _text(call, number),
            "call": None if is_message else [call.record.kind >> 1, call.record.length, call.record.root],
            "peers": None if call.peers is None else list(call.peers),
            "tag": call.tag or 0,
        }
        return {
            "pg_id": entry.members.number & 0xFFFFFFFF,
            "process_group": (_uid(entry.members.number), group.description),
            "collective_seq_id": 0 if is_message else number,
            "p2p_seq_id": number if is_message else 0,
            "op_id": number,
            "profiling_name": f"gloo:{name}",
            "time_created_ns": start_ns,
            "time_discovered_started_ns": None if scheduled else start_ns,
            "time_discovered_completed_ns": end_ns,
            "input_sizes": sizes[0],
            "input_dtypes": dtypes,
            "output_sizes": sizes[1],
            "output_dtypes": dtypes,
            "state": state,
            "retired": bool(end),
            "timeout_ms": int(min(group.timeout_s * 1e3, sys.maxsize)),
            "is_p2p": is_message,
            "frames": [
                {
                    "name": code.co_name,
                    "filename": code.co_filename,
                    "line": recorder.line_number(code, entry.offset),
                }
            ],
            "mpiddp": own,
        }

    def _pair(self, entry: Operation) -> tuple[str, list[int], str] | None:
        call = entry.call
        name = call.operation.removeprefix("i")
        if name not in ("send", "recv") or call.peers is None or len(call.peers) != 1:
            return None
        source, target = (self._rank, call.peers[0]) if name == "send" else (call.peers[0], self._rank)
        if source == target:
            return None
        ranks = sorted((source, target))
        first, second = (ranks.index(source), ranks.index(target))
        profiled = f"send {first}->{second}" if name == "send" else f"recv {second}<-{first}"
        return f"{_uid(entry.members.number)} {source}->{target} tag {call.tag}", ranks, profiled


def _groups(entries: Sequence[Operation]) -> list[tuple[int, recorder.Group]]:
    held = {entry.members.number for entry in entries}
    return [(number, each) for number, each in recorder.groups.items() if each.link is not None or number in held]


def _uid(number: int) -> str:
    """Return a name equal on all ranks; torch counts each process's groups."""
    group = recorder.groups[number]
    return f"{group.name}.{number & 0xFFFFFFFF}"


def _config(group: recorder.Group) -> dict[str, str]:
    return {"name": group.name, "desc": group.description, "ranks": str(list(group.ranks))}


def _status(entries: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return each group's last collectives, as torch does; -1: none."""
    status: dict[str, dict[str, int]] = {}
    for entry in entries:
        if not entry["is_p2p"]:
            none = {f"last_{state}_collective": -1 for state in ("enqueued", "started", "completed")}
            found = status.setdefault(entry["process_group"][0], none)
            reached = {"scheduled": ("enqueued",), "started": ("enqueued", "started")}
            for state in reached.get(entry["state"], ("enqueued", "started", "completed")):
                found[f"last_{state}_collective"] = entry["collective_seq_id"]
    return status


def _sizes(call: Call, name: str, shape: tuple[int, ...] | None) -> list[list[int]]:
    known = shape is not None and name not in _UNEQUAL
    if known and call.record is not None and call.name == "all_gather" and call.record.kind >> 17 & 0x7FFF:
        known = False  # the ranks' shapes differ
    return [list(shape)] if known and shape is not None else [[0]]


def _text(call: Call, number: int) -> str:
    if call.record is not None:
        return str(call.record.text(number))
    kind = "" if call.dtype is None else f" of {call.dtype} {call.input_shape}"
    if call.peers is None or call.tag is None:
        return f"{call.name}{kind}"
    who = f"rank {call.peers[0]}" if len(call.peers) == 1 else "any rank"
    return f"{call.name}{kind} {'to' if 'send' in call.name else 'from'} {who} with tag {call.tag}"
