"""The table of measured algorithms: made from times, written, read."""

from __future__ import annotations

import json

import pytest

from mpiddp.algorithms import tuned
from mpiddp.bench import tune

INF = float("inf")


def times(native: float, two_shot: float, symmetric: float) -> dict[str, tuple[float, float]]:
    return {"native": (native, native), "two_shot": (two_shot, symmetric)}


def test_rows_change_halfway_between_sizes():
    measured = {1 << 10: times(1, 4, 4), 1 << 14: times(4, 4.1, 4.1), 1 << 18: times(64, 30, 10)}
    assert tune.best_rows(measured) == ((1 << 16, "native"), (INF, "two_shot"))


def test_both_kinds_of_arrays_count():
    assert tune.best_rows({1024: times(10, 19, 2)}) == ((INF, "two_shot"),)
    assert tune.best_rows({1024: times(10, 60, 2)}) == ((INF, "native"),)


def test_chance_changes_nothing():
    measured = {1 << power: times(1, 1 + 0.04 * (-1) ** power, 1 + 0.04 * (-1) ** power) for power in range(5, 12)}
    assert tune.best_rows(measured) == ((INF, "native"),)


def test_a_single_algorithm_is_a_single_row():
    assert tune.best_rows({8: {"native": (1, 1)}, 64: {"native": (2, 2)}}) == ((INF, "native"),)


@pytest.mark.parametrize(
    ("nodes", "expected"), [((0,), "1"), ((0, 1, 0, 1), "2+2"), ((3, 3, 3, 7), "1+3"), ((1, 0), "1+1")]
)
def test_shape(nodes, expected):
    assert tuned.shape(nodes) == expected


def test_what_is_written_is_read(tmp_path):
    tables = {"4": {"all_reduce": ((2048.0, "native"), (INF, "ring"))}, "2+2": {}}
    file = tmp_path / "deep" / "file.json"
    tuned.write(file, tables)
    assert tuned.read(file) == tables
    json.loads(file.read_text(), parse_constant=pytest.fail)
    assert [each.name for each in file.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "mpiddp-tuned/0"}', '{"format": "mpiddp-tuned/1", "shapes": {"2": [1]}}']
)
def test_a_damaged_file_says_what_to_do(tmp_path, text):
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="delete it, and run bench tune again"):
        tuned.read(file)


def test_no_file_is_no_table(tmp_path):
    assert tuned.read(tmp_path / "none.json") == {}


def test_path_has_no_odd_characters(monkeypatch, tmp_path):
    monkeypatch.setenv("MPIDDP_CACHE", str(tmp_path))
    found = tuned.path("Open MPI v5.0.11", "node/../17 x.example.org")
    assert found == tmp_path / "tuned-open-mpi-v5.0.11-node-..-17-x.example.org.json"
