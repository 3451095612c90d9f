"""Parts of a checkpoint that other ranks write: all of them, or no checkpoint."""

from __future__ import annotations

import json

import numpy as np
import pytest
from harness import launcher

from mpiddp.serialization import encode_arrays, temporary_name
from mpiddp.training import parts
from mpiddp.training.checkpoint import MANIFEST, Checkpoint, DamagedError, read_checkpoint
from mpiddp.training.parts import AwaitedParts, part_name, write_part
from mpiddp.training.store import CheckpointStore


def content(rank: int) -> bytes:
    return encode_arrays({"mine": np.full(rank + 1, rank)})


def checkpoint(step: int = 5) -> Checkpoint:
    return Checkpoint({"x": np.arange(3.0)}, {"step": step, "score": None})


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_checkpoint_has_its_name_when_all_parts_are_there(tmp_path, when):
    store, awaited = CheckpointStore(tmp_path / "c"), AwaitedParts([0, 2])
    pending = temporary_name(store.path(5))
    if when == "before":
        write_part(pending, 2, content(2))
    store.save(checkpoint(), awaited)
    if when == "after":
        write_part(pending, 2, content(2))
    assert store.steps() == []
    write_part(pending, 0, content(0))
    awaited.tell(None)
    store.finish()
    assert store.steps() == [5]
    read = read_checkpoint(store.path(5))
    assert {rank: part["mine"].tolist() for rank, part in read.parts.items()} == {0: [0], 2: [2, 2, 2]}
    assert sorted(path.name for path in store.path(5).iterdir()) == sorted(
        ["arrays.safetensors", "state.json", "manifest.json", part_name(0), part_name(2)]
    )


def test_a_part_that_cannot_be_written_is_no_checkpoint(tmp_path):
    store, awaited = CheckpointStore(tmp_path), AwaitedParts([1, 2])
    store.save(checkpoint(), awaited)
    write_part(temporary_name(store.path(5)), 1, content(1))
    awaited.tell("rank 2: No space left on device")
    with pytest.raises(OSError, match="rank 2: No space"):
        store.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_is_not_seen_names_the_cause(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_GRACE_S", 0.1)
    store, awaited = CheckpointStore(tmp_path / "here"), AwaitedParts([1])
    store.save(checkpoint(), awaited)
    write_part(temporary_name(tmp_path / "elsewhere" / "step-0000000005"), 1, content(1))
    awaited.tell(None)
    with pytest.raises(OSError, match=r"rank 1 has written .* file system that all nodes share"):
        store.finish()


def test_damaged_and_missing_parts_are_named(tmp_path):
    store, awaited = CheckpointStore(tmp_path), AwaitedParts([3])
    write_part(temporary_name(store.path(5)), 3, content(3))
    store.save(checkpoint(), awaited)
    store.finish()
    part = store.path(5) / part_name(3)
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=r"rank-00003\.safetensors has"):
        read_checkpoint(store.path(5))
    part.unlink()
    with pytest.raises(DamagedError, match=r"rank-00003\.safetensors cannot be read"):
        read_checkpoint(store.path(5))


def test_sweeping_leaves_what_this_run_is_writing(tmp_path):
    store = CheckpointStore(tmp_path)
    pending = temporary_name(store.path(9))
    write_part(pending, 1, content(1))  # of the next checkpoint, begun by a quick rank
    (tmp_path / ".step-0000000001.77-dead.tmp").mkdir()
    store.save(checkpoint())
    store.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == [pending.name, "step-0000000005"]


def test_format_1_is_read(tmp_path):
    checkpoint().write(tmp_path / "c")
    manifest = tmp_path / "c" / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 1}))
    assert read_checkpoint(tmp_path / "c").parts == {}


FORGETFUL = """
import sys
from pathlib import Path
from mpiddp.training import parts
from mpiddp.training.checkpoint import Checkpoint
from mpiddp.training.store import CheckpointStore
parts._LIMIT_S = 0.2
CheckpointStore(Path(sys.argv[1])).save(Checkpoint({}, {"step": 1}), parts.AwaitedParts([1]))
raise ValueError("boom")
"""


def test_a_program_that_fails_is_not_kept_by_a_part_that_does_not_come(tmp_path):
    done = launcher.python(FORGETFUL, str(tmp_path), timeout_s=60)
    assert done.rc == 1 and "ValueError: boom" in done.stderr, done
    assert list(tmp_path.iterdir()) == []
