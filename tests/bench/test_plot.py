"""Files of results, and pictures of them and of training runs."""

import sys

import pytest

from mpiddp.bench import plot, results
from mpiddp.bench.results import Point
from mpiddp.cli import main
from mpiddp.training.config import UsageError

SIZES = [1 << power for power in range(3, 20, 2)]


def line(name: str, start_s: float, bytes_per_s: float, operation: str = "all_reduce") -> list[Point]:
    times = [(size, start_s + size / bytes_per_s) for size in SIZES]
    return [
        Point(
            name, operation, "float32", "sum", 4, size, size // 4, s, s / 2, s * 2, [s], 20, 1.5 * size / s, "native", 0
        )
        for size, s in times
    ]


QUICK_START, QUICK_FLOW = line("short", 1e-6, 1e9), line("long", 11e-6, 3e9)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "mpiddp-bench/2", "kind": "sweep", "rows": [{}]}', '{"format": "other"}', "\0"],
)
def test_another_file_is_a_usage_error(tmp_path, text):
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"file\.json"):
        plot.panels([file])


ROWS = {
    "ddp": [{"network": "net", "alone": 0.008, "ddp": 0.01, "exposed": 0.002, "torch": 0.012}],
    "train": [{"network": "net", "scaling": "weak", "ranks": 2, "batch": 64, "step_s": 1.0, "samples_per_s": 180.0}],
}


def file_of(path, *rows, kind="compare"):
    results.write(path, kind, {}, rows)
    return path


def test_panels_have_what_was_measured(tmp_path):
    broadcast = line("short", 2e-6, 1e9, "broadcast")
    found = plot.panels([file_of(tmp_path / "new/a.json", *QUICK_START, *QUICK_FLOW, *broadcast)])
    titles = [panel.title for panel in found]
    assert titles[0] == "Latency: all_reduce sum of float32, 4 ranks" and titles[2].startswith("Latency: broad")
    latency, bandwidth, _, _ = found.values()
    assert latency["short"][SIZES[0]] == pytest.approx(1e6 * (1e-6 + SIZES[0] / 1e9))
    assert bandwidth["long"][SIZES[-1]] == pytest.approx(1.5 * SIZES[-1] / (11e-6 + SIZES[-1] / 3e9) / 1e9)
    (steps,) = plot.panels([file_of(tmp_path / "c.json", *ROWS["ddp"], kind="ddp")]).values()
    assert steps["torch"] == pytest.approx({"net": 12})


def test_files_are_drawn_together(tmp_path):
    files = [file_of(tmp_path / f"{name}.json", *QUICK_START) for name in ("old", "new")]
    latency, _ = plot.panels(files).values()
    assert list(latency) == ["short (old)", "short (new)"]
    rows = [[row | {"ranks": ranks, "samples_per_s": 90.0 * ranks} for row in ROWS["train"]] for ranks in (4, 1)]
    files = [file_of(tmp_path / f"{i}.json", *each, kind="train") for i, each in enumerate(rows)]
    (speed,) = plot.panels(files).values()
    assert speed == {"net, weak": {4: 360.0, 1: 90.0}}


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    files = [file_of(tmp_path / "a.json", *QUICK_START, *QUICK_FLOW)]
    files += [file_of(tmp_path / f"{kind}.json", *rows, kind=kind) for kind, rows in ROWS.items()]
    picture = tmp_path / "new" / "picture.svg"
    assert main(["plot", *map(str, files), "-o", str(picture)]) == 0
    drawn = picture.read_text()  # the letters of an SVG are shapes; each text stands beside its own as a comment
    for text in ("long", "Bus bandwidth: all_reduce", "DDP: a training step", "net, weak"):
        assert f"<!-- {text}" in drawn, text


def test_errors_are_one_line(tmp_path, capsys, monkeypatch):
    file = file_of(tmp_path / "a.json", *QUICK_START)
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
