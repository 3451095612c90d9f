import json

import pytest
from harness.launcher import PROGRAMS, job

from mpiddp.bench.cli import OPERATIONS


def bench(program: str, *commands: str):
    """Run commands one after the other in one job."""
    program += f"\nfrom mpiddp.cli import main\nfor words in {commands}: assert main(['bench', *words.split()]) == 0"
    done = job(program, ranks=2, search=[PROGRAMS.parent], limit_s=180)
    assert done.rc == 0, done
    return done


def test_beside_torch(tmp_path):
    pytest.importorskip("torch")
    compared, trained = tmp_path / "compare.json", tmp_path / "ddp.json"
    done = bench(
        "from harness import without_dynamo",
        f"compare -b 8 -e 512 --rounds 1 -n 2 --json {compared}",
        f"ddp --batch 2 --rounds 1 -n 1 --json {trained}",
    )
    names = dict.fromkeys(row["name"] for row in json.loads(compared.read_text())["rows"])
    assert [*names] == ["mpiddp", "mpiddp symmetric", "mpi4py", "memcpy", "gloo", "torch"]
    head = next(line for line in done.stdout.splitlines() if line.split()[:1] == ["size"])
    assert "gloo/mpiddp" in head and "gloo/torch" in head, done
    assert "# Wrong values: 0 OK" in done.stdout, done
    ways = ("alone", "ddp", "torch", "torch-alone", "on-mpiddp", "in-ours")
    rows = json.loads(trained.read_text())["rows"]
    assert len(rows) == 3 and all(row[way] > 0 for row in rows for way in ways), rows


def test_compare_without_torch():
    done = bench("import sys\nsys.modules['torch'] = None", "compare all -b 8 -e 8 --rounds 1 -n 2")
    assert "torch is left out" in done.stdout, done
    assert "mpi4py/symmetric" in done.stdout, done
    last = done.stdout.splitlines()[-1].split()
    assert last[:5] == ["#", "Slower", "than", "MPI", "in"], done
    assert 0 <= int(last[5]) <= int(last[7]) == len(OPERATIONS), done
