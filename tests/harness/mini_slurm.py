"""A Slurm cluster of its own on this machine: ``MiniSlurm``, for tests and for trying out batch scripts.

``PYTHONPATH=tests python -m harness.mini_slurm bash`` opens a shell with sbatch and squeue. Nodes n1 and n2 are slurmds
on 127.0.0.1, in one temporary folder, without systemd, cgroups and accounting. Needs root and Debian's slurmctld,
slurmd, slurm-client, slurm-wlm-basic-plugins, munge and libpmix2.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import launcher

PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libpmix2"
_DAEMONS = ("munged", "slurmctld", "slurmd")
# Debian's plugin opens libpmix.so here, a name of the development package alone.
_PMIX = Path("/usr/lib/x86_64-linux-gnu/pmix2/lib")
_PENDING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SIGNALING")

# A job that is requeued waits until its credential has expired, 120 s by default. pmix wants a folder for each node.
_CONFIGURATION = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=cred_expire=5,socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=100000,bf_interval=1
MailProg=/bin/true
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=3600
KillWait=5
TmpFS={folder}/tmp/%n
PropagateResourceLimits=NONE
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
GresTypes=gpu
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=16 Boards=1 SocketsPerBoard=1"
    " CoresPerSocket=16 ThreadsPerCore=1 RealMemory=1000 Gres=gpu:2 State=UNKNOWN\n"
)
_NAMES = ("n1", "n2")
# Each node has a host name of its own, with an address, so that MPI takes the nodes for two. Shared memory of its own
# too: MPICH names files there by job and step, alike on both nodes.
_START_NODE = """\
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/hosts" /etc/hosts
if [ -d "$2/pmix" ]; then mount --bind "$2/pmix" "$3"; fi
exec slurmd -D -N "$1" -f "$2/slurm.conf"
"""


def why_not() -> str | None:
    """Return why no cluster can be started here, or None."""
    missing = [name for name in _DAEMONS if shutil.which(name, path=_search_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install {PACKAGES}"
    if os.geteuid() != 0:
        return "a Slurm of its own needs root"
    if subprocess.run(["unshare", "--uts", "--mount", "hostname", "n1"], capture_output=True).returncode != 0:
        return "unshare cannot make a host name of its own here (CAP_SYS_ADMIN)"
    return None


def _search_path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


@dataclass(frozen=True)
class JobEnd:
    """End of a job, or of a task of an array: Slurm's state, exit code, requeues, and output."""

    state: str
    rc: int
    restarts: int
    log: str

    @classmethod
    def of(cls, task: Mapping[str, str]) -> JobEnd:
        log = Path(task["StdOut"])
        said = log.read_text(errors="replace") if log.exists() else ""
        return cls(task["JobState"], int(task["ExitCode"].split(":")[0]), int(task["Restarts"]), said)

    def __str__(self) -> str:
        return f"{self.state}, exit code {self.rc}, {self.restarts} requeues\n{self.log}"


class MiniSlurm:
    """The running cluster, a context manager; nodes claim 16 processors, shared by jobs, and 2 GPUs, idle files."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mini-slurm-"))
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _search_path()}
        self._daemons: list[launcher.Program] = []
        self._write_configuration()

    def _write_configuration(self) -> None:
        folder = self.folder
        folder.chmod(0o755)
        ports = _free_ports(1 + len(_NAMES))
        lines = _CONFIGURATION.format(folder=folder, host=socket.gethostname().split(".")[0], ports=ports)
        for name, port in zip(_NAMES, ports[1:], strict=True):
            lines += _NODE.format(name=name, port=port)
            for part in ("spool", "tmp"):
                (folder / part / name).mkdir(parents=True)
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(lines)
        for gpu in range(2):
            os.mknod(folder / f"gpu{gpu}", 0o20666, os.makedev(1, 3))  # as /dev/null
        (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-1]\n")
        hosts = "".join(f"127.0.0.1 {name}\n" for name in _NAMES)
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + hosts)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        if _PMIX.is_dir() and not (_PMIX / "libpmix.so").exists():
            shutil.copytree(_PMIX, folder / "pmix", symlinks=True)
            (folder / "pmix" / "libpmix.so").symlink_to("libpmix.so.2")

    def __enter__(self) -> MiniSlurm:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        at = self.folder
        munge = [f"--{name}={at}/munge.{name}" for name in ("socket", "key-file", "pid-file", "log-file", "seed-file")]
        munge[1] = f"--key-file={at}/munge.key"
        self._daemon("munged", "--foreground", "--force", *munge)
        self._until("munge is up", (at / "munge.socket").exists)
        self._daemon("slurmctld", "-D", "-c", "-f", f"{at}/slurm.conf")
        for name in _NAMES:
            self._daemon("unshare", "--uts", "--mount", "sh", "-c", _START_NODE, "sh", name, str(at), str(_PMIX))
        self._until("the nodes are idle", lambda: self._idle_nodes() == len(_NAMES))

    def _daemon(self, *command: str) -> None:
        self._daemons.append(launcher.Program(command, self.env))

    def _idle_nodes(self) -> int:
        found = self._call(["sinfo", "-h", "-o", "%T %D"]).stdout
        return sum(int(count) for count in re.findall(r"^idle (\d+)", found, re.M))

    def _until(self, what: str, holds) -> None:
        deadline = time.monotonic() + 30
        while not holds():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons):
                said = "\n".join("".join(daemon.output) for daemon in self._daemons)
                raise RuntimeError(f"the Slurm cluster did not come so far that {what}:\n{said}")
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) > 1:
            self._call(["scancel", "--user=root"])
            with contextlib.suppress(RuntimeError):
                self._until("no job runs", lambda: not self._call(["squeue", "-h"]).stdout)
        for daemon in reversed(self._daemons):
            daemon.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _call(self, command: Sequence[str], **options) -> subprocess.CompletedProcess[str]:
        env = {**launcher.environment(self.env), **options.pop("env", {})}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, **options)

    def ask(self, *command: str, **options) -> str:
        done = self._call(command, **options)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}{done.stdout}")
        return done.stdout

    def sbatch(self, folder: Path, *arguments: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Submit from ``folder``, and return the job's number; ``arguments`` are options, the script, and its own."""
        folder.mkdir(parents=True, exist_ok=True)
        told = self.ask("sbatch", "--parsable", *map(str, arguments), cwd=folder, env=dict(env or {}))
        return told.strip()

    def wait_all(self, job: str, timeout_s: float = 60) -> list[JobEnd]:
        """Wait for the end of a job, or of all tasks of an array; after ``timeout_s`` it is cancelled."""
        deadline = time.monotonic() + timeout_s
        while True:
            told = self.ask("scontrol", "show", "job", "-o", job)
            tasks = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in told.splitlines()]
            if all(task["JobState"] not in _PENDING for task in tasks):
                break
            if time.monotonic() > deadline:
                self.ask("scancel", job)
                break
            time.sleep(0.1)
        return [JobEnd.of(task) for task in sorted(tasks, key=lambda task: int(task.get("ArrayTaskId", 0)))]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


if __name__ == "__main__":
    fault = why_not()
    if fault:
        sys.exit(fault)
    with MiniSlurm() as cluster:
        print(f"export SLURM_CONF={cluster.env['SLURM_CONF']}", flush=True)
        code = subprocess.run(sys.argv[1:] or ["bash"], env={**os.environ, **cluster.env}).returncode
    sys.exit(code)
