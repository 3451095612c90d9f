"""The probe for device pointers, whose job ends well, crashes, hangs, lies or never begins."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpiddp.bench import probe
from mpiddp.bench.job import job as group
from mpiddp.bench.operations import mpiddp
from mpiddp.mpi import cuda_aware
from mpiddp.mpi.cuda_aware import KINDS, Support, lowest
from mpiddp.training.ranks import of_any_rank

BEGINS = "import os, signal, sys, time\nprint('probe\\'s nodes: one node', flush=True)\n"
SAYS = BEGINS + "print('probe\\'s library: mpich-5.0.2-abc', flush=True)\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDDP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def job(**scripts):
    """Return a command for each kind: a script that plays the job."""
    return lambda kind: [sys.executable, "-c", scripts.get(kind, scripts["else_"])]


RIGHT = SAYS + "print('probe\\'s outcome: tried it', flush=True)\n"


def test_success(cache):
    found = probe.run(job(else_=RIGHT))
    assert set(found) == set(KINDS)
    assert all(
        answer.yes and answer.reason.startswith("a probe tried it (2 ranks on one node, ") for answer in found.values()
    )
    assert (cache / "device-pointers-3-mpich-5.0.2-abc.json").exists()
    assert cuda_aware.probed("mpich-5.0.2-abc") == found


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (SAYS + "sys.stderr.write('a\\nBAD TERMINATION\\n'); sys.exit(139)", "ended by SIGSEGV: BAD TERMINATION"),
        (SAYS + "os.kill(os.getpid(), signal.SIGSEGV)", "a probe was ended by SIGSEGV"),
        (SAYS + "sys.exit('cuIpcOpen failed')", "a probe ended with exit code 1: cuIpcOpen failed"),
        (SAYS, "a probe ended with exit code 0: it said nothing"),
        (RIGHT + "os.abort()", "a probe was ended by SIGABRT"),
        (SAYS + "print('probe\\'s outcome: got wrong values: a reduce')", "got wrong values: a reduce (2 ranks on one"),
        ("print('[1,2]\\nnoise {')\n" + SAYS + "sys.exit(3)", "exit code 3"),
    ],
)
def test_failure_of_one_kind_alone(script, reason):
    found = probe.run(job(point_to_point=RIGHT, else_=script))
    assert found["point_to_point"].yes and not found["collectives"].yes
    assert reason in found["collectives"].reason


def test_a_job_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    script = SAYS + (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )

    key, answer = probe._try([sys.executable, "-c", script], limit_s=3)
    assert key == "mpich-5.0.2-abc"
    assert answer.reason.startswith("a probe did not end in 3 s") and not answer.yes
    child = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if not _alive(child):
            break
        time.sleep(0.1)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.mpi(min_size=2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "named"), [("point_to_point", "all_to_all_list"), ("collectives", "reduce_scatter")])
def test_a_wrong_result_is_named(kind, named, monkeypatch):
    def bad(buffers, algorithm):
        return (lambda: None) if buffers.operation == named else mpiddp(buffers)

    monkeypatch.setattr(probe, "_ARRAYS", [(3001, "int32"), (3001, "complex64"), (200_003, "bool")])
    with group():
        assert probe.wrong(kind) is None
        monkeypatch.setattr(probe, "mpiddp", bad)
        assert (of_any_rank(probe.wrong(kind)) or "").startswith(f"{named} (sum) of ")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("import sys; sys.exit('no MPI library')", "it ended with exit code 1: no MPI library"),
        ("print('probe\\'s fault: CuPy is not installed')", "could not do it: CuPy is not installed"),
        (BEGINS + "sys.exit('no memory for a board')", "it ended with exit code 1: no memory for a board"),
    ],
)
def test_a_job_that_tried_nothing_has_no_outcome(script, why, cache):
    with pytest.raises(probe.UsageError, match=why):
        probe.run(job(else_=script))
    assert not cache.exists()


def test_no_launcher(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(probe.UsageError, match="no mpiexec"):
        probe.job_command("collectives")


def test_the_cache_is_of_one_library():
    assert cuda_aware.probed("this-one") == {}
    probe._remember("this-one", "collectives", Support(True, "tried"))
    probe._remember("another", "point_to_point", Support(True, "tried"))
    assert cuda_aware.probed("this-one") == {"collectives": Support(True, "tried")}
    probe._remember("this-one", "point_to_point", Support(False, "crashed"))
    probe._remember("this-one", "collectives", Support(False, "now it crashes"))
    assert cuda_aware.probed("this-one") == {
        "collectives": (False, "now it crashes"),
        "point_to_point": (False, "crashed"),
    }


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "other", "kinds": {}}', '{"collectives": 1}'])
def test_a_damaged_cache_says_nothing(text, cache):
    cache.mkdir()
    (cache / "device-pointers-3-this-one.json").write_text(text)
    assert cuda_aware.probed("this-one") == {}


def test_two_builds_of_a_version_have_two_keys(monkeypatch):
    def key(text, path):
        monkeypatch.setattr(cuda_aware, "MPI", SimpleNamespace(Get_library_version=lambda: text))
        monkeypatch.setattr(cuda_aware, "library_path", lambda: path)
        return cuda_aware.library_key()

    monkeypatch.setattr(cuda_aware, "library_name", lambda: "MPICH 5.0.2")
    keys = [key("MPICH", "a"), key("MPICH", "b"), key("MPICH --with-cuda", "a")]
    assert keys[0].startswith("mpich-5.0.2-") and keys[0] == key("MPICH", "a")
    monkeypatch.setenv("UCX_TLS", "sm,self")
    assert len({*keys, key("MPICH", "a")}) == 4


def test_the_lowest_answer_counts():
    yes, no = Support(True, "asked"), Support(False, "crashed")
    assert lowest([yes, yes], 1) == yes
    assert lowest([yes, no, yes], 0) == lowest([yes, no, yes], 2) == (False, "rank 1 cannot: crashed")
    assert lowest([yes, no, yes], 1) == no


def test_loaded_libraries(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 12 /opt/mpi/lib/libmpi.so.12.5\n"
        "7f01-7f02 rw-p 00000000 08:01 12 /opt/mpi/lib/libmpi.so.12.5\n"
        "7f02-7f03 r-xp 00000000 08:01 13 /opt/with space/libmpi_gtl_cuda.so.0\n"
        "7f03-7f04 rw-p 00000000 00:00 0\n"
        "7f04-7f05 rw-p 00000000 00:00 0 [heap]\n"
    )
    assert cuda_aware.loaded_libraries("libmpi.so", maps=maps) == ["/opt/mpi/lib/libmpi.so.12.5"]
    assert cuda_aware.loaded_libraries("libmpi_gtl_cuda", maps=maps) == ["/opt/with space/libmpi_gtl_cuda.so.0"]
    assert cuda_aware.loaded_libraries("libcuda", maps=maps) == []
    assert cuda_aware.loaded_libraries("libmpi", maps=tmp_path / "none") == []
