"""torch's own suite of torch.distributed, from its wheel, on mpiddp: ``python tests/with_torch/suite.py --ranks 4``.

torch starts a process for each rank of each test; here the ranks of one mpiexec run all tests in turn. A test that
fails or hangs ends the job, and a new one takes the rest. Needs ``pip install expecttest``.

``--file PATH/test_c10d_gloo.py`` runs torch's tests of Gloo instead, in which "gloo" then means mpiddp. The file is in
torch's sources, not in its wheel, with test_c10d_common.py beside it. ``--gloo`` runs them on Gloo itself.
"""

from __future__ import annotations

import argparse
import ast
import functools
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
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve()
SILENCE_S = 90.0
"""Without news from any rank."""
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
SHORT = (
    *("test_get_rank_size_group", "test_destroy_group", "test_send_recv", "test_send_recv_any_source", "test_isend"),
    *("test_broadcast_group", "test_reduce_sum", "test_all_reduce_sum", "test_all_reduce_sum_async"),
    *("test_all_reduce_sum_complex", "test_sparse_all_reduce_sum", "test_all_reduce_coalesced_group_sum"),
    *("test_scatter_group", "test_gather_group", "test_all_gather_group", "test_all_gather_coalesced_with_empty"),
    *("test_all_to_all_single_unequal_split_group", "test_all_to_all_group", "test_barrier_group"),
    *("test_all_gather_object_subgroup", "test_scatter_object_list", "test_DistributedDataParallelCPU"),
    *("test_DistributedDataParallelCPU_grad_is_view", "test_ddp_logging_data_cpu", "test_static_graph_api_cpu"),
)
"""Some of each kind, for every change."""


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


OF_ONE_RANK = ("ReducerTest", "GlooProcessGroupWithDispatchedCollectivesTests")
GLOOS_OWN = {
    "ProcessGroupGlooTest.test_set_gloo_pg_timeout": "asks for Gloo's options",
    "ProcessGroupGlooTest.test_allgather_checks": "empty lists without options: torch's dispatcher refuses them",
    "GlooProcessGroupWithDispatchedCollectivesTests.test_all_to_all_single": "mpiddp takes what is not contiguous",
}
"""Tests in the file that are about Gloo itself."""


def tests_of_gloo(file: Path) -> list[str]:
    """Return the names of the tests in torch's file that need no GPU and take the backend's name."""
    classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    return [
        name
        for case in classes
        if case.name not in ("RendezvousEnvTest", "TimeoutTest")
        for each in case.body
        if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")
        if not GPU.search(" ".join(map(ast.unparse, each.decorator_list)))
        if (name := f"{case.name}.{each.name}") not in GLOOS_OWN
    ]


def case_of_gloo(name: str, plan: dict[str, Any], rank: int, size: int) -> Any:
    """Return a test of the file, which spawns nothing."""
    import torch.distributed as dist

    from mpiddp.torch.process_group import ProcessGroup

    sys.path.insert(0, str(Path(plan["file"]).parent))
    kind, test = name.split(".")
    base = getattr(importlib.import_module("test_c10d_gloo"), kind)

    def create(*_: Any) -> Any:
        dist.init_process_group("gloo")
        return dist.group.WORLD

    if not plan["gloo"]:
        gloo = SimpleNamespace(create_device=lambda interface: None)
        setattr(ProcessGroup, "_get_backend", lambda self, device: gloo)  # noqa: B010
    changed = {"rank": rank, "world_size": size, "_spawn_processes": lambda self: None}
    if hasattr(base, "_create_process_group_gloo") and not plan["gloo"]:
        changed["_create_process_group_gloo"] = create
    if kind != "ReducerTest":
        changed["setUp"] = importlib.import_module("torch.testing._internal.common_utils").TestCase.setUp
        changed["file_name"] = str(Path(plan["folder"]) / name)
    return type("Case", (base,), changed)(test)


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
    if backend != "mpiddp" and not plan["gloo"]:
        names.replace([backend])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    news = (Path(plan["folder"]) / f"news-{rank}").open("a", buffering=1)
    skips = {each.exit_code: each.message for each in tests.TEST_SKIPS.values()}

    base = importlib.import_module("torch.testing._internal.common_utils").TestCase
    case = type("Case", (base, tests.DistributedTest._DistTestBase), {"rank": rank, "world_size": size})
    make = functools.partial(case_of_gloo, plan=plan, rank=rank, size=size) if plan["file"] else case
    seconds = [tests.CUSTOM_PG_TIMEOUT.get(name, tests.default_pg_timeout) for name in plan["tests"]]
    if not plan["file"]:
        dist.init_process_group(backend, timeout=timedelta(seconds=max(seconds)))
    for name in plan["tests"]:
        news.write(json.dumps({"test": name}) + "\n")
        outcome = {"test": name, "outcome": "passed", "text": ""}
        try:
            if plan["file"]:
                _await_all(Path(plan["folder"]), size, json.dumps({"test": name}))
            else:
                tests.Barrier.sync(timeout=30)
            one = make(name)
            one.setUp()  # seeds the random numbers
            getattr(one, name.rpartition(".")[2])()
            if plan["file"] and dist.is_initialized():
                dist.destroy_process_group()
        except SystemExit as end:
            outcome.update(outcome="skipped", text=skips.get(end.code, f"exit {end.code}"))
        except BaseException as error:
            skipped = type(error).__name__ == "SkipTest"
            outcome.update(outcome="skipped" if skipped else "failed", text=str(error) if skipped else _trace())
        news.write(json.dumps(outcome) + "\n")
        if outcome["outcome"] == "failed":
            os._exit(1)  # the ranks are out of step now
    news.write("\n")
    _await_all(Path(plan["folder"]), size, "")  # a rank that ends takes the others with it
    os._exit(0)


