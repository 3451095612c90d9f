from __future__ import annotations

import json

import pytest
from harness.launcher import job

pytestmark = pytest.mark.once


@pytest.mark.long
def test_bench_train_measures_all_numbers_of_ranks_in_one_run_and_plot_draws_them(tmp_path):
    file, picture = tmp_path / "train.json", tmp_path / "scaling.svg"
    options = ["--strong-batch", "6", "--weak-batch", "2", "-n", "1", "--rounds", "2", "--json", str(file)]
    done = job("-m", "mpiddp", "bench", "train", *options, ranks=3, limit_s=120)
    assert done.rc == 0, done
    rows = json.loads(file.read_text())["rows"]
    assert len([line for line in done.stdout.splitlines() if not line.startswith("#")]) == len(rows) == 3 * 2 * 3, done
    assert {(row["scaling"], row["ranks"], row["batch"]) for row in rows} == {
        *(("strong", 1, 6), ("strong", 2, 3), ("strong", 3, 2)),
        *(("weak", ranks, 2) for ranks in (1, 2, 3)),
    }
    alone = {(row["network"], row["scaling"]): row["samples_per_s"] for row in rows if row["ranks"] == 1}
    for row in rows:
        assert row["samples_per_s"] == pytest.approx(row["batch"] * row["ranks"] / row["step_s"])
        expected = row["samples_per_s"] / (row["ranks"] * alone[row["network"], row["scaling"]])
        assert row["efficiency"] == pytest.approx(expected)
        assert 0 <= row["exposed"] <= 1 and (row["exposed"] < 0.2 or row["ranks"] > 1)
    pytest.importorskip("matplotlib")
    drawn = job("-m", "mpiddp", "plot", file, "-o", picture)
    assert drawn.rc == 0, drawn
    for text in ("mlp-wide, strong", "net, weak", "Efficiency (%)"):
        assert f"<!-- {text}" in picture.read_text(), text
