"""Files of results, crossovers, and pictures."""

from __future__ import annotations

import json
import sys

import pytest

from mpiddp.bench import plot, results
from mpiddp.bench.results import Point, Series
from mpiddp.cli import main
from mpiddp.training.config import UsageError

SIZES = [1 << power for power in range(3, 20, 2)]


def line(name: str, start_s: float, bytes_per_s: float, operation: str = "all_reduce") -> Series:
    points = [
        Point(size, size // 4, seconds := start_s + size / bytes_per_s, seconds / 2, seconds * 2, 20, "native", 0)
        for size in SIZES
    ]
    return Series(name, operation, "float32", "sum", 4, 1.5, points)


QUICK_START, QUICK_FLOW = line("short", 1e-6, 1e9), line("long", 11e-6, 3e9)
# 1 us + S / 1 GB/s = 11 us + S / 3 GB/s
MEETING = 10e-6 / (1 / 1e9 - 1 / 3e9)


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "new" / "file.json"
    results.write(file, "sweep", {"ranks": 4}, [QUICK_START, QUICK_FLOW], more=[1])
    document, series = results.read(file)
    assert (document["kind"], document["environment"], document["more"]) == ("sweep", {"ranks": 4}, [1])
    assert series == [QUICK_START, QUICK_FLOW]
    assert [each.name for each in file.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "mpiddp-bench/1", "series": [{}]}', '{"format": "other", "series": []}', "\0"],
)
def test_another_file_is_a_usage_error(tmp_path, text):
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"file\.json"):
        results.read(file)


def test_bandwidths():
    point = Point(1000, 250, 1e-6, 1e-6, 1e-6, 1)
    series = Series("x", "all_reduce", "float32", "sum", 4, 1.5, [point])
    assert series.algorithm_bandwidth(point) == pytest.approx(1e9)
    assert series.bus_bandwidth(point) == pytest.approx(1.5e9)


def test_crossover_is_where_lines_meet():
    (found,) = plot.crossovers([QUICK_START, QUICK_FLOW, line("memcpy", 0, 1e12)])
    assert (found.before, found.after) == ("short", "long")
    assert found.size_bytes == pytest.approx(MEETING, rel=0.1)


def test_chance_makes_no_crossover():
    assert plot.crossovers([line("a", 1e-6, 1e9), line("b", 1.02e-6, 1.03e9)]) == []
    assert plot.crossovers([QUICK_START]) == []


def write(path, *series):
    results.write(path, "compare", {}, list(series))
    return path


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_picture(tmp_path, capsys, suffix):
    pytest.importorskip("matplotlib")
    file = write(tmp_path / "a.json", QUICK_START, QUICK_FLOW, line("short", 2e-6, 1e9, "broadcast"))
    picture = tmp_path / f"picture.{suffix}"
    assert main(["plot", str(file), "-o", str(picture)]) == 0
    head = picture.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in picture.read_bytes()[:1000]
    assert "long overtakes short at" in capsys.readouterr().out
    if suffix == "svg":
        drawn = picture.read_text()
        for text in ("long", "Latency: all_reduce sum of float32, 4 ranks", "Bus bandwidth: broadcast"):
            assert f"<!-- {text}" in drawn, text


def train_file(path, ranks, samples_per_s):
    row = {"network": "net", "scaling": "weak", "ranks": ranks, "batch": 64, "step_s": 1.0}
    results.write(path, "train", {}, [], rows=[{**row, "samples_per_s": samples_per_s}])
    return str(path)


