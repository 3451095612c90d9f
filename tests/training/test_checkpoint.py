"""Checkpoints are whole or absent, damage is found and named, the last and the best are kept."""

import errno
import hashlib
import itertools
import json
import shutil
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import launcher

from mpiddp import serialization
from mpiddp.serialization import encode_arrays, temporary_name
from mpiddp.training import checkpoint as checkpoint_module
from mpiddp.training.checkpoint import (
    ARRAYS,
    MANIFEST,
    STATE,
    Checkpoint,
    CheckpointStore,
    DamagedError,
    read_checkpoint,
)

RNG = np.random.default_rng(0)


def checkpoint(step: int = 7, score: float | None = None, size: int = 5) -> Checkpoint:
    arrays = {
        "model.w": RNG.standard_normal((size, 3)).astype(np.float32),
        "model.t": np.arange(6.0).reshape(2, 3).T,  # not in C order
        "optimizer.0.step": np.array(3.0, np.float32),
        "model.empty": np.empty((0, 4)),
        "model.n": np.array([1, 2], np.int64),
    }
    state = {"step": step, "score": score, "lr": 0.1 + 0.2, "random": [{"state": 2**127 + 1}], "none": None}
    return Checkpoint(arrays, state)


def save(store: CheckpointStore, *steps: int, scores: tuple[float | None, ...] = ()) -> None:
    for step, score in itertools.zip_longest(steps, scores):
        store.save(checkpoint(step, score))
    store.finish()


def test_everything_comes_back_to_the_bit(tmp_path):
    made = checkpoint()
    made.write(tmp_path / "c")
    read = read_checkpoint(tmp_path / "c")
    assert read.state == made.state
    assert set(read.arrays) == set(made.arrays)
    for name, x in made.arrays.items():
        assert read.arrays[name].dtype == x.dtype and read.arrays[name].shape == x.shape
        assert np.array_equal(read.arrays[name], x), name


