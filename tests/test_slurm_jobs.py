"""The batch scripts, submitted to a real Slurm with two nodes: see mini_slurm."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from harness import faking, launcher, mini_slurm

SLURM = Path(__file__).parents[1] / "slurm"
BENCH = ("all_reduce", "-b", "1K", "-e", "1K", "-n", "2", "-w", "1")
TRAIN = ("--epochs", "4", "--batch-size", "60", "--dropout", "0.2")
# Slower steps in the first run of the requeued job: the time limit comes before the end. The rank that dies does so
# once, when there is a checkpoint.
SLOW_AT_FIRST = """
import os, pathlib, time
if "SLURM_STEP_ID" in os.environ and ("SLURM_RESTART_COUNT" not in os.environ or "ALWAYS_SLOW" in os.environ):
    from mpiddp.training.stop import StopRequest
    asked = StopRequest.__call__
    def ask(self):
        time.sleep(0.5)
        died, saved = pathlib.Path("died"), any(pathlib.Path("runs").glob("*/checkpoints/step-*"))
        if saved and os.environ.get("DIES") == os.environ["SLURM_PROCID"] and not died.exists():
            died.touch()
            os.kill(os.getpid(), 9)
        return asked(self)
    StopRequest.__call__ = ask
"""
# Of programs/waits: what rank 1 does.
WAYS = {"raise": "raise", "exit": "exit 3", "_exit0": "_exit 0", "kill": "SIGKILL"}
LAUNCHERS = {"srun": "run", "mpirun": '"$(beside_python)"', "alone": "", "none": "srun --mpi=none -n 2"}
# CuPy's answers on a machine with the GPUs that Slurm lets the rank see.
CUPY = """
import os
from types import SimpleNamespace
class ndarray: pass
def is_available(): return True
seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=lambda: len(seen)))
"""
GPU_OPTIONS = {"plain": "", "none": "--gpu-bind=none", "single": "--gpu-bind=single:1", "task": "--gpus-per-task=1"}


class Jobs:
    def __init__(self, cluster: mini_slurm.MiniSlurm, folder: Path) -> None:
        self.folder = folder
        self.library = "Open MPI" if launcher.is_open_mpi() else "MPICH"
        self.plugin, self.other_plugin = ("pmix", "pmi2") if launcher.is_open_mpi() else ("pmi2", "pmix")
        self._cluster = cluster
        self._numbers: dict[str, str] = {}

    def submit(self, name: str, *arguments: str | Path, **env: str) -> None:
        variables = {
            "PYTHON": sys.executable,
            # Both nodes have this machine's addresses. UCX would go by its memory, and cannot use lo.
            "MPIR_CVAR_CH4_NETMOD": "ofi",
            "FI_PROVIDER": "tcp",
            "FI_TCP_IFACE": "lo",
            "OMPI_MCA_btl_tcp_if_include": "lo",
            "MPIDDP_DETERMINISTIC": "1",
            **env,
        }
        self._numbers[name] = self._cluster.sbatch(self.folder / name, *arguments, env=variables)

    def submit_text(self, name: str, text: str, *options: str, **env: str) -> None:
        script = self.folder / f"{name}.sbatch"
        script.write_text(f"#!/bin/bash\nset -euo pipefail\nsource {SLURM}/env.sh\n{text}")
        self.submit(name, "--output=log", *options, script, **env)

    def wait_for(self, name: str, text: str) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not any(
            text in log.read_text() for log in self.folder.glob(f"{name}/*.log")
        ):
            time.sleep(0.1)

    def ask(self, name: str, *command: str) -> None:
        self._cluster.ask(*command, self._numbers[name])

    def ends(self, name: str) -> list[mini_slurm.JobEnd]:
        return self._cluster.wait_all(self._numbers[name], 150)

    def end(self, name: str) -> mini_slurm.JobEnd:
        (end,) = self.ends(name)
        return end

    def file(self, pattern: str) -> Path:
        (path,) = self.folder.glob(pattern)
        return path


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    if (fault := mini_slurm.why_not()) is not None:
        pytest.skip(f"no Slurm to test with: {fault}")
    with mini_slurm.MiniSlurm() as cluster:
        jobs = Jobs(cluster, tmp_path_factory.mktemp("slurm"))
        programs = {"slow/sitecustomize.py": SLOW_AT_FIRST, "gpus/cupy.py": CUPY}
        for name, text in programs.items():
            (jobs.folder / name).parent.mkdir(exist_ok=True)
            (jobs.folder / name).write_text(text)
        if request.config.option.long:
            submit_long(jobs)
        submit_short(jobs)
        yield jobs


def submit_short(jobs: Jobs) -> None:
    few = "--ntasks-per-node=2"
    slow = f"{jobs.folder}/slow:{launcher.environment().get('PYTHONPATH', '')}"
    jobs.submit("warned", few, SLURM / "train_cpu.sbatch", "--epochs", "2", PYTHONPATH=slow)
    one_step = ("--model", "mlp", "--batch-size", "1437", "--epochs", "3")
    dies = {"MPIDDP_RESTARTS": "2", "DIES": "1", "PYTHONPATH": slow}
    jobs.submit("restarted", few, SLURM / "train_cpu.sbatch", *one_step, **dies)
    jobs.submit("multinode", SLURM / "train_multinode.sbatch", *TRAIN)
    jobs.submit("cpu", few, SLURM / "train_cpu.sbatch", "--epochs", "1")
    jobs.submit("bad-option", few, SLURM / "train_cpu.sbatch", "--epocs", "1")
    for name, plugin in {"wrong-plugin": jobs.other_plugin, "unknown-plugin": "pmix_v9"}.items():
        jobs.submit(name, few, SLURM / "train_cpu.sbatch", MPIDDP_LAUNCH=plugin)
    # Side by side: mostly Slurm waits for remains of a step.
    runs = [
        f'(run "$PYTHON" {launcher.PROGRAMS}/waits.py "{one}" all_reduce || echo "{way} $?" >> codes) &\n'
        for way, one in WAYS.items()
    ]
    jobs.submit_text(
        "fails", "".join([*runs, "wait"]), "--nodes=2", "--ntasks-per-node=1", SLURM_OVERLAP="1", SLURM_WAIT="3"
    )


def submit_long(jobs: Jobs) -> None:
    folder, few = jobs.folder, "--ntasks-per-node=2"
    path = launcher.environment().get("PYTHONPATH", "")
    # Slurm looks at the limits every 30 s, and warns when the limit less the time given is nearer than that.
    warned = ("--time=1", "--signal=B:USR1@60")
    jobs.submit("requeue", *warned, SLURM / "requeue.sbatch", *TRAIN, PYTHONPATH=f"{folder}/slow:{path}")
    # Alone until it trains: Slurm's look, 30 s after the cluster's start, would find no rank to warn.
    jobs.wait_for("requeue", "training on")
    # Stops by itself 10 s after its start, twice.
    by_itself = ("--max-time", "slurm", "--margin", "110", "--epochs", "1000", "--model", "mlp")
    alone = ("--nodes=1", "--ntasks-per-node=1", "--time=2", "--signal=B:USR1@1")
    slow = {"PYTHONPATH": f"{folder}/slow:{path}", "ALWAYS_SLOW": "1", "MAX_REQUEUES": "1"}
    one_step = ("--model", "mlp", "--epochs", "1000", "--batch-size", "1437")
    jobs.submit("cancelled", *alone, "--time=10", SLURM / "requeue.sbatch", *one_step, **slow)
    jobs.submit("max-time", *alone, SLURM / "requeue.sbatch", *by_itself, **slow)
    jobs.submit("mpirun", SLURM / "train_multinode.sbatch", *TRAIN, MPIDDP_LAUNCH="mpirun")
    jobs.submit("array", SLURM / "array.sbatch", "--epochs", "1", "--model", "mlp")
    jobs.submit("no-gpu", SLURM / "train_gpu.sbatch", "--epochs", "1")
    rng = np.random.default_rng(0)
    np.savez(folder / "few.npz", x=rng.integers(0, 256, (40, 28, 28), np.uint8), y=rng.integers(0, 10, 40))
    little = f"--model mlp --dropout 0 --data npz:{folder}/few.npz --batch-size 20 --epochs 2 --workers 1".split()
    jobs.submit("gpu", SLURM / "train_gpu.sbatch", *little, PYTHONPATH=f"{faking.FOLDER}:{path}")
    jobs.submit("host", SLURM / "train_gpu.sbatch", *little, "--device", "cpu")
    jobs.submit("bench", SLURM / "bench.sbatch", *BENCH)
    jobs.submit("test", SLURM / "test.sbatch", "-q", "tests/parallel/test_naive.py")
    infos = [
        f'{start} "$PYTHON" -m mpiddp info --json > {name}.json 2> {name}.err || echo {name} $? >> codes'
        for name, start in LAUNCHERS.items()
    ]
    jobs.submit_text("info", "\n".join(infos), "--nodes=2", few)
    seen = """'echo "$SLURMD_NODENAME $SLURM_LOCALID ${CUDA_VISIBLE_DEVICES-unset}"'"""
    devices = [
        f'srun {options} --mpi={jobs.plugin} "$PYTHON" -m mpiddp info --json > {name}.json\n'
        f"srun {options} bash -c {seen} > {name}.seen"
        for name, options in GPU_OPTIONS.items()
    ]
    gpus = ("--nodes=2", few, "--gpus-per-node=2")
    jobs.submit_text("devices", "\n".join(devices), *gpus, PYTHONPATH=f"{folder}/gpus:{path}")


def losses(metrics: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def test_scripts_pass_shellcheck():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", SLURM / "env.sh", *SLURM.glob("*.sbatch")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", sorted(SLURM.glob("*.sbatch")), ids=lambda path: path.name)
def test_script_begins_with_what_to_edit_and_how_to_submit(script):
    comment = re.match(r"#!/bin/bash\n((?:#.*\n)+)", script.read_text())
    assert comment
    assert "# Edit: " in comment[1]
    assert f"sbatch slurm/{script.name} " in comment[1]
    assert "$0" not in script.read_text(), "sbatch copies the script to its spool"


def test_the_warning_before_the_time_limit_saves_a_checkpoint(jobs):
    jobs.wait_for("warned", "training on")
    jobs.ask("warned", "scancel", "--batch", "--signal=USR1")  # as --signal=B:USR1 does
    assert jobs.end("warned").rc == 75, jobs.end("warned")
    jobs.ask("warned", "scontrol", "requeue")
    end = jobs.end("warned")
    assert (end.state, end.rc) == ("COMPLETED", 0) and "resumed after step" in end.log, end


def test_a_rank_that_dies_starts_the_step_again_in_the_same_job(jobs):
    end = jobs.end("restarted")
    assert (end.state, end.rc) == ("COMPLETED", 0), end
    assert "mpiddp run: start 2 of at most 3" in end.log and "epoch 3/3" in end.log, end


@pytest.mark.core
def test_train_on_one_node(jobs):
    end = jobs.end("cpu")
    assert (end.state, end.rc) == ("COMPLETED", 0), end
    assert re.search(rf"{jobs.library}.*--mpi={jobs.plugin}", end.log.splitlines()[0]), end
    assert "training on 2 ranks on 1 node:" in end.log, end
    assert jobs.file("cpu/runs/train-cpu-*/model.safetensors").stat().st_size > 80_000
    assert jobs.file("cpu/train-cpu-*.log").read_text() == end.log


@pytest.mark.core
def test_train_on_two_nodes(jobs):
    end = jobs.end("multinode")
    assert (end.state, end.rc) == ("COMPLETED", 0), end
    assert "training on 4 ranks on 2 nodes:" in end.log, end
    assert len(losses(jobs.file("multinode/runs/*/metrics.jsonl"))) == 4


@pytest.mark.long
def test_train_by_mpirun_in_the_same_job_script(jobs):
    end = jobs.end("mpirun")
    assert (end.state, end.rc) == ("COMPLETED", 0), end
    assert re.search(rf"^{jobs.library}.*, started by \S*mpirun", end.log), end
    assert "training on 4 ranks on 2 nodes:" in end.log, end
    assert jobs.end("multinode").rc == 0
    models = [jobs.file(f"{name}/runs/*/model.safetensors").read_bytes() for name in ("mpirun", "multinode")]
    assert models[0] == models[1], "who starts the ranks makes no difference"


@pytest.mark.long
def test_array(jobs):
    ends = jobs.ends("array")
    assert [(end.state, end.rc) for end in ends] == [("COMPLETED", 0)] * 3, "\n".join(map(str, ends))
    for end, lr in zip(ends, ("0.003", "0.01", "0.03"), strict=True):
        assert re.search(rf"\blr={lr}\b", end.log), end
        assert jobs.file(f"array/runs/array-*/lr-{lr}/model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "state", "said"),
    [
        ("bad-option", "FAILED", r"unknown argument --epocs; did you mean --epochs\?"),
        pytest.param("test", "COMPLETED", r"\d+ passed", marks=pytest.mark.long),
        pytest.param("bench", "COMPLETED", r"^ *1024 ", marks=pytest.mark.long),
        pytest.param("no-gpu", "FAILED", "mpiddp: error: --device cuda: CuPy ", marks=pytest.mark.long),
    ],
)
def test_one_rank_says_how_it_went(jobs, name, state, said):
    end = jobs.end(name)
    assert end.state == state and len(re.findall(said, end.log, re.M)) == 1, end


@pytest.mark.long
def test_train_gpu(jobs):
    """On pretended GPUs, with a pretended CuPy: the script, the options and the way of the data."""
    end, host = jobs.end("gpu"), jobs.end("host")
    assert (end.state, end.rc) == ("COMPLETED", 0), end
    assert "training on 2 ranks on 1 node:" in end.log and "device=cuda" in end.log, end
    assert (host.rc, "device=cpu" in host.log) == (0, True), host
    curves = [losses(jobs.file(f"{name}/runs/*/metrics.jsonl")) for name in ("gpu", "host")]
    assert len(curves[0]) == 2 and curves[0] == pytest.approx(curves[1], rel=1e-5)


@pytest.mark.core
@pytest.mark.parametrize("name", ["wrong-plugin", "unknown-plugin"])
def test_plugin_that_does_not_fit_is_named_with_the_cure(jobs, name):
    end = jobs.end(name)
    assert (end.state, end.rc) == ("FAILED", 1), end
    assert "MPIDDP_LAUNCH=" in end.log, end
    assert re.search(r"MPI plugin types are.*pmi2", end.log), end
    assert name == "unknown-plugin" or f"does not start {jobs.library} " in end.log, end
    assert "training" not in end.log, end


@pytest.mark.core
def test_failing_rank_ends_the_step_whatever_way_it_fails(jobs):
    end = jobs.end("fails")
    codes = dict(line.split() for line in jobs.file("fails/codes").read_text().splitlines())
    assert set(codes) == set(WAYS), (codes, str(end))
    assert "ValueError: boom" in end.log, end


@pytest.mark.long
def test_info_tells_the_truth(jobs):
    end = jobs.end("info")
    folder = jobs.folder / "info"
    found = {name: (folder / f"{name}.json").read_text() for name in LAUNCHERS}
    for name in ("srun", "mpirun"):
        said = json.loads(found[name])
        assert said["mpi"]["launcher"].startswith(name), said
        ranks = [(rank["host"], rank["node"], rank["local_rank"]) for rank in said["ranks"]]
        assert ranks == [("n1", 0, 0), ("n1", 0, 1), ("n2", 1, 0), ("n2", 1, 1)], said
    said = json.loads(found["alone"])
    assert said["mpi"]["launcher"] is None, said
    assert [rank["host"] for rank in said["ranks"]] == ["n1"]
    assert found["none"] == "", end
    assert re.fullmatch(r"none [1-9]\d*\n", (folder / "codes").read_text()), "srun without a plugin is an error"
    error = (folder / "none.err").read_text()
    assert "srun started 2 ranks, but each sees a world of its own" in error
    assert f"srun --mpi={jobs.plugin}" in error


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # node, local rank, visible devices, and the number of its own among these
        ("plain", ["n1 0 0,1 takes 0", "n1 1 0,1 takes 1", "n2 0 0,1 takes 0", "n2 1 0,1 takes 1"]),
        ("none", ["n1 0 unset takes 0", "n1 1 unset takes 1", "n2 0 unset takes 0", "n2 1 unset takes 1"]),
        ("single", ["n1 0 0 takes 0", "n1 1 1 takes 0", "n2 0 0 takes 0", "n2 1 1 takes 0"]),
        ("task", ["n1 0 0 takes 0", "n1 1 1 takes 0", "n2 0 0 takes 0", "n2 1 1 takes 0"]),
    ],
)
def test_every_rank_of_a_node_takes_a_gpu_of_its_own(jobs, options, expected):
    end = jobs.end("devices")
    folder = jobs.folder / "devices"
    assert (folder / f"{options}.json").exists(), end
    ranks = json.loads((folder / f"{options}.json").read_text())["ranks"]
    seen = sorted((folder / f"{options}.seen").read_text().splitlines())
    found = [f"{line} takes {rank['gpu']}" for line, rank in zip(seen, ranks, strict=True)]
    assert found == expected, end


@pytest.mark.long
def test_time_limit_leads_to_a_checkpoint_a_requeue_and_the_same_parameters(jobs):
    end, unbroken = jobs.end("requeue"), jobs.end("multinode")
    # A slow machine is warned of its limit more than once.
    assert (end.state, end.rc, end.restarts >= 1) == ("COMPLETED", 0, True), end
    assert unbroken.rc == 0, unbroken
    assert re.search(r"SIGUSR1 on rank \d: stopped after step \d+, saved a checkpoint", end.log), end
    assert "requeued after start 1" in end.log, end
    assert "resumed after step" in end.log, end
    models = [jobs.file(f"{name}/runs/*/model.safetensors").read_bytes() for name in ("requeue", "multinode")]
    assert models[0] == models[1]
    curves = [losses(jobs.file(f"{name}/runs/*/metrics.jsonl")) for name in ("requeue", "multinode")]
    assert curves[0] == curves[1]


@pytest.mark.long
def test_max_time_ends_before_the_jobs_end_and_comes_back_without_any_signal(jobs):
    end = jobs.end("max-time")
    assert (end.state, end.rc, end.restarts) == ("FAILED", 75, 1), end
    stops = re.findall(r"--max-time on rank 0: stopped after step (\d+), saved a checkpoint", end.log)
    assert len(stops) == 2 and "SIGUSR1" not in end.log, end
    assert "requeued after start 1" in end.log and f"resumed after step {stops[0]}, in epoch" in end.log, end
    assert "not requeued: that has been done 1 times" in end.log, end
    assert jobs.file(f"max-time/runs/*/checkpoints/step-{int(stops[1]):010d}.safetensors").is_file(), end


@pytest.mark.long
def test_a_job_that_is_cancelled_does_not_come_back(jobs):
    jobs.wait_for("cancelled", "epoch    1/1000")
    jobs.ask("cancelled", "scancel")
    end = jobs.end("cancelled")
    assert (end.state, end.restarts) == ("CANCELLED", 0), end
    assert "SIGTERM on rank 0: stopped after step" in end.log and "requeued" not in end.log, end
