"""The line-up of flight recorder dumps: each group's ranks up to the first call that they do not share.

Imports the standard library only: dumps are read without MPI.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

Dump = dict[str, Any]
Entry = dict[str, Any]
_MAX_RANGES = 6
_MAX_ROWS = 5
_MAX_PLACES = 3


class _Plain(pickle.Unpickler):
    """A file from elsewhere runs nothing."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no plain value")


def read(path: Path) -> dict[str, Any]:
    """Return a dump, from its pickle or from JSON; ValueError if the file is none."""
    try:
        with path.open("rb") as file:
            text = file.read(1) == b"{"
            file.seek(0)
            found: dict[str, Any] = json.load(file) if text else _Plain(file).load()
        line_up([found])  # it has all parts
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        AttributeError,
        IndexError,
        pickle.UnpicklingError,
    ) as error:
        raise ValueError(f"{path} is no dump of mpiddp's flight recorder: {type(error).__name__}: {error}") from error
    return found


def line_up(dumps: Sequence[Dump]) -> str:
    """Return where the ranks of one job part; ranks that do the same share a line."""
    jobs = sorted({dump["mpiddp"]["job"] for dump in dumps})
    if len(jobs) > 1:
        raise ValueError(f"the dumps are of several jobs: {', '.join(jobs)}; give those of one")
    by_rank = {dump["mpiddp"]["rank"]: dump for dump in dumps}
    reasons = sorted({dump["mpiddp"]["reason"] for dump in dumps})
    lines = [f"job {jobs[0]}: dumps of {counted(len(by_rank))} ({ranges(by_rank)}), after {' and '.join(reasons[:3])}"]
    for uid, (description, ranks) in sorted(_groups(by_rank.values()).items()):
        lines += _group(uid, description, ranks, by_rank)
    return "\n".join([*lines, *_pending(by_rank)])


def _groups(dumps: Iterable[Dump]) -> dict[str, tuple[str, list[int]]]:
    used = {entry["process_group"][0] for dump in dumps for entry in dump["entries"] if not entry["is_p2p"]}
    found = {}
    for dump in dumps:
        for uid, config in dump["pg_config"].items():
            if uid in used and uid not in found:
                found[uid] = config["desc"], json.loads(config["ranks"])
    return found


class _Row(NamedTuple):
    text: str
    at: str
    state: str


def _group(uid: str, description: str, ranks: Sequence[int], by_rank: dict[int, Dump]) -> list[str]:
    present = [rank for rank in ranks if rank in by_rank]
    calls = {rank: _calls(by_rank[rank], uid) for rank in present}
    absent = sorted(set(ranks) - set(present))
    title = f"group {uid} ({description}) of {counted(len(ranks))}"
    lines = [f"  no dump of {counted(len(absent))}: {ranges(absent)}"] if absent else []
    first = max((min(found) for found in calls.values() if found), default=0)
    last = max((max(found) for found in calls.values() if found), default=0)
    for number in range(first, last + 1):
        entries = {rank: found.get(number) for rank, found in calls.items()}
        if len({None if each is None else tuple(each["mpiddp"]["call"]) for each in entries.values()}) > 1:
            alike = f"all made the same calls from #{first} to #{number - 1}" if number > first else "no call is known"
            head = f"{title}: {alike}, and part at #{number}"
            rows = _told_apart({rank: _row(by_rank[rank], each, number) for rank, each in entries.items()}, entries)
            return [head, *_rows(rows), *lines]
    entries = {rank: found.get(last) for rank, found in calls.items()}
    if all(each is not None and each["state"] == "completed" for each in entries.values()):
        return [f"{title}: all made the same calls up to #{last}, and all have ended", *lines]
    head = f"{title}: all made the same calls up to #{last}, which has not ended on all"
    return [head, *_rows({rank: _row(by_rank[rank], each, last) for rank, each in entries.items()}), *lines]