@pytest.mark.parametrize("name", [ARRAYS, STATE, MANIFEST])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "empty", "longer"])
def test_damage_is_found_and_named(tmp_path, name, damage):
    checkpoint().write(tmp_path / "c")
    file = tmp_path / "c" / name
    content = bytearray(file.read_bytes())
    flipped = content.copy()
    # In the manifest a bit of a digest, which JSON does not notice.
    flipped[content.index(b"sha256") + 12 if name == MANIFEST else len(content) // 2] ^= 1
    if damage == "missing":
        file.unlink()
    else:
        damaged = {
            "truncated": content[: len(content) // 2],
            "flipped": flipped,
            "empty": b"",
            "longer": content + b"x",
        }
        file.write_bytes(damaged[damage])
    with pytest.raises(DamagedError, match=str(tmp_path / "c")):
        read_checkpoint(tmp_path / "c")


def fill_disk(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Let the n-th write of a file fail, after half of the content."""
    numbers = itertools.count(1)

    def write(path: Path, content: bytes) -> None:
        if next(numbers) == nth:
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        serialization.write_synced(path, content)

    monkeypatch.setattr(checkpoint_module, "write_synced", write)


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("exists", [False, True])
def test_full_disk_leaves_the_old_or_nothing(tmp_path, monkeypatch, nth, exists):
    old = checkpoint(step=1)
    if exists:
        old.write(tmp_path / "c")
    with monkeypatch.context() as patch:
        fill_disk(patch, nth)
        with pytest.raises(OSError, match="No space"):
            checkpoint(step=2).write(tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"] * exists
    if exists:
        assert read_checkpoint(tmp_path / "c").state == old.state


def test_store_keeps_the_last_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path / "c", keep=2)
    save(store, 1, 2, 3, 4, 5, scores=(0.5, 0.9, None, 0.7, 0.8))
    assert store.steps() == [2, 4, 5]
    # Another process finds the best on the disk.
    store = CheckpointStore(tmp_path / "c", keep=1)
    save(store, 6, scores=(0.9,))
    assert store.steps() == [6], "of equals the newer is the best"


def test_a_writer_that_dies_while_it_replaces_loses_nothing(tmp_path, monkeypatch):
    """A step is saved twice when it ends an epoch: after the first move its name shows nothing for a moment."""
    store = CheckpointStore(tmp_path, keep=1)
    made = checkpoint(5)
    store.save(made)
    store.finish()
    rename = Path.rename

    def die_between_the_moves(self, target):
        rename(self, target)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die_between_the_moves)
        patch.setattr(checkpoint_module, "remove_folders", lambda folders: None)
        with pytest.raises(SystemExit):
            checkpoint(5).write(store.path(5))
    assert not store.path(5).exists()
    found, faults = CheckpointStore(tmp_path, keep=1).newest()
    assert found is not None and faults == []
    assert np.array_equal(found.arrays["model.w"], made.arrays["model.w"])


def test_newest_of_nothing(tmp_path, monkeypatch):
    assert CheckpointStore(tmp_path / "none").newest() == (None, [])
    (tmp_path / "step-x").mkdir()
    (tmp_path / ".step-0000000001.1.tmp").mkdir()
    assert CheckpointStore(tmp_path).newest() == (None, [])
    monkeypatch.setattr(Path, "iterdir", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a folder that cannot be read is no empty one: a run would begin anew
        CheckpointStore(tmp_path).newest()


def test_a_failed_write_is_told_by_the_next_save_and_only_once(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    with monkeypatch.context() as patch:
        fill_disk(patch, 1)
        store.save(checkpoint(1))
        with pytest.raises(OSError, match="No space"):
            store.finish()
    save(store, 2)
    assert store.steps() == [2]


def test_the_step_is_not_stalled_by_the_disk_and_does_not_change_what_is_written(tmp_path, monkeypatch):
    went_on = threading.Event()

    def encode_later(*args):
        assert went_on.wait(20)
        return encode_arrays(*args)

    monkeypatch.setattr(checkpoint_module, "encode_arrays", encode_later)
    store, made = CheckpointStore(tmp_path), checkpoint(1)
    before = made.arrays["model.w"].copy()
    store.save(made)
    made.arrays["model.w"][...] = 0
    made.state["random"][0]["state"] = 1
    went_on.set()
    store.finish()
    found, _ = store.newest()
    assert np.array_equal(found.arrays["model.w"], before) and found.state["random"][0]["state"] == 2**127 + 1


KILLED = """
    import sys
    from pathlib import Path
    import numpy as np
    from mpiddp.training.checkpoint import Checkpoint
    x = np.empty(100_000)
    for step in range(1_000_000):
        x[...] = step
        Checkpoint({"x": x}, {"step": step}).write(Path(sys.argv[1]) / f"c{step}")
        print("wrote", flush=True)
"""


def test_whole_or_absent_under_kill_9(tmp_path):
    script = tmp_path / "writer.py"
    script.write_text(textwrap.dedent(KILLED))
    half_written = 0
    for trial in range(40):
        if trial >= 4 and half_written:
            break
        folder = tmp_path / str(trial)
        folder.mkdir()
        with launcher.Program([sys.executable, script, folder]) as writer:
            writer.wait_for("wrote")
            time.sleep(0.05 * RNG.random())
            writer.signal(signal.SIGKILL)
            writer.wait(10)
        for entry in folder.iterdir():
            if entry.name.startswith("."):
                half_written += 1
                continue
            found = read_checkpoint(entry)
            assert (found.arrays["x"] == found.step).all() and entry.name == f"c{found.step}"
    assert half_written, "no writer was killed while it was writing: no test"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_ones_of_later_steps_are_no_reason_to_remove_whole_ones(tmp_path: Path, keep: int) -> None:
    save(CheckpointStore(tmp_path, keep=9), 10, 50, 60, 70)
    store = CheckpointStore(tmp_path, keep)
    for step in (50, 70):
        (store.path(step) / ARRAYS).write_bytes(b"")
    shutil.rmtree(store.path(60))
    store.path(60).mkdir()
    found, faults = store.newest()
    assert found is not None and found.step == 10 and len(faults) == 3
    assert all(str(store.path(step)) in fault for step, fault in zip((70, 60, 50), faults, strict=True))
    save(store, 20)
    assert store.steps() == [10, 20, 50, 60, 70][2 - keep :]
    save(store, 80, 90)
    assert store.steps() == [80, 90][2 - keep :]


def test_what_dead_writers_have_left_is_mended_before_the_first_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c")
    store.tidy()
    save(store, 5, 6)
    store.path(5).rename(tmp_path / "c" / ".step-0000000005.77-dead.old")
    (tmp_path / "c" / ".step-0000000007.77-dead.tmp").mkdir()
    (tmp_path / "c" / ".step-0000000007.77-dead.tmp" / "file").touch()
    store.tidy()
    assert names(tmp_path / "c") == ["step-0000000005", "step-0000000006"]
    (tmp_path / "c" / ".step-0000000001.99.tmp").mkdir()
    save(store, 7)
    assert names(tmp_path / "c") == ["step-0000000005", "step-0000000006", "step-0000000007"]


def test_one_of_a_newer_format_is_not_passed_over_and_an_older_one_is_read(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5, 6)
    manifest = store.path(6) / MANIFEST
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"format": 1}))
    assert store.newest()[0].step == 6
    manifest.write_text(json.dumps(content | {"format": 3}))
    with pytest.raises(ValueError, match=r"step-0000000006 has format 3, .*; use the mpiddp that wrote it"):
        store.newest()


def write_shard(store: CheckpointStore, step: int, rank: int) -> dict[str, Any]:
    """As another rank does, under the name that rank 0's process gives the folder; returns the manifest's entry."""
    pending, name = temporary_name(store.path(step)), f"rank-{rank:05d}.safetensors"
    content = encode_arrays({"mine": np.full(rank + 1, rank)})
    pending.mkdir(parents=True, exist_ok=True)
    (pending / name).write_bytes(content)
    return {name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}


def test_a_shard_that_is_seen_late_is_waited_for(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    entry = write_shard(store, 5, 1)
    (shard,) = temporary_name(store.path(5)).iterdir()
    hidden = shard.rename(tmp_path / "hidden")
    monkeypatch.setattr(checkpoint_module.time, "sleep", lambda _: hidden.rename(shard))
    store.save(checkpoint(5), entry)
    store.finish()
    assert list(read_checkpoint(store.path(5)).shards) == [1]


def test_a_shard_that_is_not_seen_names_the_cause(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "_VISIBLE_S", 0.1)
    store = CheckpointStore(tmp_path / "here")
    store.save(checkpoint(5), write_shard(CheckpointStore(tmp_path / "elsewhere"), 5, 1))
    with pytest.raises(OSError, match=r"rank-00001\.safetensors of .* is written.* file system that all nodes share"):
        store.finish()
    assert names(tmp_path / "here") == []
