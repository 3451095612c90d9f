"""Dumps lined up: made-up ones of a thousand ranks, in few lines, and files that are no dumps."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mpiddp import cli
from mpiddp.faults import flight
from mpiddp.faults.flight import Dump

WORLD = "0.1"


def entry(
    number: int,
    name: str = "all_reduce",
    line: int = 120,
    ended: bool = True,
    group: str = WORLD,
    call: Sequence[int] = (1, 4, -1),
    message: bool = False,
) -> dict[str, Any]:
    return {
        "group": group,
        "number": number,
        "call": f"{name} #{number}",
        "compared": None if message else list(call),
        "began": float(number),
        "ended": number + 0.5 if ended else None,
        "queued": False,
        "file": "/home/me/train.py",
        "line": line,
        "function": "step",
    }


def dump(
    rank: int,
    calls: list[dict[str, Any]],
    size: int = 1000,
    groups: dict[str, list[int]] | None = None,
    job: str = "n1.7",
) -> Dump:
    ranks = {WORLD: list(range(size)), **(groups or {})}
    described = {name: {"description": "made up", "ranks": found} for name, found in ranks.items()}
    return Dump(job, rank, f"n{rank // 500}", 100 + rank, "rank 0: timeout", 0.0, described, calls)


def written(path: Path, dump: Dump) -> Path:
    head = dump._asdict()
    path.write_text("".join(json.dumps(each) + "\n" for each in [head, *head.pop("calls")]))
    return path


def rows(text: str) -> list[tuple[str, str, str]]:
    """Return who, where and what of each row."""
    cut = [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.startswith("    r")]
    return [(each[0], each[1], each[2]) for each in cut]


def test_a_missing_rank_among_a_thousand() -> None:
    common, last = [entry(number) for number in range(4000, 4710)], entry(4710, ended=False, line=121)
    dumps = [dump(rank, common + [last] * (rank not in (17, 40, 41))) for rank in range(1000)]
    text = flight.line_up(dumps)
    assert text.splitlines()[:2] == [
        "job n1.7: dumps of 1000 ranks (0-999), after rank 0: timeout",
        "group 0.1 (made up) of 1000 ranks: all made the same calls from #4000 to #4709, and part at #4710",
    ]
    assert rows(text) == [
        (
            "ranks 17, 40-41 (node n0)",
            "train.py:120 in step",
            "never began #4710; last all_reduce #4709, which has ended",
        ),
        ("ranks 0-16, 18-39, 42-999 (2 nodes)", "train.py:121 in step", "all_reduce #4710, which has not ended"),
    ]


def test_the_first_call_that_differs_is_the_one() -> None:
    """Later ones differ, too: they stand after other calls."""

    def calls(rank: int) -> list[dict[str, Any]]:
        other = rank == 3
        return [
            entry(1),
            entry(2, "broadcast", 7, call=(2, 4, 0)) if other else entry(2),
            entry(3, line=120 + rank, ended=False),
        ]

    text = flight.line_up([dump(rank, calls(rank), 1000) for rank in range(1000)])
    assert "all made the same calls from #1 to #1, and part at #2" in text
    assert rows(text) == [
        ("rank 3 (node n0, pid 103)", "train.py:7 in step", "broadcast #2, which has ended"),
        ("ranks 0-2, 4-999 (2 nodes)", "train.py:120 in step", "all_reduce #2, which has ended"),
    ]
    assert len(text.splitlines()) == 4


def test_the_sizes_count_and_the_lines_do_not() -> None:
    alike = [dump(rank, [entry(1, line=rank)], 8) for rank in range(8)]
    assert "all made the same calls up to #1, and all have ended" in flight.line_up(alike)
    alike[5] = dump(5, [entry(1, "all_reduce of 5", call=(1, 5, -1))], 8)
    assert "no call is known, and part at #1\n    rank 5 (node n0, pid 105) " in flight.line_up(alike)


def test_rings_that_begin_at_different_calls() -> None:
    """A rank with more messages keeps fewer collectives: what it has forgotten is no difference."""
    dumps = [dump(0, [entry(number) for number in range(1, 9)], 2), dump(1, [entry(8)], 2)]
    assert "all made the same calls up to #8, and all have ended" in flight.line_up(dumps)


def test_many_lines_of_a_call_that_hangs_are_cut() -> None:
    dumps = [dump(rank, [entry(1, line=rank // 10, ended=False)]) for rank in range(1000)]
    text = flight.line_up(dumps).splitlines()
    assert "which has not ended on all" in text[1]
    found = [(f"ranks {10 * line}-{10 * line + 9} (node n0)", f"train.py:{line} in step") for line in range(5)]
    assert rows("\n".join(text)) == [(*each, "all_reduce #1, which has not ended") for each in found]
    assert text[-1] == "    and 950 ranks in 95 other states"


def test_ranks_without_a_dump_and_groups_of_some() -> None:
    groups = {"1.2": [0, 2]}
    inner = entry(5, "barrier", group="1.2", ended=False)
    dumps = [
        dump(0, [entry(1), inner], 4, groups=groups),
        dump(2, [entry(1)], 4, groups=groups),
        dump(3, [entry(1)], 4),
    ]
    text = flight.line_up(dumps)
    assert "group 0.1 (made up) of 4 ranks: all made the same calls up to #1, and all have ended" in text
    assert "  no dump of 1 rank: 1" in text
    assert "group 1.2 (made up) of 2 ranks: no call is known, and part at #5\n" in text
    assert rows(text) == [
        ("rank 0 (node n0, pid 100)", "train.py:120 in step", "barrier #5, which has not ended"),
        (
            "rank 2 (node n0, pid 102)",
            "train.py:120 in step",
            "never began #5; last all_reduce #1, which has ended",
        ),
    ]


def test_messages_that_have_not_ended() -> None:
    waits = entry(3, "recv", 9, False, message=True)
    text = flight.line_up([dump(rank, [entry(1), *([waits] if rank else [])]) for rank in range(1000)])
    assert "\n999 messages have not ended; the first of each rank:\n" in text
    assert rows(text) == [("ranks 1-999 (2 nodes)", "train.py:9 in step", "recv #3, which has not ended")]


def test_dumps_of_two_jobs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"several jobs: n1\.7, n2\.8; give those of one"):
        flight.line_up([dump(0, []), dump(1, [], job="n2.8")])


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"{", b"hello", b"[1]", b"\x80\x02}", b'{"job": "n1.7", "rank": 0}\n{}\n']
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank_0"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rank_0 is no dump of mpiddp's flight recorder"):
        flight.read(path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "rank_0", tmp_path / "rank_1"]
    written(paths[0], dump(0, [entry(1)], 2))
    written(paths[1], dump(1, [], 2))
    assert cli.main(["flight", *map(str, paths)]) == 0
    assert "part at #1\n    rank 0 (node n0, pid 100) " in capsys.readouterr().out
    assert cli.main(["flight", str(tmp_path / "none")]) == 2
    assert "none is no dump of mpiddp's flight recorder: FileNotFoundError" in capsys.readouterr().err


def test_the_command_leaves_out_damaged_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [written(tmp_path / f"rank_{rank}", dump(rank, [entry(1)], 3)) for rank in range(3)]
    paths[1].write_bytes(paths[1].read_bytes()[:-40])
    written(paths[2], dump(2, [{**entry(1), "file": None}], 3))
    assert cli.main(["flight", *map(str, paths)]) == 0
    found = capsys.readouterr()
    assert "dumps of 1 rank (0)" in found.out and "no dump of 2 ranks: 1-2" in found.out, found
    assert "left out: " in found.err and "rank_1 is no dump" in found.err and "rank_2 is no dump" in found.err, found


def test_calls_of_one_text_are_told_apart() -> None:
    """Of the sizes in a list a hash is recorded."""
    dumps = [dump(rank, [entry(1, "all_gather", call=(7 + (rank == 2), 4, -1))], 4) for rank in range(4)]
    text = flight.line_up(dumps)
    assert [(who, what) for who, _, what in rows(text)] == [
        ("rank 2 (node n0, pid 102)", "all_gather #1, which has ended (list or dtype 2 of 2)"),
        ("ranks 0-1, 3 (node n0)", "all_gather #1, which has ended (list or dtype 1 of 2)"),
    ], text