def _await_all(folder: Path, size: int, line: str) -> None:
    """Wait until all ranks have written this line."""
    files = [folder / f"news-{rank}" for rank in range(size)]
    while not all(file.exists() and f"{line}\n" in file.read_text().splitlines(keepends=True) for file in files):
        time.sleep(0.02)


def _trace() -> str:
    return "".join(traceback.format_exc().splitlines(keepends=True)[-30:])


class Job:
    """One mpiexec that runs some tests."""

    def __init__(
        self, names: list[str], ranks: int, backend: str, file: Path | None = None, gloo: bool = False
    ) -> None:
        from harness import launcher

        self._scratch = tempfile.TemporaryDirectory(prefix="mpiddp-suite-")
        self.folder = Path(self._scratch.name)
        for part in ("barrier", "test_dir", "init_dir", "output"):
            (self.folder / part).mkdir()
        plan = self.folder / "plan"
        told = {
            "tests": names,
            "folder": str(self.folder),
            "backend": backend,
            "file": file and str(file),
            "gloo": gloo,
        }
        plan.write_text(json.dumps(told))
        self._ranks, self._names = ranks, names
        command = [*launcher.launch(ranks), sys.executable, str(HERE), "--plan", str(plan)]
        self._program = launcher.Program(command, {"OMP_NUM_THREADS": "1"}, scratch=self.folder / "output")

    def news(self) -> list[list[dict[str, Any]]]:
        files = [self.folder / f"news-{rank}" for rank in range(self._ranks)]
        return [
            [json.loads(line) for line in file.read_text().split("\n") if line] if file.exists() else []
            for file in files
        ]

    def run(self) -> dict[str, tuple[str, str]]:
        """Return the outcome of each test that has begun: one that failed is the last."""
        heard, seen = time.monotonic(), 0
        while self._program.poll() is None and time.monotonic() - heard < (SILENCE_S if seen else START_S):
            time.sleep(0.1)
            count = sum(map(len, self.news()))
            if count > seen:
                heard, seen = time.monotonic(), count
        ended = self._program.poll()
        output = "\n".join(self._program.output)
        self._program.kill()
        found: dict[str, tuple[str, str]] = {}
        for name in self._names:
            entries = [entry for rank in self.news() for entry in rank if entry["test"] == name]
            done = [entry for entry in entries if "outcome" in entry]
            kinds = {entry["outcome"] for entry in done}
            if "failed" in kinds:
                text = next(entry["text"] for entry in done if entry["outcome"] == "failed")
                found[name] = "failed", text
            elif len(done) == self._ranks:
                kind = "skipped" if "skipped" in kinds else "passed"
                found[name] = kind, done[0]["text"]
            elif not any(self.news()):
                raise SystemExit(f"no rank of mpiexec -n {self._ranks} began a test:\n{output}")
            elif entries or not found:
                how = f"exit code {ended}" if ended is not None else f"no news for {SILENCE_S:.0f} s"
                found[name] = "failed", f"{how}: {len(done)} of {self._ranks} ranks finished it\n{output[-4000:]}"
            if name not in found or found[name][0] == "failed":
                break
        self._program.close()
        self._scratch.cleanup()
        return found


def run(names: list[str], ranks: int) -> dict[str, tuple[str, str]]:
    """Return outcome and text of each test."""
    outcomes: dict[str, tuple[str, str]] = {}
    together = [name for name in names if not ALONE.search(name)]
    while together:
        found = Job(together, ranks, "mpiddp").run()
        outcomes.update(found)
        together = together[len(found) :]
    for name in names:
        if ALONE.search(name):
            outcomes.update(Job([name], ranks, "gloo" if UNDER_GLOO.search(name) else "mpiddp").run())
    return outcomes


def run_file(names: list[str], ranks: int, file: Path, gloo: bool) -> dict[str, tuple[str, str]]:
    outcomes: dict[str, tuple[str, str]] = {}
    for alone in (True, False):
        left = [name for name in names if name.startswith(OF_ONE_RANK) is alone]
        while left:
            found = Job(left, 1 if alone else ranks, "gloo", file, gloo).run()
            outcomes.update(found)
            left = left[len(found) :]
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--short", action="store_true", help="some tests of each kind")
    parser.add_argument("--file", type=Path, help="torch's test/distributed/test_c10d_gloo.py")
    parser.add_argument("--gloo", action="store_true", help="with --file: on Gloo itself, to compare")
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="TEST", help="these tests only")
    options = parser.parse_args()
    if options.plan is not None:
        run_rank(json.loads(options.plan.read_text()))
    sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1])]
    os.environ.update(WORLD_SIZE=str(options.ranks), RANK="0", TEMP_DIR=tempfile.gettempdir())
    if options.file:
        names = options.names or tests_of_gloo(options.file)
    else:
        names = options.names or list(SHORT) if options.names or options.short else applicable(load("mpiddp"))
    for variable in ("WORLD_SIZE", "RANK", "BACKEND", "TEMP_DIR", "INIT_METHOD"):
        os.environ.pop(variable, None)
    began = time.monotonic()
    left_out = {*SKIPPED_BY_TORCH, *(NEEDS_FOUR_RANKS if options.ranks < 4 else ())}
    names = [name for name in names if name not in left_out]
    if options.file:
        outcomes = run_file(names, options.ranks, options.file.resolve(), options.gloo)
    else:
        outcomes = run(names, options.ranks)
    for name, (outcome, text) in outcomes.items():
        if outcome != "passed":
            print(f"{outcome}: {name}: {text}")
    counts = Counter(outcome for outcome, _ in outcomes.values())
    print(f"{options.ranks} ranks, {time.monotonic() - began:.0f} s: {dict(counts)}")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
