"""What MODULE:CALLABLE names, and what is said where there is none."""

from __future__ import annotations

import sys

import pytest

from mpiddp.training.callables import load_callable
from mpiddp.training.config import UsageError


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Work in a folder with a module in it that is not on the path."""
    (tmp_path / "mine_here.py").write_text("def make():\n    return 3\n\nnumber = 3\n")
    (tmp_path / "needy_here.py").write_text("import nowhere_else\n")
    (tmp_path / "broken_here.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])


def test_the_working_directory_is_searched(here):
    assert load_callable("--model", "mine_here:make")() == 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere:make", "--model nowhere:make: there is no module nowhere"),
        ("mine_here.inner:make", "there is no module mine_here.inner"),
        ("mine_here:maek", "'maek' is not in mine_here; did you mean make?"),
        ("mine_here:number", "'number' is no callable"),
    ],
)
def test_what_is_not_there_is_named(here, name, said):
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        load_callable("--model", name)


def test_errors_of_the_module_are_its_own(here):
    with pytest.raises(ModuleNotFoundError, match="nowhere_else"):
        load_callable("--model", "needy_here:make")
    with pytest.raises(ZeroDivisionError):
        load_callable("--model", "broken_here:make")
