"""MODULE:CALLABLE, and the errors without one."""

import sys

import pytest

from mpiddp.training.config import UsageError
from mpiddp.training.user_code import call, import_string

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
        ("nowhere:make", "--model nowhere:make: there is no module nowhere"),
        ("mine_here.inner:make", "there is no module mine_here.inner"),
        ("./mine_here:make", r"'./mine_here' is no name of a module; give it as in `import`"),
        ("mine_here:maek", "'maek' is not in mine_here; did you mean make?"),
        ("mine_here:number", "'number' is no callable, it is of type int"),
    ],
)
def test_what_is_not_there_is_named(here, name, said):
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        import_string("--model", name)


def test_errors_of_the_module_are_its_own(here):
    with pytest.raises(ModuleNotFoundError, match="nowhere_else"):
        import_string("--model", "needy_here:make")
    with pytest.raises(ZeroDivisionError):
        import_string("--model", "broken_here:make")


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
