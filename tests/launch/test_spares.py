"""Spares, which take the places of ranks that die, and deaths before the first step: ``mpirun --with-ft ulfm``.

``MPIDDP_TEST_KILLS=20 python -m pytest tests/launch/test_spares.py --long`` kills twenty ranks at random moments;
``MPIDDP_TEST_SEED`` repeats a choice.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from harness import launcher
from harness.launcher import Completed, Program, side_by_side
from harness.tiers import thinned

KILLS = int(os.environ.get("MPIDDP_TEST_KILLS", "4"))
SEED = int(os.environ.get("MPIDDP_TEST_SEED", time.time_ns() % 2**32))


def _has_ulfm() -> bool:
    found = launcher.mpiexec()
    if found is None:
        return False
    with Program([found, "--version"]) as asked:
        return "Open MPI" in asked.wait(30).stdout


pytestmark = pytest.mark.skipif(not _has_ulfm(), reason="only Open MPI's mpirun lets ranks live on")

ULFM = ["--with-ft", "ulfm"]
EPOCHS = 4
# VICTIMS: a rank, whether it dies before or after a call, of which function, and which call of it.
TRAIN = """
import importlib, itertools, os, signal, sys

def lethal(function, moment, when):
    calls = itertools.count(1)
    def call(*args, **options):
        number = next(calls)
        if number == moment and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **options)
        if number == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

for victim in filter(None, os.environ["VICTIMS"].split(",")):
    rank, when, place, moment = victim.split(" ")
    if rank == os.environ["OMPI_COMM_WORLD_RANK"]:
        module, _, name = place.partition(":")
        owner, *names = importlib.import_module(module), *name.split(".")
        for each in names[:-1]:
            owner = getattr(owner, each)
        setattr(owner, names[-1], lethal(getattr(owner, names[-1]), int(moment), when))

from mpiddp import cli
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""
OPTIONS = ("--epochs", str(EPOCHS), "--batch-size", "96", "--model", "mlp", "--dropout", "0.2", "--optimizer", "adam")
STEP = "mpiddp.training.train_step:TrainStep"


def train(ranks: int, output: Path, *options: object, victims: str = "", timeout_s: float = 90) -> Completed:
    arguments = [*OPTIONS, "--output", output, *options]
    with launcher.start(ranks, TRAIN, *map(str, arguments), env={"VICTIMS": victims}, options=ULFM) as job:
        return job.wait(timeout_s)


