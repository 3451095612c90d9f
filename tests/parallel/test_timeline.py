import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.learning import batch, mlp, step_of
from harness.world import World

import mpiddp as dist
from mpiddp import optim
from mpiddp.parallel import timeline as module
from mpiddp.parallel.timeline import Span, summary

pytestmark = pytest.mark.mpi


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "trace.json"


def test_one_trace_holds_every_lane_of_every_rank(world: World, path: Path) -> None:
    timeline = dist.Timeline(path)
    ddp = dist.DistributedDataParallel(mlp(), bucket_cap_mb=0.0001)
    ddp.timeline = timeline
    optimizer = optim.SGD(ddp.parameters(), lr=0.1)
    timeline.watch(optimizer)
    for _ in range(3):
        with timeline.span("data", "batch"):
            x, y = batch(world.rng, 3)
        optimizer.zero_grad()
        step_of(ddp, x, y)
        optimizer.step()
    buckets = len(ddp.bucket_sizes_bytes())
    text = timeline.write()
    assert (text == "") == (world.rank != 0)
    if world.rank:
        return
    trace = json.loads(path.read_text())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert min(e["ts"] for e in spans) == 0
    assert all(0 <= e["dur"] < 60e6 for e in spans)
    for rank in range(world.size):
        by: defaultdict[str, list[Any]] = defaultdict(list)
        for e in spans:
            by[names[e["pid"], e["tid"]]] += [e] if e["pid"] == rank else []
        assert [len(by[lane]) for lane in ("forward", "backward", "wait", "optimizer", "data")] == [3] * 5
        communicated = sum(len(found) for lane, found in by.items() if lane.startswith("bucket"))
        assert communicated >= 3 * buckets - 2  # the first step had its own plan
        for step in zip(*(by[lane] for lane in ("forward", "backward", "wait", "optimizer")), strict=True):
            assert [e["ts"] for e in step] == sorted(e["ts"] for e in step)
            _, backward, wait, _ = step
            assert wait["ts"] == pytest.approx(backward["ts"] + backward["dur"], abs=1e-2)
    assert len(trace["otherData"]["summary"].splitlines()) == world.size + 1


def test_a_full_disk_is_an_error_with_the_file(world: World) -> None:
    timeline = dist.Timeline(Path("/dev/full"))
    if world.rank:
        assert timeline.write() == ""
        return
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        timeline.write()


def test_another_clock_is_brought_in_line(world: World, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_ns = 3_600_000_000_000 * world.rank  # hours
    monkeypatch.setattr(module, "perf_counter_ns", lambda: time.perf_counter_ns() + ahead_ns)
    timeline = dist.Timeline(path)
    dist.barrier()
    with timeline.span("work"):
        dist.barrier()
        time.sleep(0.02)
        dist.barrier()
    timeline.write()
    if world.rank == 0:
        spans = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
        ends = [e["ts"] + e["dur"] for e in spans]
        assert max(e["ts"] for e in spans) < min(ends)  # all were in the block at the same time
        assert max(ends) < 50e6


def test_the_environment_asks_for_a_trace_of_the_whole_program(
    world: World, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPIDDP_TIMELINE", str(path))
    if world.size > 1:  # the trace goes on after calls that differ in another group
        group = dist.new_group()
        with pytest.raises(dist.MismatchError):
            dist.all_reduce(np.ones(300_000 + world.rank), group=group)
    one, two = dist.DistributedDataParallel(mlp()), dist.DistributedDataParallel(mlp())
    assert one.timeline is two.timeline is not None
    step_of(one, *batch(world.rng, 3))
    dist.destroy_process_group()
    dist.init_process_group()
    if world.rank == 0:
        assert len(json.loads(path.read_text())["traceEvents"]) > 3 * world.size
        assert "exposed ms" in capsys.readouterr().err
    monkeypatch.delenv("MPIDDP_TIMELINE")
    assert dist.DistributedDataParallel(mlp()).timeline is None


def spans_of(late_ms: int, exposed_ms: int, steps: int = 4) -> list[Span]:
    found = []
    for step in range(steps):
        at = step * 100_000_000
        ready = at + 50_000_000 + late_ms * 1_000_000
        found += [
            Span("forward", "forward", at, at + 20_000_000),
            Span("backward", "backward", at + 20_000_000, ready),
            Span("bucket 0", "", at + 30_000_000, at + 40_000_000),
            Span("bucket 2", "", at + 31_000_000, at + 32_000_000),  # inside of the one before
            Span("bucket 1", "", at + 35_000_000, ready + exposed_ms * 1_000_000),
            Span("wait", "wait", ready, ready + exposed_ms * 1_000_000),
        ]
    return found


def test_the_summary_finds_exposure_overlap_and_stragglers() -> None:
    table = [line.split() for line in summary([spans_of(0, 10), spans_of(10, 0)]).splitlines()]
    assert table[1] == ["0", "4", "20.000", "30.000", "30.000", "10.000", "67%", "0.000", "0"]
    assert table[2] == ["1", "4", "20.000", "40.000", "30.000", "0.000", "100%", "10.000", "4"]
    assert summary([[], []]).count("\n") == 2
