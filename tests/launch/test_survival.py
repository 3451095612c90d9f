"""Ranks that are killed, and the others, which go on: with Open MPI's ``mpirun --with-ft ulfm``."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from harness import launcher
from harness.launcher import Completed, Program, side_by_side
from harness.tiers import chosen, thinned

SEED = int(os.environ.get("MPIDDP_TEST_SEED", time.time_ns() % 2**32))


def _has_ulfm() -> bool:
    found = launcher.mpiexec()
    if found is None:
        return False
    with Program([found, "--version"]) as asked:
        return "Open MPI" in asked.wait(30).stdout


pytestmark = pytest.mark.skipif(not _has_ulfm(), reason="only Open MPI's mpirun lets ranks live on")

# The others' waits when a rank dies, which has done all before "dies()".
STATES = {
    "short all_reduce": "x = np.ones(3); dies(); dist.all_reduce(x)",
    "long all_reduce": "x = np.ones(1 << 20); dies(); dist.all_reduce(x)",
    "symmetric all_reduce": "x = dist.symmetric_empty(1 << 18); x[:] = 1; dies(); dist.all_reduce(x)",
    "all_reduce in MPI": "x = np.ones(5000); dies(); dist.all_reduce(x, algorithm='native')",
    "ring": "x = np.ones(5000); dies(); dist.all_reduce(x, algorithm='ring')",
    "computing": "dies(); time.sleep(1); dist.barrier()",
    "asynchronous": "works = [dist.all_reduce(np.ones(n), async_op=True) for n in (3, 1 << 16)]; dies(); more()",
    "a group without the victim": """
group = dist.new_group([rank for rank in range(size) if rank != victim])
dies()
if me == survivors[0]:
    dist.recv(np.ones(1), src=victim)
dist.barrier(group)
""",
    "receiving": "dies(); dist.recv(np.ones(1), src=victim)",
    "receiving from any": "dies(); dist.recv(np.ones(1))",
    "receiving later": "work = dist.irecv(np.ones(1), src=victim); dies(); work.wait()",
    "receiving after it is known": "work = dist.irecv(np.ones(1), src=victim); dies(); time.sleep(1.5); work.wait()",
    "asking": """
work = dist.irecv(np.ones(1), src=victim)
dies()
while not work.is_completed():
    time.sleep(0.01)
work.wait()
""",
    "sending": "dies(); dist.send(np.ones(1 << 20), dst=victim)",
    "making a group": "dies(); dist.new_group([0]); dist.barrier()",
    "in the middle of making a group": """
from mpiddp.mpi.link import Link
own = Link._own
Link._own = lambda self, comm: (dies(), own(self, comm))[1]
dist.new_group()
""",
    "objects": "dies(); dist.all_gather_object([None] * size, 'x' * 1000)",
    "monitored_barrier": "dies(); dist.monitored_barrier()",
}

PROGRAM = """
import os, pickle, signal, sys, time
import numpy as np
import mpiddp as dist

dist.init_process_group()
me, size, victim = dist.get_rank(), dist.get_world_size(), int(sys.argv[1])
survivors = [rank for rank in range(size) if rank != victim]

def dies():
    if me == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
        time.sleep(60)

def more():
    for work in works:
        work.wait()
    dist.all_reduce(np.ones(3))

def check():
    ranks = dist.get_world_size()
    for n in (1, 3000, 1 << 18):
        x = np.full(n, 1.0 + dist.get_rank())
        dist.all_reduce(x)
        assert (x == ranks * (ranks + 1) / 2).all(), x
    x = dist.symmetric_empty(1 << 16)
    x[:] = 1
    work = dist.all_reduce(x, async_op=True)
    y = np.zeros(1)
    reply = dist.irecv(y, src=(dist.get_rank() - 1) % ranks)
    dist.isend(np.full(1, 1.0 * dist.get_rank()), dst=(dist.get_rank() + 1) % ranks).wait()
    reply.wait(), work.wait()
    assert (x == ranks).all() and y == (dist.get_rank() - 1) % ranks
    group = dist.new_group([ranks - 1])
    dist.barrier()
    assert int(os.environ["RANK"]) == dist.get_rank() and int(os.environ["WORLD_SIZE"]) == ranks