def test_scaling_of_training(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = [train_file(tmp_path / f"{ranks}.json", ranks, 90.0 * ranks) for ranks in (4, 1, 2)]
    speed, efficiency = plot.file_panels([tmp_path / f"{ranks}.json" for ranks in (4, 1, 2)])
    assert speed.lines == speed.dotted == {"net, weak": {1: 90.0, 2: 180.0, 4: 360.0}}
    assert efficiency.lines == {"net, weak": {1: 100.0, 2: 100.0, 4: 100.0}}
    picture = tmp_path / "picture.svg"
    assert main(["plot", *files, "-o", str(picture)]) == 0
    assert "<!-- net, weak" in picture.read_text()
    assert main(["plot", files[0], str(write(tmp_path / "other.json", QUICK_START))]) == 2
    assert "draw them apart" in capsys.readouterr().err


def test_series_of_one_name_get_their_files_names(tmp_path):
    files = [write(tmp_path / f"{name}.json", QUICK_START) for name in ("old", "new")]
    (drawn,) = plot.group_series(files).values()
    assert [each.name for each in drawn] == ["short (old)", "short (new)"]


def test_errors_are_one_line(tmp_path, capsys, monkeypatch):
    file = write(tmp_path / "a.json", QUICK_START)
    for arguments, said in (
        ([str(file), "-o", "x.jpeg"], ".png or .svg"),
        ([str(tmp_path / "none.json")], "No such file"),
        ([str(write(tmp_path / "empty.json"))], "nothing to draw"),
    ):
        assert main(["plot", *arguments]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", str(file)]) == 2
    assert "pip install 'mpiddp[plot]'" in capsys.readouterr().err


def test_file_is_plain_json(tmp_path):
    document = json.loads(write(tmp_path / "a.json", QUICK_START).read_text())
    assert document["series"][0]["points"][0]["size_bytes"] == 8


WAYS = ("compute", "comm", "blocking", "unpolled", "overlapped", "wait")
OVERLAP = [
    {"buckets": buckets, **dict.fromkeys(WAYS, 0.01), "wait": 0.01 / buckets, "overlap": 1 - 1 / buckets, "wrong": 0}
    for buckets in (1, 2, 4)
]
DDP = [{"network": "net", "alone": 0.008, "ddp": 0.01, "exposed": 0.002, "torch": 0.012}]
MODEL = [
    {"ranks": 2**n, "seconds": {"ring": 0.1, "hierarchical": n * 0.1}, "bucket_bytes": 2**20, "exposed_s": 0.1}
    for n in (1, 2)
]
ROWS = {"overlap": OVERLAP, "ddp": DDP, "model": MODEL}


def rows_file(path, kind):
    results.write(path, kind, {}, [], rows=ROWS[kind])
    return path


@pytest.mark.parametrize("kind", ROWS)
def test_picture_of_rows(tmp_path, capsys, kind):
    pytest.importorskip("matplotlib")
    files = [str(rows_file(tmp_path / f"{name}.json", kind)) for name in ("one", "two")]
    for chosen in (files[:1], files):
        assert main(["plot", *chosen, "-o", str(tmp_path / "rows.svg")]) == 0
    # The letters of an SVG are shapes; each text stands beside its own as a comment.
    assert "(two)" in (tmp_path / "rows.svg").read_text()


def test_panels_have_what_was_measured(tmp_path):
    shares, times = plot.file_panels([rows_file(tmp_path / "a.json", "overlap")])
    assert shares.lines == {"overlap": {1: 0.0, 2: 0.5, 4: 0.75}}
    assert times.lines["wait"] == pytest.approx({1: 10, 2: 5, 4: 2.5})
    steps, ratios = plot.file_panels([rows_file(tmp_path / "b.json", "ddp")])
    assert steps.lines["torch"] == pytest.approx({"net": 12})
    assert ratios.lines == {"ddp / alone": {"net": 1.25}, "torch / alone": {"net": 1.5}}
    predicted, buckets = plot.file_panels([rows_file(tmp_path / name, "model") for name in ("c.json", "d.json")])
    assert list(predicted.lines) == ["ring (c)", "hierarchical (c)", "ring (d)", "hierarchical (d)"]
    assert predicted.lines["hierarchical (d)"] == pytest.approx({2: 100, 4: 200})
    assert buckets.lines["bucket (c)"] == {2: 1, 4: 1}


def test_files_of_several_kinds_make_no_picture(tmp_path):
    both = [rows_file(tmp_path / "a.json", "overlap"), write(tmp_path / "b.json", QUICK_START)]
    with pytest.raises(UsageError, match="draw them apart"):
        plot.file_panels(both)
    results.write(tmp_path / "c.json", "model", {}, [], rows=[])
    with pytest.raises(UsageError, match="no rows"):
        plot.file_panels([tmp_path / "c.json"])
    latency, bandwidth = plot.file_panels([write(tmp_path / "d.json", QUICK_START)])
    assert latency.lines["short"][SIZES[0]] == pytest.approx(1e6 * (1e-6 + SIZES[0] / 1e9))
    assert bandwidth.lines["short"][SIZES[-1]] == pytest.approx(1.5 * SIZES[-1] / (1e-6 + SIZES[-1] / 1e9) / 1e9)
