"""Training runs are read from their folders, compared and drawn."""

from __future__ import annotations

import json

import pytest

from mpiddp.bench import plot
from mpiddp.cli import main
from mpiddp.training.config import UsageError


def folder(path, ranks=2, losses=(2.0, 1.0), speed=100.0, **config):
    path.mkdir(parents=True)
    config = {"model": "net", "data": "digits", "batch_size": 64, **config}
    (path / "config.json").write_text(json.dumps(config))
    (path / "run.json").write_text(json.dumps({"ranks": [{"rank": rank} for rank in range(ranks)]}))
    epochs = [
        {"epoch": n, "loss": loss, "accuracy": None if n == 1 else 0.9, "samples_per_s": speed, "comm_exposed": 0.25}
        for n, loss in enumerate(losses, 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in epochs))
    return path


def test_a_run_is_what_its_files_say(tmp_path):
    path = folder(tmp_path / "a", ranks=3, losses=(2.0, None, 1.5))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "lo')  # killed while writing
    (run,) = plot.read_runs([path])
    assert (run.name, run.ranks, len(run.epochs)) == ("a", 3, 3)
    assert run.curve("loss") == {1: 2.0, 3: 1.5}
    assert run.curve("accuracy") == {2: 0.9, 3: 0.9}
    assert run.curve("unknown") == {}


def test_names_are_as_long_as_it_takes(tmp_path):
    paths = [folder(tmp_path / "x" / "a"), folder(tmp_path / "y" / "a"), folder(tmp_path / "b")]
    assert [run.name for run in plot.read_runs(paths[:2])] == ["x/a", "y/a"]
    assert [run.name for run in plot.read_runs(paths[1:])] == ["a", "b"]
    assert [run.name for run in plot.read_runs([paths[0], paths[0]])] == ["a", "a"]


def test_scaling_compares_the_same_work_only(tmp_path):
    speeds = {"1": (1, 100.0, 64), "2": (2, 180.0, 64), "2 again": (2, 200.0, 64), "other": (4, 1.0, 32)}
    paths = [
        folder(tmp_path / name, ranks, speed=speed, batch_size=batch) for name, (ranks, speed, batch) in speeds.items()
    ]
    assert plot.scaling_of_runs(plot.read_runs(paths)) == {
        "model net, data digits, batch_size 64": {1: 100.0, 2: 190.0}
    }
    assert plot.scaling_of_runs(plot.read_runs(paths[1:])) == {}


def test_table_and_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    paths = [folder(tmp_path / f"on{ranks}", ranks, speed=90.0 * ranks) for ranks in (4, 1)]
    picture = tmp_path / "new" / "p.svg"
    assert main(["plot", *map(str, paths), "-o", str(picture)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[:3] == ["run", "ranks", "epochs"]
    assert said[1].split() == ["on4", "4", "2", "1.0000", "0.9000", "(2)", "360"]
    assert said[2].split() == ["on1", "1", "2", "1.0000", "0.9000", "(2)", "90"]
    drawn = picture.read_text()
    for text in (
        "on4 (4 ranks)",
        "on1 (1 rank)",
        "Accuracy on test data (%)",
        "Efficiency (%)",
        "Training samples a second",
    ):
        assert f"<!-- {text}" in drawn, text
    assert main(["plot", str(paths[0]), "-o", str(picture)]) == 0
    assert "Efficiency" not in picture.read_text(), "one number of ranks does not scale"


def test_errors_name_the_folder_and_the_cure(tmp_path, capsys):
    good, damaged = folder(tmp_path / "good"), folder(tmp_path / "damaged")
    folder(tmp_path / "young", losses=())
    (damaged / "run.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name, said in (("empty", "no folder of `train --output`"), ("young", "no epoch"), ("damaged", "damaged")):
        with pytest.raises(UsageError, match=said):
            plot.read_runs([good, tmp_path / name])
        assert main(["plot", str(tmp_path / name)]) == 2
        assert name in capsys.readouterr().err
    assert main(["plot", str(good), str(good / "run.json")]) == 2
    assert "no folder of `train --output`" in capsys.readouterr().err