"""

GO_ON = """
try:
    {body}
except dist.RankFailedError as error:
    began = time.monotonic()
    assert pickle.loads(pickle.dumps(error)).ranks == error.ranks == [victim], error.ranks
    group = dist.shrink_group(error.ranks)
    assert group is dist.group.WORLD and group.size() == size - 1
    assert dist.get_rank() == survivors.index(me)
    check()
    sys.stdout.write(f"{{me}} went on\\n")
else:
    sys.stdout.write(f"{{me}} noticed nothing\\n")
"""


def mpirun(ranks: int, program: str, *args: object, timeout_s: float = 40, **env: str) -> Completed:
    with launcher.start(ranks, program, *map(str, args), env=env, options=["--with-ft", "ulfm"]) as job:
        return job.wait(timeout_s)


@pytest.fixture(scope="module")
def jobs(request):
    rng = np.random.default_rng(SEED)
    calls = {}
    wanted = chosen(request, "state")
    for state, body in STATES.items():
        if state not in wanted:
            continue
        ranks = int(rng.integers(2, 5))
        ending = GO_ON.format(body=body.strip().replace("\n", "\n    "))
        calls[state] = partial(
            mpirun, ranks, PROGRAM + ending, rng.integers(ranks), rng.choice(["SIGKILL", "SIGSEGV", "SIGABRT"])
        )
    with side_by_side(calls) as futures:
        yield futures


@pytest.mark.parametrize(
    "state",
    thinned(
        STATES,
        "short all_reduce",
        "long all_reduce",
        "symmetric all_reduce",
        "all_reduce in MPI",
        "asynchronous",
        "a group without the victim",
        "receiving from any",
        "in the middle of making a group",
    ),
)
def test_others_go_on(jobs, state):
    job = jobs[state].result()
    said = re.findall(r"^(\d) (went on|noticed nothing)$", job.stdout, re.M)
    assert job.rc == 0 and said, f"seed {SEED}: {job}"
    assert {what for _, what in said} == {"went on"}, f"seed {SEED}: {job}"


def test_two_die_at_once_and_one_while_the_others_regroup():
    program = """
import os, signal
import numpy as np
import mpiddp as dist

dist.init_process_group()
me, died = dist.get_rank(), []
for step in range(100):
    if step == 20 and me in (1, 4) and not died:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        x = np.ones(1 << 15)
        dist.all_reduce(x)
        assert (x == dist.get_world_size()).all()
    except dist.RankFailedError as error:
        if me == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        died += error.ranks
        dist.shrink_group([])
dist.barrier()
print(f"{me} is rank {dist.get_rank()} of {dist.get_world_size()}\\n", end="", flush=True)
"""
    job = mpirun(5, program)
    assert job.rc == 0, job
    assert sorted(job.stdout.splitlines()) == ["2 is rank 0 of 2", "3 is rank 1 of 2"], job


def test_symmetric_arrays_outlive_a_death_as_ordinary_arrays():
    program = """
x, kept = dist.symmetric_empty(1 << 16), dist.symmetric_empty(1 << 16)
y = np.empty(1 << 16, np.float32)
x[...] = kept[...] = 10.0**me
dist.all_reduce(x)
assert (x == sum(10.0**rank for rank in range(size))).all()
if me == victim:
    x[...] = 7777
dist.barrier()
try:
    dies()
    dist.all_reduce(y)
except dist.RankFailedError as error:
    dist.shrink_group(error.ranks)
new = dist.symmetric_empty(1 << 16)
expected = sum(10.0**rank for rank in survivors)
for what, array in {"old": x, "part": x[5:], "ordinary": y, "new": new}.items():
    for algorithm in (None, "two_shot", "hierarchical"):
        array[...] = 10.0**me
        dist.barrier()
        dist.all_reduce(array, algorithm=algorithm)
        assert (array == expected).all(), (what, algorithm, array)
        dist.barrier()
mixed = x if me == survivors[0] else new
mixed[...] = 10.0**me
dist.all_reduce(mixed)
assert (mixed == expected).all(), mixed
del x, array, mixed
gc.collect()
new[...] = kept[...] = 10.0**me
for array in (new, kept):
    dist.all_reduce(array)
    assert (array == expected).all(), array
