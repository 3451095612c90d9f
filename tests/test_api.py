"""The public API is the one in ``api.txt``."""

import difflib
import importlib.util

import api
import pytest
from harness import launcher

RENEW = "The public API has changed. If that is meant: python -m tests.api --write, and commit tests/api.txt with it.\n"
WITHOUT_TORCH, OF_TORCH = api.FILE.read_text().split(api.OF_TORCH)
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.mark.parametrize(
    ("call", "expected", "unwanted"),
    [
        ("dump_without_torch()", WITHOUT_TORCH, {"mpi4py.MPI", "cupy", "torch"}),
        pytest.param("dump('mpiddp.torch')", api.OF_TORCH + OF_TORCH, set(), marks=needs_torch),
    ],
    ids=["without torch", "of torch"],
)
def test_public_api_is_the_one_of_the_file(call, expected, unwanted):
    """Dumped by a fresh interpreter, which must not start MPI for it."""
    program = f"""
import sys
sys.path.append({str(api.FILE.parent)!r})
import api
print(api.{call}, end="")
assert not {unwanted} & set(sys.modules), "the dump starts MPI or a GPU"
"""
    done = launcher.job(program)
    assert done.rc == 0, done
    lines = difflib.unified_diff(expected.splitlines(), done.stdout.splitlines(), "api.txt", "mpiddp", "", "", 0)
    difference = "\n".join(lines)
    assert not difference, RENEW + difference
