"""The command ``python -m mpiddp flight``: it finds the call at which a job's ranks part, from their dumps.

The ranks of each group are compared up to the first call that they do not share. The module imports the standard
library only, so that dumps can be read without MPI.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import picture
from .picture import Cell, Hosts, counted, ranges

Call = dict[str, Any]
"""A line of a dump after the first one; its keys are those that `dumps` writes."""


class Dump(NamedTuple):
    job: str
    rank: int
    host: str
    pid: int
    reason: str
    time: float
    groups: dict[str, dict[str, Any]]
    """The description and the ranks of each group, by the group's name."""
    calls: list[Call]

    def collectives(self, group: str) -> dict[int, Call]:
        return {each["number"]: each for each in self.calls if each["group"] == group and each["compared"] is not None}

    def messages(self) -> list[Call]:
        return [each for each in self.calls if each["compared"] is None]


def read(path: Path) -> Dump:
    """Return a dump; ValueError if the file is no dump, or damaged."""
    try:
        head, *calls = (json.loads(line) for line in path.read_text().splitlines())
        found = Dump(**head, calls=calls)
        line_up([found])  # it raises if a part of the dump is missing
        for each in calls:
            _cell(each)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no dump of mpiddp's flight recorder: {type(error).__name__}: {error}") from error
    return found


def line_up(dumps: Sequence[Dump]) -> str:
    """Return a text that shows at which call the ranks of one job part. Ranks that do the same share a line."""
    jobs = sorted({dump.job for dump in dumps})
    if len(jobs) > 1:
        raise ValueError(f"the dumps are of several jobs: {', '.join(jobs)}; give those of one")
    by_rank = {dump.rank: dump for dump in dumps}
    hosts = Hosts({each.rank: each.host for each in dumps}, {each.rank: each.pid for each in dumps})
    reasons = sorted({dump.reason for dump in dumps})
    lines = [f"job {jobs[0]}: dumps of {counted(len(by_rank))} ({ranges(by_rank)}), after {' and '.join(reasons[:3])}"]
    groups = {name: group for dump in dumps for name, group in dump.groups.items()}
    for name, group in sorted(groups.items()):
        lines += _group(name, group["description"], group["ranks"], by_rank, hosts)
    pending = {rank: [each for each in dump.messages() if not each["ended"]] for rank, dump in by_rank.items()}
    first = {rank: _cell(messages[0]) for rank, messages in pending.items() if messages}
    if first:
        count = sum(map(len, pending.values()))
        lines += [f"{count} messages have not ended; the first of each rank:", *picture.rows(hosts, first)]
    return "\n".join(lines)


def _group(name: str, description: str, ranks: Sequence[int], by_rank: Mapping[int, Dump], hosts: Hosts) -> list[str]:
    calls = {rank: by_rank[rank].collectives(name) for rank in ranks if rank in by_rank}
    title = f"group {name} ({description}) of {counted(len(ranks))}"
    absent = [rank for rank in ranks if rank not in by_rank]
    lines = [f"  no dump of {counted(len(absent))}: {ranges(absent)}"] if absent else []
    if not any(calls.values()):
        return []
    first, last = max(min(each) for each in calls.values() if each), max(max(each) for each in calls.values() if each)
    parted = next((number for number in range(first, last + 1) if _differ(calls, number)), None)
    number = last if parted is None else parted
    told = {rank: _told(by_rank[rank], each.get(number), number) for rank, each in calls.items()}
    if parted is not None:
        alike = f"all made the same calls from #{first} to #{number - 1}" if number > first else "no call is known"
        told = _told_apart(told, {rank: each[number]["compared"] for rank, each in calls.items() if number in each})
        return [f"{title}: {alike}, and part at #{number}", *picture.rows(hosts, told), *lines]
    if all(each[last]["ended"] for each in calls.values()):
        return [f"{title}: all made the same calls up to #{last}, and all have ended", *lines]
    head = f"{title}: all made the same calls up to #{last}, which has not ended on all"
    return [head, *picture.rows(hosts, told), *lines]


def _differ(calls: Mapping[int, Mapping[int, Call]], number: int) -> bool:
    found = [each.get(number) for each in calls.values()]
    return len({None if each is None else tuple(each["compared"]) for each in found}) > 1


def _told_apart(cells: Mapping[int, Cell], compared: Mapping[int, Sequence[int]]) -> dict[int, Cell]:
    """Add numbers to different calls that have the same text.

    Such calls differ in the sizes of a list or in rare dtypes, of which a dump has only hashes.
    """
    kinds: dict[str, list[Sequence[int]]] = {}
    for rank, call in compared.items():
        if call not in kinds.setdefault(cells[rank][1], []):
            kinds[cells[rank][1]].append(call)
    told = {}
    for rank, (at, text) in cells.items():
        alike = kinds.get(text, [])
        which = f" (list or dtype {alike.index(compared[rank]) + 1} of {len(alike)})" if len(alike) > 1 else ""
        told[rank] = at, text + which
    return told


def _told(dump: Dump, call: Call | None, number: int) -> Cell:
    if call is not None:
        return _cell(call)
    last = max(dump.calls, key=lambda each: float(each["began"]), default=None)
    if last is None:
        return "", f"never began #{number}; no call before it"
    at, text = _cell(last)
    return at, f"never began #{number}; last {text}"


def _cell(call: Call) -> Cell:
    state = "has ended" if call["ended"] else "waits for its turn" if call["queued"] else "has not ended"
    return f"{Path(call['file']).name}:{call['line']} in {call['function']}", f"{call['call']}, which {state}"
