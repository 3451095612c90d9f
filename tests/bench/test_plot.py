"""Files of results, and pictures of them and of training runs."""

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


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "mpiddp-bench/1", "series": [{}]}', '{"format": "other", "series": []}', "\0"],
)
def test_another_file_is_a_usage_error(tmp_path, text):
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"file\.json"):
        results.read(file)


ROWS = {
    "ddp": [{"network": "net", "alone": 0.008, "ddp": 0.01, "exposed": 0.002, "torch": 0.012}],
    "train": [{"network": "net", "scaling": "weak", "ranks": 2, "batch": 64, "step_s": 1.0, "samples_per_s": 180.0}],
}


def file_of(path, *series, kind="compare", **more):
    results.write(path, kind, {}, list(series), **more)
    return path


def test_panels_have_what_was_measured(tmp_path):
    broadcast = line("short", 2e-6, 1e9, "broadcast")
    latency, bandwidth, other, _ = plot.panels([file_of(tmp_path / "new/a.json", QUICK_START, QUICK_FLOW, broadcast)])
    assert latency.title == "Latency: all_reduce sum of float32, 4 ranks" and other.title.startswith("Latency: broad")
    assert latency.lines["short"][SIZES[0]] == pytest.approx(1e6 * (1e-6 + SIZES[0] / 1e9))
    assert bandwidth.lines["long"][SIZES[-1]] == pytest.approx(1.5 * SIZES[-1] / (11e-6 + SIZES[-1] / 3e9) / 1e9)
    (steps,) = plot.panels([file_of(tmp_path / "c.json", kind="ddp", rows=ROWS["ddp"])])
    assert steps.lines["torch"] == pytest.approx({"net": 12})


def test_files_are_drawn_together(tmp_path):
    files = [file_of(tmp_path / f"{name}.json", QUICK_START) for name in ("old", "new")]
    latency, _ = plot.panels(files)
    assert list(latency.lines) == ["short (old)", "short (new)"]
    rows = [[row | {"ranks": ranks, "samples_per_s": 90.0 * ranks} for row in ROWS["train"]] for ranks in (4, 1)]
    files = [file_of(tmp_path / f"{i}.json", kind="train", rows=each) for i, each in enumerate(rows)]
    (speed,) = plot.panels(files)
    assert speed.lines == {"net, weak": {4: 360.0, 1: 90.0}}


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    files = [file_of(tmp_path / "a.json", QUICK_START, QUICK_FLOW)]
    files += [file_of(tmp_path / f"{kind}.json", kind=kind, rows=rows) for kind, rows in ROWS.items()]
    picture = tmp_path / "new" / "picture.svg"
    assert main(["plot", *map(str, files), "-o", str(picture)]) == 0
    drawn = picture.read_text()  # the letters of an SVG are shapes; each text stands beside its own as a comment
    for text in ("long", "Bus bandwidth: all_reduce", "DDP: a training step", "net, weak"):
        assert f"<!-- {text}" in drawn, text


def test_errors_are_one_line(tmp_path, capsys, monkeypatch):
    file = file_of(tmp_path / "a.json", QUICK_START)
    for arguments, said in (
        ([str(file), "-o", "x.jpeg"], ".png or .svg"),
        ([str(tmp_path / "none.json")], "No such file"),
        ([str(file_of(tmp_path / "none of it.json"))], "nothing to draw"),
    ):
        assert main(["plot", *arguments]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", str(file)]) == 2
    assert "pip install 'mpiddp[plot]'" in capsys.readouterr().err
