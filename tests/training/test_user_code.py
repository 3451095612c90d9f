"""MODULE:CALLABLE, and the errors without one."""

import sys

import pytest

from mpiddp.training.config import UsageError
from mpiddp.training.user_code import call

MODULE = """
def make():
    return 3

def take(size, *, train):
    return train

def fail():
    raise KeyError("no")

number = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Work in a folder with a module in it that is not on the path."""
    (tmp_path / "mine_here.py").write_text(MODULE)
    (tmp_path / "needy_here.py").write_text("import nowhere_else\n")
    (tmp_path / "broken_here.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "nowhere:make",
            "--model nowhere:make: ModuleNotFoundError: No module named 'nowhere'; give a module of this folder or",
        ),
        ("mine_here.inner:make", "No module named 'mine_here.inner'; 'mine_here' is not a package; give"),
        (
            "./mine_here:make",
            "invalid format: './mine_here:make'; give a module .*, as in `import`, without path and .py$",
        ),
        ("mine_here:maek", "module 'mine_here' has no attribute 'maek'; did you mean make?$"),
        ("mine_here:number", "TypeError: 'int' object is not callable$"),
        ("needy_here:make", r"No module named 'nowhere_else' \(.*needy_here\.py, line 1, in <module>\)$"),
        ("broken_here:make", r"ZeroDivisionError: division by zero \(.*broken_here\.py, line 1, in <module>\)$"),
    ],
)
def test_what_is_not_there_is_named(here, name, said):
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        call("--model", name, object)


def test_what_does_not_take_the_arguments_says_what_it_takes(here):
    assert call("--data", "mine_here:take", object, size=2, train=True)
    with pytest.raises(UsageError, match=r"--data mine_here:take: TypeError: take\(\) missing .* argument: 'size'"):
        call("--data", "mine_here:take", object, train=True)
    with pytest.raises(UsageError, match=r"make\(\) got an unexpected keyword argument 'train'"):
        call("--data", "mine_here:make", object, train=True)


def test_what_a_callable_raises_is_one_sentence_with_its_place(here):
    with pytest.raises(
        UsageError, match=r"^--model mine_here:fail: KeyError: 'no' \(.*mine_here\.py, line \d+, in fail\)$"
    ):
        call("--model", "mine_here:fail", object)
    with pytest.raises(UsageError, match=r"^--model builtins:min: TypeError: min expected at least 1 argument"):
        call("--model", "builtins:min", object)
    with pytest.raises(UsageError, match=r"ValueError: pow\(\) 3rd argument cannot be 0$"):
        call("--model", "builtins:pow", object, base=2, exp=2, mod=0)