def _told_apart(rows: dict[int, _Row], entries: dict[int, Entry | None]) -> dict[int, _Row]:
    """Tell calls of one text apart by a number: of sizes in lists and rare dtypes only hashes are known."""
    calls = {rank: tuple(each["mpiddp"]["call"]) for rank, each in entries.items() if each is not None}
    alike: dict[str, list[tuple[int, ...]]] = {}
    for rank, call in calls.items():
        if call not in alike.setdefault(rows[rank].text, []):
            alike[rows[rank].text].append(call)
    told = {}
    for rank, row in rows.items():
        found = alike.get(row.text, [])
        which = f" (list or dtype {found.index(calls[rank]) + 1} of {len(found)})" if len(found) > 1 else ""
        told[rank] = row._replace(text=row.text + which)
    return told


def _calls(dump: Dump, uid: str) -> dict[int, Entry]:
    return {
        entry["collective_seq_id"]: entry
        for entry in dump["entries"]
        if entry["process_group"][0] == uid and not entry["is_p2p"]
    }


def _row(dump: Dump, entry: Entry | None, number: int) -> _Row:
    if entry is not None:
        return _Row(entry["mpiddp"]["text"], _line(entry), _state(entry))
    last = max(
        (*dump["entries"], *dump["mpiddp"]["messages"]), key=lambda entry: entry["time_created_ns"], default=None
    )
    if last is None:
        return _Row(f"never began #{number}", "", "no call before it")
    state = "which has ended" if last["state"] == "completed" else _state(last)
    return _Row(f"never began #{number}; last {last['mpiddp']['text']}", _line(last), state)


def _line(entry: Entry) -> str:
    frame = entry["frames"][0]
    return f"{Path(frame['filename']).name}:{frame['line']} in {frame['name']}"


def _state(entry: Entry) -> str:
    return {"completed": "has ended", "started": "has not ended", "scheduled": "waits for its turn"}[entry["state"]]


def _rows(found: dict[int, _Row]) -> list[str]:
    """Return the lines, those of the fewest ranks first."""
    states: dict[tuple[str, str], dict[str, list[int]]] = {}
    for rank, row in found.items():
        states.setdefault((row.text, row.state), {}).setdefault(row.at, []).append(rank)
    rows = [(sorted(itertools.chain(*places.values())), *state, places) for state, places in states.items()]
    rows.sort(key=lambda row: (len(row[0]), row[0]))
    lines = [
        f"  {'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}: {text}, {state}{_at(places)}"
        for ranks, text, state, places in rows[:_MAX_ROWS]
    ]
    if len(rows) > _MAX_ROWS:
        rest = sum(len(ranks) for ranks, *_ in rows[_MAX_ROWS:])
        lines.append(f"  and {counted(rest)} in {len(rows) - _MAX_ROWS} other states")
    return lines


def _at(ranks_by_line: dict[str, list[int]]) -> str:
    if len(ranks_by_line) == 1:
        return "".join(f", at {at}" for at in ranks_by_line if at)
    return f", at {places(ranks_by_line)}"


def places(ranks_by_line: dict[str, list[int]]) -> str:
    """Return the program's lines, those of the fewest ranks first."""
    found = sorted(ranks_by_line.items(), key=lambda item: (len(item[1]), item[1]))
    named = [f"{at or 'an unknown line'} ({ranges(ranks)})" for at, ranks in found[:_MAX_PLACES]]
    rest = [f"and {len(found) - _MAX_PLACES} other lines"] if len(found) > _MAX_PLACES else []
    return "; ".join([*named, *rest])


def _pending(by_rank: dict[int, Dump]) -> list[str]:
    count, found = 0, {}
    for rank, dump in by_rank.items():
        pending = [entry for entry in dump["mpiddp"]["messages"] if entry["state"] != "completed"]
        count += len(pending)
        if pending:
            found[rank] = _row(dump, pending[0], 0)
    return [f"{count} messages have not ended; the first of each rank:", *_rows(found)] if found else []


def counted(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def ranges(ranks: Iterable[int]) -> str:
    """Return ranks as ranges, as in "0-16, 18, 40-511"; of many ranges, the first ones.

    Examples
    --------
    >>> ranges([3, 1, 2, 7])
    '1-3, 7'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    named = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs[:_MAX_RANGES]]
    more = sum(last - first + 1 for first, last in runs[_MAX_RANGES:])
    return ", ".join(named) + (f" and {more} more" if more else "")
