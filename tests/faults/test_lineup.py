"""Dumps lined up: made-up ones of a thousand ranks, in few lines, and files that are no dumps."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mpiddp import cli
from mpiddp.faults import lineup

WORLD = "0.1"


def entry(
    number: int,
    name: str = "all_reduce",
    line: int = 120,
    state: str = "completed",
    uid: str = WORLD,
    call: Sequence[int] = (1, 4, -1),
    message: bool = False,
) -> dict[str, Any]:
    return {
        "process_group": (uid, "made up"),
        "collective_seq_id": 0 if message else number,
        "is_p2p": message,
        "state": state,
        "time_created_ns": number * 1000,
        "frames": [{"name": "step", "filename": "/home/me/train.py", "line": line}],
        "mpiddp": {"name": name, "text": f"{name} #{number}", "call": None if message else list(call)},
    }


def dump(
    rank: int,
    entries: list[dict[str, Any]],
    size: int = 1000,
    messages: Iterable[dict[str, Any]] = (),
    groups: dict[str, list[int]] | None = None,
    job: str = "n1.7",
) -> dict[str, Any]:
    ranks = {WORLD: list(range(size)), **(groups or {})}
    return {
        "version": "2.10",
        "entries": entries,
        "pg_config": {uid: {"desc": "made up", "ranks": str(found)} for uid, found in ranks.items()},
        "mpiddp": {"rank": rank, "job": job, "reason": "rank 0: timeout", "messages": list(messages)},
    }


def test_a_missing_rank_among_a_thousand() -> None:
    common, last = [entry(number) for number in range(4000, 4710)], entry(4710, state="started", line=121)
    dumps = [dump(rank, common + [last] * (rank not in (17, 40, 41))) for rank in range(1000)]
    text = lineup.line_up(dumps)
    assert text.splitlines() == [
        "job n1.7: dumps of 1000 ranks (0-999), after rank 0: timeout",
        "group 0.1 (made up) of 1000 ranks: all made the same calls from #4000 to #4709, and part at #4710",
        "  ranks 17, 40-41: never began #4710; last all_reduce #4709, which has ended, at train.py:120 in step",
        "  ranks 0-16, 18-39, 42-999: all_reduce #4710, has not ended, at train.py:121 in step",
    ]


def test_the_first_call_that_differs_is_the_one() -> None:
    """Later ones differ, too: they stand after other calls."""

    def calls(rank: int) -> list[dict[str, Any]]:
        other = rank == 3
        return [
            entry(1),
            entry(2, "broadcast", 7, call=(2, 4, 0)) if other else entry(2),
            entry(3, line=120 + rank, state="started"),
        ]

    text = lineup.line_up([dump(rank, calls(rank), 1000) for rank in range(1000)])
    assert (
        "all made the same calls from #1 to #1, and part at #2\n  rank 3: broadcast #2, has ended, at train.py:7"
        in text
    )
    assert "  ranks 0-2, 4-999: all_reduce #2, has ended, at train.py:120 in step" in text
    assert len(text.splitlines()) == 4


def test_the_sizes_count_and_the_lines_do_not() -> None:
    alike = [dump(rank, [entry(1, line=rank)], 8) for rank in range(8)]
    assert "all made the same calls up to #1, and all have ended" in lineup.line_up(alike)
    alike[5] = dump(5, [entry(1, "all_reduce of 5", call=(1, 5, -1))], 8)
    assert "no call is known, and part at #1\n  rank 5: " in lineup.line_up(alike)


def test_rings_that_begin_at_different_calls() -> None:
    """A rank with more messages keeps fewer collectives: what it has forgotten is no difference."""
    dumps = [dump(0, [entry(number) for number in range(1, 9)], 2), dump(1, [entry(8)], 2)]
    assert "all made the same calls up to #8, and all have ended" in lineup.line_up(dumps)


def test_many_lines_of_a_call_that_hangs_are_cut() -> None:
    dumps = [dump(rank, [entry(1, line=rank // 10, state="started")]) for rank in range(1000)]
    text = lineup.line_up(dumps).splitlines()
    assert "which has not ended on all" in text[1]
    places = "train.py:0 in step (0-9); train.py:1 in step (10-19); train.py:2 in step (20-29); and 97 other lines"
    assert text[2:] == [f"  ranks 0-999: all_reduce #1, has not ended, at {places}"]


def test_ranks_without_a_dump_and_groups_of_some() -> None:
    groups = {"1.2": [0, 2]}
    inner = entry(5, "barrier", uid="1.2", state="started")
    dumps = [
        dump(0, [entry(1), inner], 4, groups=groups),
        dump(2, [entry(1)], 4, groups=groups),
        dump(3, [entry(1)], 4),
    ]
    text = lineup.line_up(dumps)
    assert "group 0.1 (made up) of 4 ranks: all made the same calls up to #1, and all have ended" in text
    assert "  no dump of 1 rank: 1" in text
    assert "group 1.2 (made up) of 2 ranks: no call is known, and part at #5\n  rank 0: barrier #5" in text
    assert "  rank 2: never began #5; last all_reduce #1, which has ended, at train.py:120 in step" in text


def test_messages_that_have_not_ended() -> None:
    waits = entry(3, "recv", 9, "started", message=True)
    dumps = [dump(rank, [entry(1)], messages=[waits] if rank else []) for rank in range(1000)]
    text = lineup.line_up(dumps).splitlines()
    assert text[-2] == "999 messages have not ended; the first of each rank:"
    assert text[-1] == "  ranks 1-999: recv #3, has not ended, at train.py:9 in step"


def test_many_states_are_cut() -> None:
    text = lineup.line_up([dump(rank, [entry(1, call=(rank, 4, -1), name=f"op{rank}")]) for rank in range(1000)])
    assert len(text.splitlines()) == 8 and text.endswith("  and 995 ranks in 995 other states")


def test_dumps_of_two_jobs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"several jobs: n1\.7, n2\.8; give those of one"):
        lineup.line_up([dump(0, []), dump(1, [], job="n2.8")])


def test_a_file_that_would_run_something_does_not(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    path = tmp_path / "rank_0"
    path.write_bytes(pickle.dumps({"mpiddp": Evil()}))
    with pytest.raises(ValueError, match=r"is no dump of mpiddp's flight recorder: UnpicklingError.*no plain value"):
        lineup.read(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"{", b"hello", pickle.dumps([1]), pickle.dumps({"entries": []})])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank_0"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rank_0 is no dump of mpiddp's flight recorder"):
        lineup.read(path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "rank_0", tmp_path / "rank_1.json"]
    paths[0].write_bytes(pickle.dumps(dump(0, [entry(1)], 2)))
    paths[1].write_text(json.dumps(dump(1, [], 2)))
    assert cli.main(["flight", *map(str, paths)]) == 0
    assert "part at #1\n  rank 0: all_reduce #1" in capsys.readouterr().out
    assert cli.main(["flight", "--json", *map(str, paths)]) == 0
    assert json.loads(capsys.readouterr().out)["0"]["entries"][0]["collective_seq_id"] == 1
    assert cli.main(["flight", str(tmp_path / "none")]) == 2
    assert "none is no dump of mpiddp's flight recorder: FileNotFoundError" in capsys.readouterr().err


def test_the_command_leaves_out_damaged_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"rank_{rank}" for rank in range(3)]
    paths[0].write_bytes(pickle.dumps(dump(0, [entry(1)], 3)))
    paths[1].write_bytes(pickle.dumps(dump(1, [entry(1)], 3))[:-40])
    paths[2].write_bytes(pickle.dumps(dump(2, [{**entry(1), "process_group": None}], 3)))
    assert cli.main(["flight", *map(str, paths)]) == 0
    found = capsys.readouterr()
    assert "dumps of 1 rank (0)" in found.out and "no dump of 2 ranks: 1-2" in found.out, found
    assert "left out: " in found.err and "rank_1 is no dump" in found.err and "rank_2 is no dump" in found.err, found


def test_calls_of_one_text_are_told_apart() -> None:
    """Of the sizes in a list a hash is recorded."""
    dumps = [dump(rank, [entry(1, "all_gather", call=(7 + (rank == 2), 4, -1))], 4) for rank in range(4)]
    text = lineup.line_up(dumps)
    assert "  rank 2: all_gather #1 (list or dtype 2 of 2), has ended" in text, text
    assert "  ranks 0-1, 3: all_gather #1 (list or dtype 1 of 2), has ended" in text, text
