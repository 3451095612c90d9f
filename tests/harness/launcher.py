"""Programs started by the tests, always under a time limit, never left behind; the standard library only, no MPI."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Future

PLAN = "MPIDDP_TEST_PLAN"
"""Names the file of tests to run and of reports, for ranks of the parent."""
NO_MPIEXEC = (
    f"no mpiexec beside {sys.executable} nor on PATH, and the MPI tests need one: pip install 'mpiddp[mpich]' "
    "(or load the site's MPI module)"
)
TIMED_OUT = 124

PROGRAMS = Path(__file__).parents[1] / "programs"
ULFM = ("--with-ft", "ulfm")
"""Options of Open MPI's mpirun, with which ranks outlive another one."""

JOB = "MPIDDP_TEST_JOB"
"""Set for all processes of a `Program`."""
SHARED = Path("/dev/shm")
_SEGMENTS = ("mpich_shm_*", "sm_segment.*")
"""Shared memory of MPICH and Open MPI, which a killed job leaves, and living ranks map."""
_TRACKER = b"multiprocessing.resource_tracker"
_MAPPED = re.compile(r" (/\S+)$", re.MULTILINE)
YOUNG_S = 2.0
"""Age up to which a living job may have made shared memory without mapping it."""
_TUNING = {
    # Open MPI refuses root and more ranks than cores, and takes a second to look for networks. Version 4 has other
    # names for some of it, which version 5 ignores or knows as well.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_btl": "self,vader,tcp",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "I_MPI_THREAD_YIELD": "3",  # sleeps: with more ranks than cores its other ways take 20 times as long
    # Four ranks with a BLAS pool each would fight for the cores.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HOME": tempfile.gettempdir(),
    # No files, but where a test asks for them.
    "MPIDDP_FLIGHT_RECORDER": "0",
}
# An outer launcher's variables would make ranks of our children.
_OUTER_LAUNCHER = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "SLURM_", "HYDI_", "MPI_LOCAL")
# PYTHONUNBUFFERED makes several writes of one print, and mixes lines of ranks.
_NOT_INHERITED = {
    *("PYTHONUNBUFFERED", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", PLAN, "PMI_FD"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}


def announced_size(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks that a launcher announced, 0 without a launcher.

    A Slurm step of one task, as an interactive shell under ``srun --pty``, is none.
    """
    sizes = [int(env[name]) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if name in env]
    step = int(env.get("SLURM_STEP_NUM_TASKS", "0"))
    return max([*sizes, step if step > 1 else 0])


def mpiexec() -> Path | None:
    """Return the launcher of this environment's MPI, else the one on PATH, else None."""
    beside = Path(sys.executable).parent / "mpiexec"
    if os.access(beside, os.X_OK):
        return beside
    found = shutil.which("mpiexec")
    return Path(found) if found else None


def is_open_mpi() -> bool:
    found = mpiexec()
    return found is not None and not found.with_name("mpiexec.hydra").exists()


def environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return a program's environment; ``extra`` adds variables, or removes those that are None."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OUTER_LAUNCHER) and name not in _NOT_INHERITED
    }
    for name, value in _TUNING.items():
        env.setdefault(name, value)
    search = [str(Path(part).resolve()) for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    checkout = _checkout()
    if checkout and checkout not in search:
        search.insert(0, checkout)
    if search:
        env["PYTHONPATH"] = os.pathsep.join(search)
    for name, new in (extra or {}).items():
        if new is None:
            env.pop(name, None)
        else:
            env[name] = new
    return env


def _checkout() -> str | None:
    """Return the folder that mpiddp is imported from, unless it is installed."""
    spec = importlib.util.find_spec("mpiddp")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = str(Path(next(iter(spec.submodule_search_locations))).resolve().parent)
    installed = {str(Path(sysconfig.get_path(name)).resolve()) for name in ("purelib", "platlib")}
    return None if folder in installed else folder


@dataclass(frozen=True)
class Completed:
    """Exit code (124 when its time was up), output and duration."""

    rc: int
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"exit code {self.rc} after {self.seconds:.1f} s\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}\n---"
        )


def remove_segments(since: float) -> bool:
    """Remove our unmapped shared memory made ``since`` (seconds since 1970); return True if some is too young."""
    found = {}
    for path in (path for pattern in _SEGMENTS for path in SHARED.glob(pattern)):
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() and status.st_mtime >= since:
                found[str(path)] = status.st_mtime
    if not found:
        return False
    young = {path for path, made in found.items() if made > time.time() - YOUNG_S}
    mapped: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped.update(_MAPPED.findall(maps.read_text()))
    for path in found.keys() - mapped - young:
        Path(path).unlink(missing_ok=True)
    return bool(young - mapped)


def new_job() -> str:
    """Return a name for a process's children; names of theirs begin with it."""
    return f"{os.environ.get(JOB, '')}/{uuid.uuid4().hex}"


def members_of(job: str) -> list[int]:
    """Return the ids of living processes whose inherited job's name begins with this."""
    mark = f"{JOB}={job}".encode()
    members = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # A zombie has no environment.
            if any(entry.startswith(mark) for entry in (folder / "environ").read_bytes().split(b"\0")):
                members.append(int(folder.name))
    return members


def kill_members(job: str) -> None:
    """Kill them; multiprocessing's trackers last, which remove the semaphores of the others and end by themselves."""
    for attempt in range(150):
        left = members_of(job)
        for pid in left:
            with contextlib.suppress(OSError):
                if attempt > 100 or _TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(0.02)


class Program:
    """A running command; a context manager that leaves no process of it behind, in whichever session.

    ``echo`` writes to our stdout and stderr, ``scratch`` is a folder for the output, removed at the end.
    """

    def __init__(
        self,
        command: Iterable[str | Path],
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        echo: bool = False,
        scratch: Path | None = None,
    ) -> None:
        self._scratch = scratch or Path(tempfile.mkdtemp(prefix="mpiddp-test-"))
        self._files = [self._scratch / "stdout", self._scratch / "stderr"]
        # Launchers put ranks into sessions of their own; this variable finds them.
        self._job = new_job()
        self._started = time.monotonic()
        self._began = time.time()
        with self._files[0].open("wb") as stdout, self._files[1].open("wb") as stderr:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                # Open MPI cannot start in a killed job's folder, once its process id comes again.
                env={**environment(env), JOB: self._job, "PRTE_MCA_prte_tmpdir_base": str(self._scratch)},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=None if echo else stdout,
                stderr=None if echo else stderr,
                start_new_session=True,
            )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def pid(self) -> int:
        """Of the command itself, not of a rank."""
        return self._process.pid

    @property
    def output(self) -> tuple[str, str]:
        stdout, stderr = (file.read_text(errors="replace") for file in self._files)
        return stdout, stderr

    def poll(self) -> int | None:
        return self._process.poll()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait_for(self, text: str, timeout_s: float = 30, times: int = 1) -> None:
        end = time.monotonic() + timeout_s
        while "".join(self.output).count(text) < times:
            if self.poll() is not None or time.monotonic() > end:
                state = "ended" if self.poll() is not None else f"went on for {timeout_s} s"
                raise AssertionError(f"the program {state} without writing {text!r}:\n" + "\n".join(self.output))
            time.sleep(0.02)

    def wait(self, timeout_s: float) -> Completed:
        """Wait for the end, or kill everything after ``timeout_s``."""
        try:
            rc = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            rc = TIMED_OUT
        seconds = time.monotonic() - self._started
        self.kill()
        stdout, stderr = self.output
        if rc == TIMED_OUT:
            stderr += f"\n[killed by the test: not done after {timeout_s} s]"
        return Completed(rc, stdout, stderr, seconds)

    def kill(self) -> None:
        """End the command and its processes: first as a launcher wants it, then for good."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2)
        kill_members(self._job)
        if self._process.wait(5) != 0:
            remove_segments(self._began)

    close = __exit__

    def members(self) -> list[int]:
        return members_of(self._job)

    def ranks(self) -> list[int]:
        """Return the ids of the living processes that run this Python."""
        interpreter, found = Path(sys.executable).resolve(), []
        for pid in self.members():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/exe").resolve() == interpreter:
                    found.append(pid)
        return sorted(found)

    def rank_0(self) -> int:
        for pid in self.ranks():
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if {b"PMI_RANK=0", b"OMPI_COMM_WORLD_RANK=0"} & set(variables):
                    return pid
        raise AssertionError(f"none of {self.ranks()} is rank 0: {self.output}")

    def pid_of(self, rank: int) -> int:
        """Wait for the rank's line ``pid of RANK: PID.``, and return its process id."""
        self.wait_for(f"pid of {rank}: ")
        return int("".join(self.output).split(f"pid of {rank}: ")[1].split(".")[0])


def launch(ranks: int | None, options: Iterable[str] = ()) -> list[str | Path]:
    """Return the words before a command that start it on this many ranks; none without a launcher."""
    if ranks is None:
        return []
    launcher = mpiexec()
    if launcher is None:
        raise FileNotFoundError(NO_MPIEXEC)
    return [launcher, *options, "-n", str(ranks)]


def start(
    program: str | Path,
    *args: object,
    ranks: int | None = None,
    options: Iterable[str] = (),
    before: Iterable[str | Path] = (),
    on: Callable[..., tuple[list[str | Path], dict[str, str]]] | None = None,
    search: Iterable[str | Path] = (),
    cwd: Path | None = None,
    **env: str | None,
) -> Program:
    """Start Python on ``program``: a name in tests/programs, a file, an option like ``-m``, or source text.

    A context manager: ``with start("waits", "recv", ranks=2) as job: job.wait_for("ready"); job.signal(SIGTERM)``.
    mpiexec starts ``ranks`` with ``options``, here or ``on`` some hosts; None takes no mpiexec. ``before`` are words of
    a program that starts all this, ``search`` folders to import from, and ``env`` variables (None removes one).
    """
    name, scratch = str(program), None
    if name.isidentifier():
        program = PROGRAMS / f"{name}.py"
    elif not isinstance(program, Path) and not name.startswith("-"):
        # A file, and not -c: tracebacks then show the source lines.
        scratch = Path(tempfile.mkdtemp(prefix="mpiddp-test-"))
        program = scratch / "program.py"
        program.write_text(name)
    words, variables = on(ranks, options, before) if on else ([*before, *launch(ranks, options)], {})
    if search:
        found = [str(folder) for folder in search]
        variables["PYTHONPATH"] = os.pathsep.join([*found, *filter(None, [environment().get("PYTHONPATH")])])
    command = [*words, sys.executable, program, *map(str, args)]
    return Program(command, {**variables, **env}, cwd=cwd, scratch=scratch)


def line_of(program: str, text: str) -> int:
    """Return the number of the one line of a program that has ``text``."""
    (number,) = (n for n, line in enumerate((PROGRAMS / f"{program}.py").read_text().splitlines(), 1) if text in line)
    return number


def job(program: str | Path, *args: object, limit_s: float = 60, **how: Any) -> Completed:
    """`start` a job, and wait for its end; kill it after ``limit_s``."""
    with start(program, *args, **how) as started:
        return started.wait(limit_s)


@contextlib.contextmanager
def side_by_side(
    jobs: Mapping[str, Callable[[], Completed]], places: int = 4
) -> Iterator[dict[str, Future[Completed]]]:
    """Run jobs at the same time; those that have not begun at the end never do."""
    pool = ThreadPoolExecutor(places)
    try:
        yield {name: pool.submit(job) for name, job in jobs.items()}
    finally:
        pool.shutdown(cancel_futures=True)
