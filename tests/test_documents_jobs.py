"""The documents: their programs run as they stand, and their links lead somewhere."""

import re
import tomllib
from pathlib import Path

import conftest
import pytest
from harness.launcher import job

import mpiddp

ROOT = Path(__file__).parents[1]
CONTRIBUTING = ROOT / ".github/CONTRIBUTING.md"
PAGES = [
    *(ROOT / "README.md", *sorted(ROOT.glob("mpiddp/**/README.md")), ROOT / "slurm/README.md"),
    *sorted(ROOT.glob(".github/**/*.md")),
]
GUIDE = CONTRIBUTING.read_text().partition("## Adding")[2]
MAX_README_BYTES = 13_000


def programs(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.core
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_first_program(ranks):
    (program,) = programs(PAGES[0].read_text())
    done = job(program, ranks=ranks, limit_s=120)
    assert done.rc == 0, done
    found = re.fullmatch(r"ranks: (\d), accuracy: (\d\.\d{3})\n", done.stdout)
    assert found is not None and int(found[1]) == ranks and float(found[2]) > 0.94, done


def test_guides():
    """To an algorithm, an operation and a hook, one after the other in one job."""
    ended = "\ndist.destroy_process_group()\n"
    done = job(ended.join(programs(GUIDE)[:3]) + ended, ranks=3, limit_s=90)
    assert done.rc == 0, done


def test_guide_to_a_model(tmp_path):
    (tmp_path / "mymodel.py").write_text(programs(GUIDE)[3])
    options = ("--model", "mymodel:Wide", "--epochs", 2, "--batch-size", 64, "--lr", 0.05)
    done = job("-m", "mpiddp", "train", *options, ranks=2, search=[tmp_path], limit_s=120)
    assert done.rc == 0 and "epoch 2/2" in done.stdout, done


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), f"{name(page)} leads to {target}"
        if anchor:
            found = found / "README.md" if found.is_dir() else found
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
            assert anchor in anchors, f"{name(page)} leads to {target}"


def test_contributing_has_all_marks():
    described = dict(
        re.findall(r"^\| `([a-z]+(?:\(\*numbers\))?)` \| (.*) \|$", CONTRIBUTING.read_text(), re.MULTILINE)
    )
    del described["mpi"]  # it is pytest-mpi's
    assert described == conftest.MARKS


def test_the_version_stands_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
    assert not re.search(r"^version:", (ROOT / ".github/CITATION.cff").read_text(), re.MULTILINE)
    release = mpiddp.__version__.rpartition(".")[0]
    changes = (ROOT / ".github/CHANGES.md").read_text()
    assert re.search(r"^## (.*)$", changes, re.MULTILINE)[1] == release


def test_size():
    assert PAGES[0].stat().st_size < MAX_README_BYTES


def test_recipes_have_this_version_and_its_dependencies():
    recipes = ROOT / "slurm/packages"
    conda, spack = (recipes / "recipe.yaml").read_text(), (recipes / "package.py").read_text()
    assert f'version: "{mpiddp.__version__}"' in conda and f'version("{mpiddp.__version__}"' in spack
    (easybuild,) = recipes.glob(f"mpiddp-{mpiddp.__version__}-*.eb")
    for dependency in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        name, least = dependency.split(">=")
        assert f"- {name} >={least}\n" in conda and f'depends_on("py-{name}@{least}:"' in spack, name
        assert name == "numpy" or f"('{name}'," in easybuild.read_text().lower(), name