def model(output: Path) -> bytes:
    return (output / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Train on three ranks, of which none dies, and return the model."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    done = train(3, output)
    assert done.rc == 0, done
    return model(output)


# (spares, victims); steps have numbers from 1, 15 an epoch.
SAME = {
    "rank 0 in backward": (1, f"0 before {STEP}._backward 20"),
    "after the optimizer's step": (1, f"1 after {STEP}._update 23"),
    "between steps": (1, f"2 after {STEP}.step 20"),
    "in the test": (1, "1 before mpiddp.training.trainer:Trainer.evaluate 2"),
    "rank 0 while it writes a checkpoint": (1, "0 before mpiddp.training.checkpoint:sync_folder 2"),
    "two at once": (2, f"0 before {STEP}._backward 20,2 before {STEP}._backward 20"),
    "a spare after its promotion": (2, f"1 before {STEP}.step 10,3 before {STEP}.step 10"),
    "a spare that sleeps": (2, f"4 before mpiddp.elastic:_Places.wait 1,1 before {STEP}.step 20"),
    "before the first step": (1, "0 after mpiddp.training.run:build_trainer 1"),
    "while data are loaded": (1, "1 before mpiddp.training.run:load_data 1"),
    "in init_process_group": (1, "2 after mpiddp.mpi.world:gather 1"),
    "at the end": (1, "0 after mpiddp.training.run:_finish 1"),
}


@pytest.mark.parametrize("case", thinned(SAME, "rank 0 in backward", "a spare that sleeps"))
def test_run_with_a_spare_ends_with_the_bits_of_one_without_a_death(tmp_path, undisturbed, case):
    spares, victims = SAME[case]
    done = train(3 + spares, tmp_path / "run", "--spares", spares, victims=victims)
    assert done.rc == 0 and re.search("a spare|spares took 2 of 2 places", done.stderr), done
    assert model(tmp_path / "run") == undisturbed, done


def test_without_spares_left_survivors_go_on_and_are_told_of_other_masks(tmp_path):
    victims = f"0 before {STEP}._backward 20,2 before {STEP}._backward 20"
    done = train(4, tmp_path / "run", "--spares", 1, victims=victims)
    assert done.rc == 0 and "with 2 of 3 ranks; dropout draws other masks" in done.stderr, done


STARTS = {
    "MPI_Init": (
        "1 before mpiddp.mpi.world:start_mpi 1",
        r"rank 1 of 3 ended before MPI had started",
    ),
    "init_process_group": ("0 before mpiddp.mpi.world:gather 1", r"1 of 3 ranks died during the start; 2 go on"),
}


@pytest.mark.parametrize("start", STARTS)
def test_death_during_the_start_is_survived_or_ends_the_job_with_its_reason(tmp_path, start):
    victims, said = STARTS[start]
    done = train(3, tmp_path / "run", "--epochs", 1, victims=victims, timeout_s=40)
    assert done.rc != launcher.TIMED_OUT and re.search(said, done.stderr), done
    assert (done.rc == 0) == (start != "MPI_Init") and done.seconds < 20, done


SCRIPT = """
import os, signal, sys, time
import numpy as np
import mpiddp as dist
from mpiddp import elastic, settings

class State:
    def __init__(self):
        self.x = np.zeros(1000)

    def state_dict(self):
        return {"x": self.x}

    def load_state_dict(self, state):
        self.x[...] = state["x"]

def step(state, number):
    rank = launchers.launch().rank
    if number == 17 and rank in map(int, sys.argv[2:]):
        state.x += 1000  # what the step had begun
        os.kill(os.getpid(), signal.SIGKILL)
    state.x *= 0.9
    x = np.full(1000, number + dist.get_rank(), np.float64)
    dist.all_reduce(x)
    state.x += x
    time.sleep(float(sys.argv[1]))

dist.init_process_group()
began, used = time.monotonic(), time.process_time()
state = elastic.run(step, State, 40, spares=dist.get_world_size() - 3, every=3)
if state is None:
    sys.stdout.write(f"slept {(time.process_time() - used) / (time.monotonic() - began):.3f}\\n")
else:
    expected = 0
    for number in range(40):
        expected = expected * 0.9 + sum(number + rank for rank in range(3))
    assert dist.get_world_size() == 3 and (state.x == expected).all(), (state.x[0], expected)
    sys.stdout.write("right\\n")
"""


def script(ranks: int, step_s: float, *victims: int) -> Completed:
    with launcher.start(ranks, SCRIPT, str(step_s), *map(str, victims), options=ULFM) as job:
        return job.wait(40)


def test_script_goes_on_with_spares_and_one_that_is_not_needed_burns_no_core():
    jobs = {"one dies": partial(script, 4, 0.0, 1), "two, one of them rank 0": partial(script, 6, 0.05, 0, 2)}
    with side_by_side(jobs) as futures:
        for victims, future in futures.items():
            done = future.result()
            assert done.rc == 0 and done.stdout.count("right\n") == 3, (victims, done)
    share = float(re.search(r"slept (\S+)", futures["two, one of them rank 0"].result().stdout)[1])
    assert share < 0.2, share


# Ranks 0 and 1 make the step, and the spare, rank 2, is stopped; or rank 0 makes it alone, and is stopped.
GONE = """
import os, signal, threading, time
import mpiddp as dist
from mpiddp import elastic

class State:
    def state_dict(self):
        return None

def step(state, number):
    if dist.get_world_size() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(2)

dist.init_process_group()
if dist.get_rank() == 2:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()
elastic.run(step, State, 1, spares=1)
"""


def gone(ranks: int) -> Completed:
    with launcher.start(ranks, GONE, env={"MPIDDP_TIMEOUT": "8"}, options=ULFM) as job:
        return job.wait(40)


def test_rank_that_is_gone_at_the_end_is_named_after_the_timeout():
    with side_by_side({"a spare": partial(gone, 3), "the only other rank": partial(gone, 2)}) as jobs:
        spare, other = (future.result() for future in jobs.values())
    waits = r"the end of elastic.run did not finish in 8 s: (?s:.*) rank 2 \(node .*  no answer"
    assert spare.rc == 110 and re.search(waits, spare.stderr), spare
    assert other.rc == 110 and "rank 0 has not answered for 8 s" in other.stderr, other


ASKED = """
import os, pathlib, signal, sys, time
import mpiddp as dist
from mpiddp import elastic

class State:
    def state_dict(self):
        return None

def step(state, number):
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
    end = time.monotonic() + 20
    while len(list(pathlib.Path(sys.argv[1]).glob("rank_?"))) < 3 and time.monotonic() < end:
        time.sleep(0.05)

dist.init_process_group()
elastic.run(step, State, 1, spares=1)
"""


def test_question_to_a_job_with_spares_is_answered_by_all(tmp_path):
    settings = {"MPIDDP_FLIGHT_RECORDER": f"{tmp_path}/rank_"}
    with launcher.start(3, ASKED, str(tmp_path), env=settings, options=ULFM) as job:
        done = job.wait(60)
    assert done.rc == 0 and "flight recorder: 3 of 3 ranks wrote" in done.stderr, done


def ranks_of(job: Program) -> list[int]:
    interpreter, found = Path(sys.executable).resolve(), []
    for pid in job.members():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/exe").resolve() == interpreter:
                found.append(pid)
    return sorted(found)


@pytest.mark.long
def test_random_kills_change_no_bit(tmp_path, undisturbed):
    """Ranks and spares at any time after the start, in runs of four kills."""
    rng = np.random.default_rng(SEED)
    for count in range(-(-KILLS // 4)):
        output = tmp_path / f"run-{count}"
        arguments = [*OPTIONS, "--output", output, "--spares", 4, "--checkpoint-steps", 3]
        with launcher.start(7, TRAIN, *map(str, arguments), env={"VICTIMS": ""}, options=ULFM) as job:
            while job.poll() is None and not (output / "run.json").exists():
                time.sleep(0.01)
            for _ in range(4):
                time.sleep(float(rng.exponential(0.3)))
                if len(alive := ranks_of(job)) > 3:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(rng.choice(alive)), signal.SIGKILL)
            done = job.wait(120)
        assert done.rc == 0 and model(output) == undisturbed, f"seed {SEED}, run {count}: {done}"