print(f"{me} is right\\n", end="", flush=True)
"""
    job = mpirun(3, PROGRAM.replace("import os,", "import gc, os,") + program, 1, "SIGKILL")
    assert job.rc == 0, job
    assert sorted(job.stdout.splitlines()) == ["0 is right", "2 is right"], job


def test_error_that_nobody_catches_ends_the_job():
    job = mpirun(3, PROGRAM + "dies()\ndist.barrier()\n", 1, "SIGKILL")
    assert job.rc == 1, job
    assert "RankFailedError: rank 1 of 3 died" in job.stderr, job


@pytest.mark.parametrize("victim", thinned([0, 2], 0))
def test_death_of_a_rank_for_which_the_others_wait_at_their_ends(victim):
    program = """
if me == victim:
    time.sleep(1)
    dies()
"""
    job = mpirun(3, PROGRAM + program, victim, "SIGKILL")
    assert job.rc != launcher.TIMED_OUT and job.seconds < 30, job
    assert "Traceback" not in job.stderr, job


def test_death_that_one_meets_in_the_last_barrier_and_another_does_not():
    program = """
from mpiddp.faults.leaving import Leaving
from mpiddp.mpi.lazy import MPI

wait = Leaving._wait_for_all

def wait_and(self):
    wait(self)
    if size == self.job.world.size:
        dies()
        while me == 2:
            MPI.COMM_SELF.Iprobe()
            self.job.failures.raise_if_failed()
            time.sleep(0.01)

Leaving._wait_for_all = wait_and
"""
    job = mpirun(3, PROGRAM + program, 1, "SIGKILL")
    assert job.rc == 0, job


def test_group_of_a_dead_rank_says_so():
    body = """
dies()
try:
    dist.barrier()
except dist.RankFailedError:
    for call in (dist.barrier, lambda: dist.all_reduce(np.ones(3)), lambda: dist.isend(np.ones(3), dst=0).wait(),
                 lambda: dist.all_reduce(np.ones(1 << 20), async_op=True).wait(), lambda: dist.new_group([me])):
        try:
            call()
        except dist.RankFailedError as error:
            assert "died" in str(error), error
        else:
            raise AssertionError(call)
    old = dist.group.WORLD
    dist.shrink_group([])
    dist.barrier()
    try:
        dist.barrier(old)
    except ValueError as error:
        assert "has been destroyed" in str(error), error
    sys.stdout.write("all said so\\n")
"""
    job = mpirun(3, PROGRAM + body, 1, "SIGKILL")
    assert job.rc == 0 and job.stdout.count("all said so") == 2, job


@pytest.mark.parametrize(
    ("options", "coll", "expected"),
    [
        ([], None, "end the job"),
        (["--with-ft", "ulfm"], None, "the others go on"),
        (["--with-ft", "ulfm"], "^han,adapt", "the others go on"),
        (["--with-ft", "ulfm"], "^sm", "end the job: MPI was started without OMPI_MCA_coll=^han,adapt"),
    ],
)
def test_info_tells_what_becomes_of_the_others(options, coll, expected):
    command = [*launcher.launch(2, options), sys.executable, "-m", "mpiddp", "info", "--json"]
    with Program(command, {"OMPI_MCA_coll": coll}) as job:
        done = job.wait(60)
    assert done.rc == 0, done
    assert json.loads(done.stdout)["dead_ranks"].startswith(expected), done


EPOCHS = 5
OPTIONS = ("--epochs", str(EPOCHS), "--batch-size", "96", "--lr", "0.02")
# VICTIMS names forward passes, of trials and tests too, and the ranks that die in them: "0:20,2:50".
MODEL = """
import itertools, os, signal
from mpiddp import nn

forwards = itertools.count(1)
victims = dict(pair.split(":") for pair in os.environ["VICTIMS"].split(",") if pair)

