"""Checkpoints are whole or absent, damage is found and named, the last and the best are kept."""

import errno
import itertools
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from harness import launcher

from mpiddp import serialization
from mpiddp.serialization import encode_arrays
from mpiddp.training import checkpoint as checkpoint_module
from mpiddp.training.checkpoint import Checkpoint, CheckpointStore, DamagedError, read_checkpoint, sweep, write_shard

RNG = np.random.default_rng(0)


def checkpoint(step: int = 7, score: float | None = None, size: int = 5) -> Checkpoint:
    arrays = {
        "w": RNG.standard_normal((size, 3)).astype(np.float32),
        "t": np.arange(6.0).reshape(2, 3).T,  # not in C order
        "step": np.array(3.0, np.float32),
        "empty": np.empty((0, 4)),
        "n": np.array([1, 2], np.int64),
    }
    state = {"step": step, "score": score, "lr": 0.1 + 0.2, "random": [{"state": 2**127 + 1}], "none": None}
    return Checkpoint(state | {"model": arrays})


def save(store: CheckpointStore, *steps: int, scores: tuple[float | None, ...] = ()) -> None:
    for step, score in itertools.zip_longest(steps, scores):
        store.save(checkpoint(step, score))
    store.finish()


def test_everything_comes_back_to_the_bit(tmp_path):
    made = checkpoint()
    made.write(tmp_path / "c")
    read = read_checkpoint(tmp_path / "c")
    then, now = read.state.pop("model"), made.state.pop("model")
    assert read.state == made.state and set(then) == set(now)
    for name, x in now.items():
        assert then[name].dtype == x.dtype and then[name].shape == x.shape
        assert np.array_equal(then[name], x), name


def whole_with_a_shard(folder: Path) -> tuple[Path, Path]:
    """Write a checkpoint; return the file of its step and that of rank 1."""
    path = folder / "c.safetensors"
    shards = {1: write_shard(path, 1, {"mine": np.arange(20.0)})}
    checkpoint().write(path, shards)
    return path, path.with_name(shards[1][0])


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("damage", ["truncated", "missing", "empty", "longer", "no digest", "another's"])
def test_damage_is_found_and_named(tmp_path, which, damage):
    files = whole_with_a_shard(tmp_path)
    content = files[which].read_bytes()
    damaged = {"truncated": content[: len(content) // 2], "empty": b"", "longer": content + b"x"}
    damaged["no digest"] = encode_arrays({"mine": np.arange(20.0)}, {"mpiddp.state": '{"arrays": {}}'})
    name, _ = write_shard(tmp_path / "other.safetensors", 1, {"mine": np.arange(21.0)})
    damaged["another's"] = (tmp_path / name).read_bytes()
    if damage == "missing":
        files[which].unlink()
    else:
        files[which].write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=str(files[which])) as caught:
        read_checkpoint(files[0])
    assert caught.type is DamagedError or (damage == "another's" and "has format None" in str(caught.value))


@pytest.mark.parametrize("which", [0, 1])
def test_a_bit_that_has_flipped_anywhere_is_found(tmp_path, which):
    files = whole_with_a_shard(tmp_path)
    content = files[which].read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        files[which].write_bytes(flipped)
        try:
            read_checkpoint(files[0])
        except DamagedError:
            continue
        assert bytes(flipped[8:]).split(b"{")[0].strip() == b"", (position, flipped[position - 20 : position + 20])


def fill_disk(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Let the n-th write of a file fail, after half of the content."""
    numbers = itertools.count(1)

    def write(path: Path, content: bytes) -> None:
        if next(numbers) == nth:
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        really(path, content)

    really = serialization.write_synced
    monkeypatch.setattr(serialization, "write_synced", write)


@pytest.mark.parametrize("exists", [False, True])
def test_full_disk_leaves_the_old_or_nothing(tmp_path, monkeypatch, exists):
    old = checkpoint(step=1)
    if exists:
        old.write(tmp_path / "c")
    with monkeypatch.context() as patch:
        fill_disk(patch, 1)
        with pytest.raises(OSError, match="No space"):
            checkpoint(step=2).write(tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"] * exists
    if exists:
        assert read_checkpoint(tmp_path / "c").step == 1


def test_store_keeps_the_last_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path / "c", keep=2)
    save(store, 1, 2, 3, 4, 5, scores=(0.5, 0.9, None, 0.7, 0.8))
    assert store.steps() == [2, 4, 5]
    # Another process finds the best on the disk.
    store = CheckpointStore(tmp_path / "c", keep=1)
    save(store, 6, scores=(0.9,))
    assert store.steps() == [6], "of equals the newer is the best"


def test_newest_of_nothing(tmp_path, monkeypatch):
    assert CheckpointStore(tmp_path / "none").newest() == (None, [])
    (tmp_path / "step-x").mkdir()
    (tmp_path / ".step-0000000001.safetensors.1.tmp").touch()
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

    monkeypatch.setattr(serialization, "encode_arrays", encode_later)
    store, made = CheckpointStore(tmp_path), checkpoint(1)
    before = made.state["model"]["w"].copy()
    store.save(made)
    made.state["model"]["w"][...] = 0
    made.state["random"][0]["state"] = 1
    went_on.set()
    store.finish()
    found, _ = store.newest()
    assert np.array_equal(found.state["model"]["w"], before) and found.state["random"][0]["state"] == 2**127 + 1


KILLED = """
    import sys
    from pathlib import Path
    import numpy as np
    from mpiddp.training.checkpoint import Checkpoint
    x = np.empty(100_000)
    for step in range(1_000_000):
        x[...] = step
        Checkpoint({"x": x, "step": step}).write(Path(sys.argv[1]) / f"c{step}")
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
            assert (found.state["x"] == found.step).all() and entry.name == f"c{found.step}"
    assert half_written, "no writer was killed while it was writing: no test"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_ones_of_later_steps_are_no_reason_to_remove_whole_ones(tmp_path: Path, keep: int) -> None:
    save(CheckpointStore(tmp_path, keep=9), 10, 50, 60, 70)
    store = CheckpointStore(tmp_path, keep)
    for step in (50, 70):
        store.path(step).write_bytes(b"")
    content = store.path(60).read_bytes()
    store.path(60).write_bytes(content[:-8] + bytes(8))
    found, faults = store.newest()
    assert found is not None and found.step == 10 and len(faults) == 3
    assert all(str(store.path(step)) in fault for step, fault in zip((70, 60, 50), faults, strict=True))
    save(store, 20)
    assert store.steps() == [10, 20, 50, 60, 70][2 - keep :]
    store.save(checkpoint(65), {1: "no space"})
    with pytest.raises(OSError, match="no space"):
        store.finish()
    assert store.newest()[0].step == 20, "a save that fails removes no other step"
    save(store, 80, 90)
    assert store.steps() == [80, 90][2 - keep :]


def test_what_dead_writers_have_left_is_removed_before_the_first_save(tmp_path: Path) -> None:
    sweep(tmp_path / "none")
    store = CheckpointStore(tmp_path)
    save(store, 5, 6)
    (tmp_path / ".step-0000000007.safetensors.77-dead.tmp").touch()
    (tmp_path / ".step-0000000007.77-dead.tmp").mkdir()  # as of format 2
    sweep(tmp_path)
    assert names(tmp_path) == [
        ".step-0000000007.77-dead.tmp",
        "step-0000000005.safetensors",
        "step-0000000006.safetensors",
    ]


def test_one_of_another_format_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5)
    (tmp_path / "step-0000000006").mkdir()  # as of format 2
    with pytest.raises(ValueError, match=r"wrote .*step-0000000006; use the mpiddp that wrote it, or another"):
        store.newest()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "FORMAT", 4)
        save(store, 7)
    with pytest.raises(ValueError, match=r"step-0000000007\.safetensors has format 4, .*; use the mpiddp that"):
        store.newest()


