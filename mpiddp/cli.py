"""The command line. Parsing starts no MPI and imports neither NumPy nor CuPy."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import mpiddp
from mpiddp import launchers, settings
from mpiddp.bench import cli as bench
from mpiddp.cores import limit_blas_threads
from mpiddp.training import config, supervisor
from mpiddp.training.options import UsageError, nearest, refusing

from .faults import flight, where_socket
from .mpi.finalize import running

# A rank that exits with an error before MPI runs may end the whole job. So after an error of usage all ranks but rank 0
# wait this long before they exit, and meanwhile rank 0 reports the error.
_HEAD_START_S = 5.0


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError`, with the nearest option, instead of ending the process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and raise an error for unknown options here, because the parser of a command knows what to suggest."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            option = unknown[0].split("=")[0]
            known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            self.error(f"unknown argument {unknown[0]}{nearest(option, known)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (`{self.prog} --help` lists what there is)")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, whose descriptions are the docstrings of the functions that run them."""
    parser = Parser(prog="python -m mpiddp", description=mpiddp.__doc__.splitlines()[0].replace("`", ""))
    parser.add_argument("--version", action="version", version=mpiddp.__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=run.__doc__)
        command.set_defaults(run=run)
        return command

    config.add_options(add("train", run_train, "train a network on all ranks"))
    info = add("info", run_info, "print MPI, launcher, ranks, cores and GPUs, and what looks wrong with them")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.add_argument(
        "--probe-gpu",
        action="store_true",
        help="try whether MPI takes addresses of GPU memory, in a job of 2 ranks that may crash, and keep the answer",
    )
    supervisor.add_options(add("run", supervisor.run, "run a job, and start it again when it ends badly"))
    where = add("where", run_where, "print what each rank of a running job does")
    where.add_argument(
        "job", nargs="?", help="the name of the job, needed if several run on this machine; this command lists them"
    )
    flight = add("flight", run_flight, "show where the ranks of a job went different ways, from its flight recorder")
    flight.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="the files of all ranks; the job has printed their names"
    )
    bench.add_parser(commands)
    return parser


def run_train(arguments: argparse.Namespace) -> int:
    """Train a network by synchronous SGD. Start it with mpirun -np 4 python -m mpiddp train."""
    options = config.read_options(arguments)
    announced = launchers.launch()
    # With virtual ranks the bits must not depend on the number of cores of a rank, so each rank has one BLAS thread.
    before = 1 if options.virtual_ranks else None
    if before is None and options.resume == "auto" and options.output is not None:
        before = config.resumed_threads(options.output, 1 if announced is None else announced.size - options.spares)
    _limit_threads(before)
    from mpiddp.training import run

    return run.run(options, mpiddp.__version__)


def run_info(arguments: argparse.Namespace) -> int:
    """Print versions, the MPI library, the launcher, each rank's node, cores and GPU, and what looks wrong.

    The command works alone, and under mpirun or srun as a job would be started.
    """
    _limit_threads()
    if arguments.probe_gpu:  # the probe starts a job of its own, which works only before MPI runs in this process
        from mpiddp.bench import probe

        probe.run()
    from mpiddp.training import info

    return info.run(mpiddp.__version__, as_json=arguments.json)


def run_where(arguments: argparse.Namespace) -> int:
    """Print the state and the stacks of all ranks of a job that has a rank on this machine."""
    found = where_socket.ranks()
    jobs = sorted({job for job, _ in found})
    if arguments.job is not None and arguments.job not in jobs:
        raise UsageError(
            f"no job {arguments.job} of yours has a rank on this machine; there are: {', '.join(jobs) or 'none'}"
        )
    if not jobs:
        raise UsageError("no job of yours has a rank on this machine; run this on one of the job's nodes")
    if arguments.job is None and len(jobs) > 1:
        raise UsageError(f"several jobs have ranks on this machine: name one of {', '.join(jobs)}")
    job = arguments.job or jobs[0]
    for _, rank in (each for each in found if each[0] == job):
        text = where_socket.ask(job, rank)
        if text:
            print(text)
            return 0
    raise UsageError(f"no rank of job {job} on this machine answers: they may be stopped, or use MPI without threads")


def run_flight(arguments: argparse.Namespace) -> int:
    """Print, for each group of a job, the first call that not all ranks of the group made.

    The files are those of the job's flight recorder, which the ranks wrote when something went wrong.
    """
    dumps, damaged = [], []
    for path in arguments.files:
        try:
            dumps.append(flight.read(path))
        except ValueError as error:
            damaged.append(str(error))
    if not dumps:
        raise UsageError("; ".join(damaged))
    with refusing("", ValueError):
        print(flight.line_up(dumps))
    for each in damaged:
        print(f"mpiddp: left out: {each}", file=sys.stderr)
    return 0


def _limit_threads(before: int | None = None) -> None:
    """Limit BLAS threads to this rank's share of the node's cores, before NumPy is imported.

    ``before`` is a number of threads to use instead: that of a run that is resumed, or 1 with virtual ranks.
    """
    threads, launch = limit_blas_threads(before), launchers.launch()
    if threads is not None and (launch is None or launch.rank == 0):  # the rank in the launcher's variables
        why = "as before" if before else "its share of the node's cores"
        print(
            f"BLAS threads: {threads} a rank ({why}; OMP_NUM_THREADS sets another number)", file=sys.stderr, flush=True
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code. Rank 0 reports an error of usage in one line on stderr."""
    try:
        arguments = build_parser().parse_args(argv)
        code: int = arguments.run(arguments)
    except (UsageError, settings.SettingError) as error:
        launch = launchers.launch()
        if launch is None or launch.rank == 0:
            print(f"mpiddp: error: {error}", file=sys.stderr, flush=True)
        elif not running() and launch.launcher.ends_with_a_rank:
            time.sleep(_HEAD_START_S)
        return getattr(error, "exit_code", UsageError.exit_code)
    return code
