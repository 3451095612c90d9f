"""Lines and words are counted as ``python -m tests.count`` says."""

from pathlib import Path

from count import count, size

SOURCE = '''"""Three words here."""

# one comment

x = """a string
of code"""  # two words


def f(
    a,
):
    """Words."""
    return a


LIMIT = 3
"""Docstring of a constant."""
'''


def test_lines_and_words():
    assert size(SOURCE) == (1, 7, 3 + 2 + 2 + 1 + 4)


def test_folders(tmp_path):
    for name in ("mpiddp/a.py", "mpiddp/nn/b.py", "mpiddp/nn/functional/c.py", "tests/d.py", "other/e.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n")
    found = {folder: sizes.code for folder, sizes in count(tmp_path).items()}
    assert found == {"mpiddp": 1, "mpiddp, all": 3, "mpiddp/nn": 2, "tests": 1, "tests, all": 1}


BUDGET = {
    "mpiddp": 926,
    "mpiddp/algorithms": 2_687,
    "mpiddp/autograd": 800,
    "mpiddp/bench": 1_195,
    "mpiddp/data": 1_245,
    "mpiddp/device": 459,
    "mpiddp/distributed": 1_831,
    "mpiddp/examples": 593,
    "mpiddp/faults": 2_207,
    "mpiddp/mpi": 2_216,
    "mpiddp/nn": 978,
    "mpiddp/optim": 389,
    "mpiddp/parallel": 1_700,
    "mpiddp/shm": 428,
    "mpiddp/torch": 1_387,
    "mpiddp/training": 1_894,
    "tests, all": 23_815,
}
"""Lines of code. A commit that needs more raises a number, and says why; one that deletes lowers it."""


def test_folders_keep_to_their_budgets():
    sizes = {folder: each.code for folder, each in count(Path(__file__).parents[1]).items()}
    packages = {folder for folder in sizes if folder.startswith("mpiddp") and not folder.endswith("all")}
    assert packages == {folder for folder in BUDGET if folder.startswith("mpiddp")}
    assert {folder: sizes[folder] for folder, most in BUDGET.items() if sizes[folder] > most} == {}
