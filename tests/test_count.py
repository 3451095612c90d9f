"""Lines and words are counted as ``python -m tests.count`` says."""

from __future__ import annotations

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
