"""The public API is the one in ``api.txt``."""

from __future__ import annotations

import difflib
import importlib.util

import api
import pytest
from harness import launcher

RENEW = "The public API has changed. If that is meant: python -m tests.api --write, and commit tests/api.txt with it.\n"


EXPECTED, OF_TORCH = api.FILE.read_text().split(api.OF_TORCH)


def dumped() -> str:
    """Return the dump of a fresh interpreter, which must not start MPI for it."""
    program = f"""
import sys
sys.path.append({str(api.FILE.parent)!r})
import api
print(api.dump(), end="")
assert not {{"mpi4py.MPI", "cupy", "torch"}} & set(sys.modules), "the dump starts MPI or a GPU"
"""
    done = launcher.job(program)
    assert done.rc == 0, done
    return done.stdout


def difference(found: str) -> str:
    lines = difflib.unified_diff(EXPECTED.splitlines(), found.splitlines(), "api.txt", "mpiddp", "", "", 0)
    return "\n".join(lines)


def test_public_api_is_the_one_of_the_file():
    found = difference(dumped())
    assert not found, RENEW + found


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_public_api_of_torch_is_the_one_of_the_file():
    program = f"import sys; sys.path.append({str(api.FILE.parent)!r}); import api; print(api.dump_of_torch(), end='')"
    done = launcher.job(program)
    assert done.rc == 0 and done.stdout == api.OF_TORCH + OF_TORCH, f"{RENEW}{done}"
