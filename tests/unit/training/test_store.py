"""What a store does beside whole checkpoints: damaged ones, what is left of others, parts that come too late."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpiddp.serialization import temporary_name
from mpiddp.training.checkpoint import ARRAYS, MANIFEST, Checkpoint, NewerFormatError
from mpiddp.training.parts import AwaitedParts, write_part
from mpiddp.training.store import CheckpointStore


def checkpoint(step: int, score: float | None = None) -> Checkpoint:
    return Checkpoint({"x": np.arange(3.0)}, {"step": step, "score": score})


def save(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(checkpoint(step))
    store.finish()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_ones_of_later_steps_are_no_reason_to_remove_whole_ones(tmp_path: Path, keep: int) -> None:
    save(CheckpointStore(tmp_path, keep=9), 10, 50, 60, 70)
    for step in (50, 60, 70):
        (CheckpointStore(tmp_path).path(step) / ARRAYS).write_bytes(b"")
    store = CheckpointStore(tmp_path, keep)
    found, faults = store.newest()
    assert found is not None and found.step == 10 and len(faults) == 3
    save(store, 20)
    assert store.steps() == [10, 20, 50, 60, 70][2 - keep :]
    save(store, 80, 90)
    assert store.steps() == [80, 90][2 - keep :]


def test_the_scores_of_removed_ones_are_forgotten(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 30):
        store.save(checkpoint(step, score=1 / step))
    store.finish()
    assert store.steps() == [1, 28, 29]
    assert len(store._scores) <= 4


def test_a_part_that_comes_when_the_writer_has_given_up_does_not_stay(tmp_path: Path) -> None:
    store, awaited = CheckpointStore(tmp_path), AwaitedParts([1, 2])
    store.save(checkpoint(5), awaited)
    awaited.tell("rank 2: No space left on device")
    writing = store._writing
    assert writing is not None and writing.exception(10) is not None
    write_part(temporary_name(store.path(5)), 1, b"late")
    with pytest.raises(OSError, match="rank 2: No space"):
        store.finish()
    assert names(tmp_path) == []


def test_what_dead_writers_have_left_is_mended_before_the_first_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c")
    store.tidy()
    save(store, 5, 6)
    store.path(5).rename(tmp_path / "c" / ".step-0000000005.77-dead.old")
    (tmp_path / "c" / ".step-0000000007.77-dead.tmp").mkdir()
    store.tidy()
    assert names(tmp_path / "c") == ["step-0000000005", "step-0000000006"]


def test_one_of_a_newer_format_is_not_passed_over(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5, 6)
    manifest = store.path(6) / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 3}))
    with pytest.raises(NewerFormatError, match=r"step-0000000006 has format 3, .*; use the mpiddp that wrote it"):
        store.newest()
