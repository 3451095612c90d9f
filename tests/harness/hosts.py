"""Several hosts on this machine: ``Hosts``, network namespaces joined by a switch.

Each has its own host name (h1, h2, ...), address and interface, whose rate can be limited. mpirun reaches them by an
agent in the place of ssh. Needs root, and ``ip`` and ``tc`` (Debian's iproute2).
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness import launcher

PACKAGES = "iproute2"
# As ssh: options, host, and a command line for a shell there. The host has a name of its own, names have addresses, and
# memory ends with the host.
_AGENT = """\
#!/bin/bash
while [[ "$1" == -* ]]; do
    case $1 in -l | -o | -p | -i | -F) shift 2 ;; *) shift ;; esac
done
host=${{1#*@}}
shift
exec ip netns exec "{prefix}$host" unshare --uts --mount sh -c '
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2" /etc/hosts
exec sh -c "$3"
' sh "$host" {folder}/hosts "$*"
"""


def why_not() -> str | None:
    """Return why no hosts can be made here, or None."""
    tools = ("ip", "setpriv", "tc", "unshare")
    missing = [name for name in tools if shutil.which(name, path=_search_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install {PACKAGES}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Hosts(1):
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {' '.join(error.cmd)}: {error.stderr.strip()}"


def _search_path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def call(command: str, check: bool = True) -> str:
    env = {**os.environ, "PATH": _search_path()}
    done = subprocess.run(command.split(), env=env, capture_output=True, text=True, check=check, timeout=30)
    return done.stdout


class Hosts:
    """``count`` hosts h1 to hN on one switch; a context manager."""

    def __init__(self, count: int) -> None:
        self.names = [f"h{i + 1}" for i in range(count)]
        self._folder = Path(tempfile.mkdtemp(prefix="mpiddp-hosts-"))
        self._prefix = self._folder.name + "-"
        self.agent = self._folder / "agent"

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        switch = self._space("switch")
        lines = ["127.0.0.1 localhost"]
        for space in map(self._space, ("switch", *self.names)):
            call(f"ip netns add {space}")
            call(f"ip -n {space} link set lo up")
        call(f"ip -n {switch} link add bridge type bridge")
        call(f"ip -n {switch} link set bridge up")
        for number, name in enumerate(self.names, 1):
            space, address = self._space(name), f"10.77.0.{number}"
            lines.append(f"{address} {name}")
            call(f"ip -n {space} link add eth0 type veth peer name {name} netns {switch}")
            call(f"ip -n {space} address add {address}/24 dev eth0")
            call(f"ip -n {space} link set eth0 up")
            call(f"ip -n {switch} link set {name} master bridge up")
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")
        self.agent.write_text(_AGENT.format(prefix=self._prefix, folder=self._folder))
        self.agent.chmod(0o755)

    def __exit__(self, *_: object) -> None:
        for space in map(self._space, (*self.names, "switch")):
            with contextlib.suppress(OSError):
                call(f"ip netns delete {space}", check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _space(self, name: str) -> str:
        return self._prefix + name

    def lose(self, name: str, crash: bool) -> None:
        """Take a host off the network, and, in a crash, kill all that runs there."""
        call(f"ip -n {self._space('switch')} link set {name} down")
        if crash:
            for pid in call(f"ip netns pids {self._space(name)}").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def mend(self, name: str) -> None:
        call(f"ip -n {self._space('switch')} link set {name} up")

    def limit(self, rate: str) -> None:
        """E.g. to ``1gbit``."""
        shape = f"root tbf rate {rate} burst 128kb latency 20ms"
        for name in self.names:
            call(f"tc -n {self._space(name)} qdisc replace dev eth0 {shape}")
            call(f"tc -n {self._space('switch')} qdisc replace dev {name} {shape}")

    def block(
        self, ranks: int, options: Iterable[str] = (), before: Iterable[str | Path] = (), *, cyclic: bool = False
    ) -> tuple[list[str | Path], dict[str, str]]:
        """Return the words before a command, and variables, that start equal parts of the ranks on each host in turn.

        ``options`` are the launcher's, ``before`` the words of a program that starts it.
        """
        mpiexec = launcher.mpiexec()
        assert mpiexec is not None, launcher.NO_MPIEXEC
        slots = -(-ranks // len(self.names))
        if launcher.is_open_mpi():
            hosts = ",".join(f"{name}:{slots}" for name in self.names)
            mapping = f"{'node' if cyclic else 'slot'}:OVERSUBSCRIBE"
            where = ["--prtemca", "plm_ssh_agent", str(self.agent), "--host", hosts, "--map-by", mapping]
        else:
            hosts = ",".join(f"{name}:{1 if cyclic else slots}" for name in self.names)
            where = ["-launcher", "rsh", "-launcher-exec", str(self.agent), "-hosts", hosts]
        # The launcher ends its ranks, however this process ends.
        words = ["setpriv", "--pdeathsig", "TERM", self.agent, self.names[0]]
        words += ["exec", *before, mpiexec, *options, *where, "-n", str(ranks)]
        # UCX sees one machine, and would go by its memory.
        return words, {"UCX_TLS": "tcp,self", "PATH": _search_path()}

    def cyclic(self, *how: Any) -> tuple[list[str | Path], dict[str, str]]:
        """As `block`, one rank a host in turns."""
        return self.block(*how, cyclic=True)


@functools.cache
def mpi_library() -> str:
    """Return the name of the MPI library, asked in another process: this one is no rank."""
    code = "from mpi4py import MPI; print(MPI.Get_library_version().strip(chr(0)))"
    first = launcher.job("-c", code, MPI4PY_RC_INITIALIZE="0").stdout.split("\n")[0].split(",")[0]
    return " ".join(first.split())