def test_a_step_that_is_saved_again_is_whole_while_its_new_shards_are_written(tmp_path: Path) -> None:
    path, _ = whole_with_a_shard(tmp_path)
    write_shard(path, 1, {"mine": np.zeros(20)})
    assert read_checkpoint(path).shards[1]["mine"].tolist() == list(range(20))


def test_copies_of_the_user_are_not_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 5)
    for name in (own := ["step-0000000005-best.safetensors", "step-0000000005.safetensors.bak"]):
        (tmp_path / name).touch()
    (tmp_path / "step-0000000004").mkdir()  # as of format 2
    save(store, 6)
    assert names(tmp_path) == ["step-0000000004", *own, "step-0000000006.safetensors"]


def test_shards_leave_with_their_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for step in (5, 5, 6):
        store.save(checkpoint(step), {1: write_shard(store.path(step), 1, {"mine": RNG.random(3)})})
    store.finish()
    main, shard = sorted(names(tmp_path), key=len)
    assert main == "step-0000000006.safetensors" and shard.startswith("step-0000000006.rank-00001.")
    assert list(read_checkpoint(tmp_path / main).shards) == [1]


def test_a_shard_that_is_seen_late_is_waited_for(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    written = write_shard(store.path(5), 1, {"mine": np.ones(2, ">f4")})  # stored in native byte order
    shard = tmp_path / written[0]
    hidden = shard.rename(tmp_path / "hidden")
    monkeypatch.setattr(checkpoint_module.time, "sleep", lambda _: hidden.rename(shard))
    store.save(checkpoint(5), {1: written})
    store.finish()
    assert list(read_checkpoint(store.path(5)).shards) == [1]


def test_a_shard_that_is_not_seen_names_the_cause(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "_VISIBLE_S", 0.1)
    store, elsewhere = CheckpointStore(tmp_path / "here"), CheckpointStore(tmp_path / "elsewhere")
    store.save(checkpoint(5), {1: write_shard(elsewhere.path(5), 1, {"mine": np.ones(2)})})
    with pytest.raises(OSError, match=r"rank-00001\..* is written, .* file system that all nodes share"):
        store.finish()
    assert not store.folder.exists()
