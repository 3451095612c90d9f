"""Run all sections, each in a job of its own, and print one table in Markdown.

``python -m tests.gpu > gpu.md`` from the root of the checkout, on a node with GPUs, CuPy, mpi4py and an MPI library,
takes at most ten minutes; send the table back. torch with CUDA adds the comparisons. ``--fake`` tries the plumbing on
the tests' fake device: its figures mean nothing.
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .sections import BUDGET_S, SECTIONS, Section, run

HEAD = ("section", "ranks", "what", "value", "goal", "")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("sections", nargs="*", choices=SECTIONS, default=[*SECTIONS], help="all by default")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: 2,4)")
    parser.add_argument("--fake", action="store_true", help="use the fake device, and small arrays")
    parser.add_argument("--small", action="store_true", help="small arrays: to see whether all of it runs")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too, each as soon as it is there")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if not options.fake and importlib.util.find_spec("cupy") is None:
        sys.exit("this needs CuPy and a GPU: pip install '.[cuda12]' or '.[cuda13]', or try it with --fake")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["MPIDDP_CACHE"] = cache  # what "probe" finds holds for this run
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    began, rows = time.monotonic(), []
    for name in options.sections:
        section = SECTIONS[name]
        for ranks in [int(n) for n in options.ranks.split(",")] if section.ranks is None else [section.ranks]:
            left = BUDGET_S - (time.monotonic() - began)
            for row in _section(section, name, ranks, options, left):
                rows.append(row)
                print(line(row), file=sys.stderr, flush=True)
                if options.json:
                    options.json.parent.mkdir(parents=True, exist_ok=True)
                    options.json.write_text(json.dumps(rows, indent=1) + "\n")
    wrong, missed = sum("wrong" in row for row in rows), sum(row.get("met") is False for row in rows)
    asked = " ".join(["python -m tests.gpu", *sys.argv[1:]])
    print(f"`{asked}`, {time.strftime('%d %B %Y')}, Python {platform.python_version()}: {len(rows)} rows in")
    print(f"{time.monotonic() - began:.0f} s, {wrong} wrong, {missed} goals missed.")
    print(f"{'The device is a fake: the figures mean nothing.' * options.fake}\n\n{table(rows)}")
    return 1 if wrong else 0


def _section(section: Section, name: str, ranks: int, options: argparse.Namespace, left: float) -> Iterator[dict]:
    if left < 5:
        yield {"section": name, "ranks": ranks, "what": "not run: the time was over", "wrong": True}
        return
    small = options.small or options.fake
    limit_s = section.limit_s * (3 if options.fake else 1)  # a fake is tried on machines that are busy with other tests
    yield from run(section, name, ranks, fake=options.fake, small=small, limit_s=min(left, limit_s))


def line(row: dict) -> str:
    return "  ".join(cell for cell in cells(row) if cell)


def cells(row: dict) -> tuple[str, ...]:
    value = row.get("value")
    shown = "" if value is None else f"{value:.4g} {row.get('unit', '')}".strip()
    goal = "" if row.get("goal") is None else f"{row['sense']} {row['goal']:g}"
    state = "WRONG" if row.get("wrong") else {None: "", True: "met", False: "missed"}[row.get("met")]
    return row["section"], str(row["ranks"]), " ".join(row["what"].split()), shown, goal, state


def table(rows: list[dict]) -> str:
    lines = [HEAD, tuple("---" for _ in HEAD), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(each)} |" for each in lines)


if __name__ == "__main__":
    sys.exit(main())
