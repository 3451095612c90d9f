"""The examples: each prints the output in its docstring, and runs on every possible number of ranks.

Starting MPI takes longer than an example, so examples of one command line share a job.
"""

import ast
import importlib.util
import json
import re
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.launcher import job
from harness.tiers import thinned

from mpiddp import cores

EXAMPLES = Path(importlib.util.find_spec("mpiddp.examples").submodule_search_locations[0])
HELPERS = {"__init__", "__main__", "printing"}
ALONE = "ends here"
"""Marks an example that has refused to run on so few ranks."""


@dataclass(frozen=True)
class Example:
    name: str
    environment: tuple[tuple[str, str], ...]
    ranks: int
    output: str


def read(path: Path) -> Example:
    command, _, shown = ast.get_docstring(ast.parse(path.read_text())).partition("\nOutput::\n\n")
    pattern = rf"``((?:\w+=\S+ )*)mpirun -np (\d) python -m mpiddp\.examples\.{path.stem}``: .+\.$"
    found = re.match(pattern, command, re.MULTILINE)
    assert found and shown, f"{path} does not show its command and output"
    environment = tuple(tuple(each.split("=", 1)) for each in found[1].split())
    return Example(path.stem, environment, int(found[2]), textwrap.dedent(shown).strip())


ALL = [read(path) for path in sorted(EXAMPLES.glob("*.py")) if path.stem not in HELPERS]


def run(ranks: int, names: list[str], folder: Path, env=None) -> dict[str, str]:
    """Run examples one after the other in one job; return rank 0's output."""
    result = folder / "printed.json"
    done = job("examples", result, *names, ranks=ranks, limit_s=120, **(env or {}))
    assert done.rc == 0, done
    return json.loads(result.read_text())


def same(shown: str, printed: str) -> bool:
    """Compare texts, but for the last digit of decimals (BLAS libraries differ) and numbers after a tilde."""
    texts = [re.sub(r" *~\d+\.\d+", " ~", text) for text in (shown, printed)]
    rest = [re.sub(r"-?\d+\.(\d+)", lambda found: "#" * len(found[1]), text) for text in texts]
    pairs = zip(*(re.findall(r"-?\d+\.\d+", text) for text in texts), strict=rest[0] == rest[1])
    return rest[0] == rest[1] and all(abs(float(a) - float(b)) <= 1.001 * 10 ** -len(a.split(".")[1]) for a, b in pairs)


COMMANDS: dict[tuple[int, tuple[tuple[str, str], ...]], list[Example]] = defaultdict(list)
for example in ALL:
    COMMANDS[example.ranks, example.environment].append(example)
for ranks in (2, 3, 4):
    COMMANDS[ranks, ()] += []


@pytest.mark.parametrize(
    "command",
    thinned(COMMANDS, *(command for command in COMMANDS if COMMANDS[command])),
    ids=lambda command: f"{command[0]}{'-env' * bool(command[1])}",
)
def test_examples_print_what_they_show(request, command, tmp_path):
    """In the long tier the job runs all other possible examples, too."""
    ranks, environment = command
    shown = {example.name: example.output for example in COMMANDS[command]}
    others = [example.name for example in ALL] if request.config.option.long and not environment else []
    printed = run(ranks, sorted({*shown, *others}), tmp_path, dict(environment))
    wrong = [
        f"--- {name} shows\n{text}\n--- and prints\n{printed[name]}"
        for name, text in shown.items()
        if not same(text, printed[name].strip())
    ]
    assert not wrong, "\n".join(wrong)
    for name, text in printed.items():
        assert text.strip(), f"{name} prints nothing"
        assert ALONE not in text, f"{name} does not run on {ranks} ranks"
        assert "False" not in text, f"on {ranks} ranks:\n{text}"


def test_by_hand_and_ddp_show_the_same():
    (shown,) = (example.output for example in ALL if example.name == "sgd")
    by_hand, with_ddp = shown.removeprefix("by hand\n").split("\nwith DistributedDataParallel\n")
    assert by_hand == with_ddp


@pytest.mark.parametrize(
    ("name", "ranks", "code", "said"),
    [
        ("hello", 2, 0, "rank 1 of 2 is local rank 1"),
        ("helo", 2, 1, "there is no example 'helo'; did you mean hello?"),
        ("model_parallel", None, 2, "mpirun -np 4 python -m mpiddp.examples.model_parallel"),
    ],
)
def test_a_name_runs_its_example(name, ranks, code, said):
    done = job("-m", "mpiddp.examples", name, ranks=ranks, **dict.fromkeys(cores.THREAD_VARIABLES))
    assert done.rc == code and (done.stdout + done.stderr).count(said) == 1, done
    assert "BLAS threads" not in done.stderr, f"ranks share the cores: {done}"
    assert "Traceback" not in done.stderr, done


def test_list_names_every_example_and_its_ranks():
    done = job("-m", "mpiddp.examples", ranks=2)
    assert done.rc == 0, done
    listed = re.findall(r"^    (\w+) +(\d+)  \S", done.stdout, re.MULTILINE)
    assert sorted(listed) == [(example.name, str(example.ranks)) for example in ALL], done
