"""torch's own suite of torch.distributed, from its wheel, on mpiddp: ``python tests/with_torch/suite.py --ranks 4``.

torch starts a process for each rank of each test; here the ranks of one mpiexec run all tests in turn. A test that
fails or hangs ends the job, and a new one takes the rest. Needs ``pip install expecttest``.
"""

import argparse
import ast
import importlib
import inspect
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
TEST_S = 10.0
"""For a test, on the average; torch's time limits end those that wait in vain."""
START_S = 300.0
"""Until the ranks have imported torch and its tests."""

GPU = re.compile(r"skip_if_no_gpu|skip_if_lt_x_gpu|nccl_version|CUDA all_to_all")
"""Decorators of tests that need GPUs."""
ALONE = re.compile(r"timeout|monitored_barrier")
"""Tests that leave ranks behind in an operation: each has a job of its own."""
UNDER_GLOO = re.compile(r"monitored_barrier")
"""Tests that ask for the backend's name; under this name the others also ask for Gloo's events in the profiler."""
SKIPPED_BY_TORCH = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_barrier_timeout_arg": "torch skips it on Linux",
    "test_broadcast_object_list": "torch skips it: it fails there",
}
NEEDS_FOUR_RANKS = ("test_new_subgroups_with_group_param", "LargeCommTest.test_new_group_local_sync")


def load(backend: str) -> Any:
    """Import torch's tests as those of a backend."""
    os.environ.setdefault("INIT_METHOD", "env://")
    os.environ["BACKEND"] = backend
    common = importlib.import_module("torch.testing._internal.common_distributed")
    for feature in ("ddp", "subgroup", "gpu"):
        common.DistTestCases.backend_feature[feature].add(backend)
    found = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    os.environ["BACKEND"] = "mpi"  # asked at run time: tests of this one also run on fewer than 8 ranks
    return found


def applicable(tests: Any) -> list[str]:
    """Return the names of the tests that need no GPU, as their decorators say."""
    source = ast.parse(inspect.getsource(tests))
    cases = next(node for node in ast.walk(source) if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase")
    functions = [node for node in cases.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [each.name for each in functions if not GPU.search(" ".join(map(ast.unparse, each.decorator_list)))]


def run_rank(plan: dict[str, Any]) -> None:
    """Run the tests of the plan and write each one's result."""
    import torch.distributed as dist

    import mpiddp.torch
    from mpiddp.torch import __main__ as launcher, names

    backend = plan["backend"]
    mpiddp.init_process_group()
    launcher.announce()
    mpiddp.destroy_process_group()
    os.environ.pop("MASTER_ADDR")
    os.environ["TEMP_DIR"] = plan["folder"]
    tests = load(backend)
    if backend != "mpiddp":
        names.replace([backend])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    news = (Path(plan["folder"]) / f"news-{rank}").open("a", buffering=1)
    skips = {each.exit_code: each.message for each in tests.TEST_SKIPS.values()}

    base = importlib.import_module("torch.testing._internal.common_utils").TestCase
    case = type("Case", (base, tests.DistributedTest._DistTestBase), {"rank": rank, "world_size": size})
    seconds = [tests.CUSTOM_PG_TIMEOUT.get(name, tests.default_pg_timeout) for name in plan["tests"]]
    dist.init_process_group(backend, timeout=timedelta(seconds=max(seconds)))
    for name in plan["tests"]:
        news.write(json.dumps({"test": name}) + "\n")
        outcome = {"test": name, "outcome": "passed", "text": ""}
        try:
            tests.Barrier.sync(timeout=30)
            one = case(name)
            one.setUp()  # seeds the random numbers
            getattr(one, name)()
        except SystemExit as end:
            outcome.update(outcome="skipped", text=skips.get(end.code, f"exit {end.code}"))
        except BaseException:
            trace = "".join(traceback.format_exc().splitlines(keepends=True)[-30:])
            outcome.update(outcome="failed", text=trace)
        news.write(json.dumps(outcome) + "\n")
        if outcome["outcome"] == "failed":
            os._exit(1)  # the ranks are out of step now
    news.write("\n")
    everybody = [Path(plan["folder"]) / f"news-{each}" for each in range(size)]
    while not all("\n\n" in file.read_text() for file in everybody):  # a rank that ends takes the others with it
        time.sleep(0.02)
    os._exit(0)


def run_job(names: list[str], ranks: int, backend: str) -> dict[str, tuple[str, str]]:
    """Run tests in one mpiexec; return the outcome of each one that has begun: one that failed is the last."""
    from harness import launcher

    with tempfile.TemporaryDirectory(prefix="mpiddp-suite-") as scratch:
        folder = Path(scratch)
        for part in ("barrier", "test_dir", "init_dir"):
            (folder / part).mkdir()
        plan = folder / "plan"
        plan.write_text(json.dumps({"tests": names, "folder": scratch, "backend": backend}))
        ended = launcher.job(HERE, "--plan", plan, ranks=ranks, limit_s=START_S + TEST_S * len(names))
        lines = [line for file in folder.glob("news-*") for line in file.read_text().split("\n")]
        told = [json.loads(line) for line in lines if line]
    if not told:
        raise SystemExit(f"no rank of mpiexec -n {ranks} began a test:\n{ended}")
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        entries = [entry for entry in told if entry["test"] == name]
        outcomes = {entry["outcome"]: entry["text"] for entry in entries if "outcome" in entry}
        done = sum("outcome" in entry for entry in entries)
        if "failed" not in outcomes and done == ranks:
            kind = "skipped" if "skipped" in outcomes else "passed"
            found[name] = kind, outcomes[kind]
            continue
        if entries or not found:
            unfinished = f"{done} of {ranks} ranks finished it\n{str(ended)[-4000:]}"
            found[name] = "failed", outcomes.get("failed", unfinished)
        break
    return found


def run(names: list[str], ranks: int) -> dict[str, tuple[str, str]]:
    """Return outcome and text of each test."""
    outcomes: dict[str, tuple[str, str]] = {}
    together = [name for name in names if not ALONE.search(name)]
    while together:
        found = run_job(together, ranks, "mpiddp")
        outcomes.update(found)
        together = together[len(found) :]
    for name in names:
        if ALONE.search(name):
            outcomes.update(run_job([name], ranks, "gloo" if UNDER_GLOO.search(name) else "mpiddp"))
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="TEST", help="these tests only")
    options = parser.parse_args()
    if options.plan is not None:
        run_rank(json.loads(options.plan.read_text()))
    sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1])]
    os.environ.update(WORLD_SIZE=str(options.ranks), RANK="0", TEMP_DIR=tempfile.gettempdir())
    names = options.names or applicable(load("mpiddp"))
    for variable in ("WORLD_SIZE", "RANK", "BACKEND", "TEMP_DIR", "INIT_METHOD"):
        os.environ.pop(variable, None)
    began = time.monotonic()
    left_out = {*SKIPPED_BY_TORCH, *(NEEDS_FOUR_RANKS if options.ranks < 4 else ())}
    names = [name for name in names if name not in left_out]
    outcomes = run(names, options.ranks)
    for name, (outcome, text) in outcomes.items():
        if outcome != "passed":
            print(f"{outcome}: {name}: {text}")
    counts = Counter(outcome for outcome, _ in outcomes.values())
    print(f"{options.ranks} ranks, {time.monotonic() - began:.0f} s: {dict(counts)}")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
