from __future__ import annotations

import json

import pytest
from harness.launcher import job

from mpiddp.bench.cli import OPERATIONS

pytestmark = pytest.mark.once


def bench(*args: object):
    return job("-m", "mpiddp", "bench", *args, ranks=2, limit_s=180)


def test_table_has_the_columns_of_nccl_tests():
    done = bench("all_gather", "-b", "64", "-e", "256", "-f", "4", "-n", "3", "--dtype", "float64")
    assert done.rc == 0, done
    lines = done.stdout.splitlines()
    assert lines[0].startswith("# 2 ranks on 1 node"), done
    assert "# arrays are written anew before each call; times of the slowest rank" in lines, done
    head = next(line for line in lines if "busbw" in line)
    assert head.split() == (
        ["#", "size", "count", "type", "redop", "root", "time", "min", "max", "algbw", "busbw", "#wrong", "algorithm"]
    )
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [row[:5] for row in rows] == [["64", "4", "float64", "none", "-1"], ["256", "16", "float64", "none", "-1"]]
    assert all(row[10:] == ["0", "one_shot"] for row in rows)
    assert "# Avg bus bandwidth" in lines[-1], done


def test_symmetric_arrays_and_a_chosen_algorithm():
    done = bench("all_reduce", "-b", "1K", "-e", "1K", "-n", "2", "--symmetric", "--algorithm", "two_shot")
    assert done.rc == 0, done
    assert done.stdout.splitlines()[-3].split()[-2:] == ["0", "two_shot"], done


def test_compare_with_torch(tmp_path):
    pytest.importorskip("torch")
    file = tmp_path / "compare.json"
    done = bench("compare", "-b", "8", "-e", "512", "--rounds", "1", "-n", "2", "--json", file)
    assert done.rc == 0, done
    names = [series["name"] for series in json.loads(file.read_text())["series"]]
    assert names == ["mpiddp", "mpiddp symmetric", "mpi4py", "memcpy", "gloo", "torch"]
    head = next(line for line in done.stdout.splitlines() if line.split()[:1] == ["size"])
    assert "gloo/mpiddp" in head and "gloo/torch" in head, done
    assert "# Wrong values: 0 OK" in done.stdout, done


def test_steps_of_torch_beside_ours(tmp_path):
    pytest.importorskip("torch")
    file = tmp_path / "ddp.json"
    done = bench("ddp", "--batch", "2", "--rounds", "1", "-n", "1", "--json", file)
    assert done.rc == 0, done
    ways = ("alone", "ddp", "torch", "torch-alone", "on-mpiddp", "in-ours")
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 3 and all(row[way] > 0 for row in rows for way in ways), rows


def test_compare_without_torch():
    blocked = "import sys\nsys.modules['torch'] = None\nfrom mpiddp.cli import main\nsys.exit(main(sys.argv[1:]))"
    options = ("bench", "compare", "all", "-b", "8", "-e", "8", "--rounds", "1", "-n", "2")
    done = job("-c", blocked, *options, ranks=2, limit_s=120)
    assert done.rc == 0, done
    assert "torch is left out" in done.stdout, done
    assert "mpi4py/symmetric" in done.stdout, done
    last = done.stdout.splitlines()[-1].split()
    assert last[:5] == ["#", "Slower", "than", "MPI", "in"], done
    assert 0 <= int(last[5]) <= int(last[7]) == len(OPERATIONS), done