class Dying(nn.Module):
    def forward(self, x):
        if next(forwards) == int(victims.get(os.environ["OMPI_COMM_WORLD_RANK"], 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        return x

def plain():
    return nn.Sequential(Dying(), nn.Flatten(), nn.Linear(784, 20), nn.ReLU(), nn.Linear(20, 10))

def normed():
    return nn.Sequential(Dying(), nn.Flatten(), nn.Linear(784, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 10))
"""


def train(ranks: int, output: Path, *options: str, victims: str = "") -> Program:
    (output.parent / "model.py").write_text(MODEL)
    command = [sys.executable, "-m", "mpiddp", "train", *OPTIONS, "--output", output, *options]
    launch = launcher.launch(ranks, ["--with-ft", "ulfm"])
    return Program([*launch, *map(str, command)], {"VICTIMS": victims}, cwd=output.parent)


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def parameters(output: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(output / "model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folders = {}

    def run(*options: str) -> Path:
        if options not in folders:
            folders[options] = tmp_path_factory.mktemp("undisturbed") / "run"
            with train(2, folders[options], *options) as job:
                done = job.wait(120)
            assert done.rc == 0, done
        return folders[options]

    return run


@pytest.mark.parametrize(
    ("ranks", "victims", "options"),
    [
        pytest.param(2, [1], ("--model", "model:plain"), id="the last of two", marks=pytest.mark.long),
        pytest.param(3, [0], ("--model", "model:normed", "--sync-batchnorm"), id="the first, with batch norm"),
        pytest.param(
            4,
            [0, 2],
            ("--model", "model:plain", "--accumulate", "3", "--optimizer", "adamw", "--lr", "0.001"),
            id="two, one after the other",
            marks=pytest.mark.long,
        ),
    ],
)
def test_training_goes_on_as_if_nothing_had_happened(tmp_path, undisturbed, ranks, victims, options):
    expected, output = undisturbed(*options), tmp_path / "run"
    rng = np.random.default_rng(SEED)
    moments = [int(rng.integers(40 * count + 3, 40 * count + 40)) for count in range(len(victims))]
    chosen = ",".join(f"{victim}:{moment}" for victim, moment in zip(victims, moments, strict=True))
    with train(ranks, output, *options, victims=chosen) as job:
        done = job.wait(120)
    assert done.rc == 0, f"victims {chosen}: {done}"
    assert re.findall(r"going on after step \d+ with (\d) of (\d) ranks", done.stderr) == [
        (str(ranks - count), str(ranks - count + 1)) for count in range(1, len(victims) + 1)
    ], f"victims {chosen}: {done}"
    # The same global batches, so the same up to the order of additions.
    for name, x in parameters(expected).items():
        np.testing.assert_allclose(parameters(output)[name], x, rtol=1e-2, atol=1e-3, err_msg=f"{name} ({chosen})")
    losses, undisturbed_losses = ([each["loss"] for each in metrics(folder)] for folder in (output, expected))
    np.testing.assert_allclose(losses, undisturbed_losses, rtol=1e-3, err_msg=f"victims {chosen}")
    assert [each["epoch"] for each in metrics(output)] == list(range(1, EPOCHS + 1))


# Rank 1 dies after testing an epoch, which rank 2 completes and rank 0 has not completed when it hears of that.
BETWEEN = """
import os, signal, sys, time
from mpiddp import cli
from mpiddp import distributed as dist
from mpiddp.distributed.groups import default_group
from mpiddp.mpi.lazy import MPI
from mpiddp.training.trainer import Trainer

evaluate = Trainer.evaluate

def interrupted(self, loader):
    tally = evaluate(self, loader)
    if dist.get_world_size() == 3:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while dist.get_rank() == 0:
            MPI.COMM_SELF.Iprobe()
            default_group().monitor.check()
            time.sleep(0.01)
    return tally

Trainer.evaluate = interrupted
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""


def test_epoch_that_one_had_completed_and_another_had_not_is_in_all_files(tmp_path):
    output = tmp_path / "run"
    job = mpirun(3, BETWEEN, *OPTIONS, "--epochs", "2", "--log-ranks", "--output", output, timeout_s=120)
    assert job.rc == 0 and "going on after step 15 with 2 of 3 ranks" in job.stderr, job
    assert [each["epoch"] for each in metrics(output)] == [1, 2]
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step-0000000015", "step-0000000030"]
    waits = re.findall(r"this rank waited (\S+) s", "".join(file.read_text() for file in (output / "logs").iterdir()))
    assert waits and all(float(each) >= 0 for each in waits), waits


def test_deadline_holds_when_the_rank_that_knew_it_has_died(tmp_path):
    options = ("--model", "model:plain", "--epochs", "100000", "--max-time", "15", "--margin", "1")
    with train(3, tmp_path / "run", *options, victims="0:20") as job:
        done = job.wait(60)
    assert done.rc == 75 and "with 2 of 3 ranks" in done.stderr and "--max-time on rank" in done.stdout, done


# Rank 1 dies in the middle of a step, completed by rank 0 and not by rank 2 when they hear of that.
BEHIND = """
import os, signal, sys, time
from mpiddp import cli
from mpiddp import distributed as dist
from mpiddp.distributed.groups import default_group
from mpiddp.mpi.lazy import MPI
from mpiddp.training.train_step import TrainStep

update, steps, train_step = TrainStep._update, 0, None

def interrupted(self, *args):
    global steps, train_step
    steps, train_step = steps + 1, self
    if steps == 8:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while dist.get_rank() == 2:
            MPI.COMM_SELF.Iprobe()
            default_group().monitor.check()
            time.sleep(0.01)
    return update(self, *args)

TrainStep._update = interrupted
code = cli.main(["train", *sys.argv[1:]])
whole = b"".join(p.data.tobytes() for p in train_step.model.module.parameters())
sys.stdout.write(f"ended with {hash(whole)}\\n")
sys.exit(code)
"""


def test_ranks_go_on_as_one_when_one_had_completed_the_step_and_another_had_not(tmp_path):
    options = (*OPTIONS, "--dropout", "0", "--compress", "powersgd", "--powersgd-start", "9")
    job = mpirun(3, BEHIND, *options, timeout_s=120, PYTHONHASHSEED="0")
    assert job.rc == 0 and "going on after step 8 with 2 of 3 ranks" in job.stderr, job
    ended = re.findall("^ended with .*$", job.stdout, re.M)
    assert len(ended) == 2 and len(set(ended)) == 1, job


def test_sharded_optimizer_cannot_go_on_without_its_shards(tmp_path):
    with train(3, tmp_path / "run", "--model", "model:plain", "--zero", victims="1:30") as job:
        done = job.wait(60)
    assert done.rc == 1 and "RankFailedError: rank 1 of 3 died" in done.stderr, done


# Rank 0's program has ended when rank 1 dies.
ONE_HAS_ENDED = """
if me != 0:
    dies()
    try:
        dist.recv(np.ones(1), src=1)
    except dist.RankFailedError as error:
        {again}
        dist.barrier()
        sys.stdout.write(f"{{me}} is rank {{dist.get_rank()}} of {{dist.get_world_size()}}\\n")
"""


SHRINK = "dist.shrink_group(error.ranks)"


@pytest.mark.parametrize("again", thinned([SHRINK, "dist.destroy_process_group(); dist.init_process_group()"], SHRINK))
def test_rank_that_has_ended_is_no_part_of_the_new_world(again):
    job = mpirun(4, PROGRAM + ONE_HAS_ENDED.format(again=again), 1, "SIGKILL")
    assert job.rc == 0 and "Traceback" not in job.stderr, job
    assert sorted(job.stdout.splitlines()) == ["2 is rank 0 of 2", "3 is rank 1 of 2"], job


# The revocations of a failure arrive in any order: here only the group's, which may be the first.
REVOKED = """
import time
import numpy as np
import mpiddp as dist

dist.init_process_group()
group = dist.new_group()
try:
    if dist.get_rank() == 0:
        time.sleep(0.2)
        for comm in group.link.comms:
            comm.Revoke()
        dist.barrier()
    else:
        dist.all_reduce(np.ones({count}), group=group, async_op={async_op}){wait}
except dist.RankFailedError as error:
    print("told:", error, flush=True)
dist.shrink_group([])
dist.all_reduce(np.ones(3))
"""


@pytest.mark.parametrize("call", thinned(["3", "3, async", "65536, async"], "3, async"))
def test_revoked_group_is_the_news_of_a_failure(call):
    count, _, later = call.partition(", ")
    program = REVOKED.format(count=count, async_op=bool(later), wait=".wait()" if later else "")
    job = mpirun(2, program)
    assert job.rc == 0 and job.stdout.count("told: a rank of 2 died") == 2, job
