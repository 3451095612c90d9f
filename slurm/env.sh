# shellcheck shell=bash
# This file sets up your environment, and chooses how ranks are started. All scripts here source it.
#
# Edit this part once for your centre: the modules that the environment was built with, then the environment itself.
# A job inherits the environment of the shell that you submit from, so modules that are loaded there need no line here.
#
#   any centre, Open MPI    module load openmpi python
#   Cray (Slingshot)        module load cray-mpich-abi cray-python      GPUs: see MPICH_GPU_SUPPORT_ENABLED below
#   Intel MPI               module load intel-mpi python; export I_MPI_PMI_LIBRARY=/usr/lib64/libpmi2.so
#
# source "$HOME/venvs/mpiddp/bin/activate"

# GPUs on Cray: MPI takes device pointers only with its GTL library (module load craype-accel-nvidia80 or the like).
# export MPICH_GPU_SUPPORT_ENABLED=1

# These may be set from outside as well, e.g. MPIDDP_LAUNCH=mpirun sbatch slurm/train_cpu.sbatch:
PYTHON=${PYTHON:-python3}                  # the interpreter of the environment
MPIDDP_LAUNCH=${MPIDDP_LAUNCH:-auto}       # auto, mpirun, or a plugin of `srun --mpi=list`: pmix, pmi2, cray_shasta
MPIDDP_RESTARTS=${MPIDDP_RESTARTS:-0}         # how often a step that ends badly is started again in the same job
export SLURM_WAIT=${SLURM_WAIT:-60}        # seconds that a step lives on after its first rank has ended

# ---- nothing to edit below

# Slurm's warning, SIGUSR1, may come before the ranks have started.
warned=''
# shellcheck disable=SC2034 # requeue.sbatch asks for it
terminated=''
trap 'warned=yes' USR1
stopped=75 # the exit code of mpiddp train after it has saved a checkpoint because of a signal

fail() { # MESSAGE...
    printf 'slurm/env.sh: %s\n' "$@" >&2
    exit 1
}

# Newer versions of Slurm do not hand --cpus-per-task on from the job to its steps.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SRUN_CPUS_PER_TASK}
# SLURM_JOB_END_TIME is the end of the job, for --max-time slurm. Slurm sets it by itself since 23.02.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
ends=$(scontrol show job "${job:-$SLURM_JOB_ID}" | sed -n 's/.* EndTime=\([0-9][0-9T:-]*\).*/\1/p' | tail -n 1) || true
if [ -n "$ends" ] && ends=$(date -d "$ends" +%s); then export SLURM_JOB_END_TIME=$ends; fi
# With PYTHONUNBUFFERED Python writes each argument of print by itself, and the lines of different ranks mix.
unset PYTHONUNBUFFERED

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command -v "$PYTHON" > /dev/null || fail "there is no $PYTHON: load a module or activate an environment in $here/env.sh"
if ! "$PYTHON" -c 'import mpiddp' 2> /dev/null; then
    export PYTHONPATH="${here%/*}${PYTHONPATH:+:$PYTHONPATH}"
    why=$("$PYTHON" -c 'import mpiddp' 2>&1) || fail "$PYTHON cannot import mpiddp: ${why##*$'\n'}" \
        "activate its environment in $here/env.sh, or before sbatch"
fi
# This must not start MPI, because the batch script is not a rank.
library=$(MPI4PY_RC_INITIALIZE=0 "$PYTHON" -c 'from mpi4py import MPI; print(MPI.Get_library_version().strip("\0"))' 2>&1) ||
    fail "$PYTHON cannot load MPI: ${library##*$'\n'}" "load the module that mpi4py was built with, in $here/env.sh"
library=${library%%$'\n'*}
library=${library%%,*}

offers() { # PLUGIN: succeeds if this Slurm has the plugin
    srun --mpi=list 2>&1 | grep -qwF -- "$1"
}

# Prints the mpirun of the MPI library. An MPI wheel puts it beside Python; other libraries have it on PATH.
beside_python() {
    local beside
    beside=$(dirname "$(command -v "$PYTHON")")/mpirun
    if [ -x "$beside" ]; then echo "$beside"; else command -v mpirun; fi
}

choose_launcher() { # sets MPIDDP_LAUNCH
    local plugin
    case $library in
        *"Open MPI"*) plugin=pmix ;;
        *CRAY*) plugin=cray_shasta ;;
        # Under srun, Intel's library has to be told where Slurm's PMI is; under its own mpirun it need not.
        *Intel*) plugin=${I_MPI_PMI_LIBRARY:+pmi2} ;;
        *) plugin=pmi2 ;;
    esac
    if [ -n "$plugin" ] && offers "$plugin"; then
        MPIDDP_LAUNCH=$plugin
    elif beside_python > /dev/null; then
        MPIDDP_LAUNCH=mpirun
    else
        fail "$library wants ${plugin:+srun --mpi=$plugin or }its mpirun, and neither is here:" \
            "$(srun --mpi=list 2>&1 | tr -s '[:space:]' ' ')"
    fi
}

launcher() { # sets the array `start`
    if [ "$MPIDDP_LAUNCH" = mpirun ]; then
        start=("$(beside_python)") || fail "MPIDDP_LAUNCH=mpirun, but there is no mpirun beside $PYTHON nor on PATH"
        # Open MPI would bind each rank to one core, whatever --cpus-per-task says.
        if [[ $library == *"Open MPI"* ]]; then start+=(--bind-to none); fi
    else
        offers "$MPIDDP_LAUNCH" || fail "this Slurm has no plugin MPIDDP_LAUNCH=$MPIDDP_LAUNCH:" \
            "$(srun --mpi=list 2>&1 | tr -s '[:space:]' ' ')"
        # With --kill-on-bad-exit a rank that dies ends the step. Without it, pmi2 lets the other ranks wait until the
        # time limit.
        start=(srun "--mpi=$MPIDDP_LAUNCH" --kill-on-bad-exit=1 --cpu-bind=cores)
    fi
}

check_launcher() { # starts two ranks, and fails if they do not find each other
    if [ "${SLURM_NTASKS:-1}" = 1 ]; then return; fi
    local two=("${start[@]}" -n 2) said
    if [ "${start[0]}" = srun ]; then two+=(--quiet); fi
    if said=$("${two[@]}" "$PYTHON" -c 'from mpi4py import MPI; raise SystemExit(MPI.COMM_WORLD.size != 2)' 2>&1); then
        return
    fi
    fail "${start[*]} does not start $library as one job, each rank is alone or fails." \
        "Leave MPIDDP_LAUNCH=$MPIDDP_LAUNCH away, or set it to pmix (Open MPI), pmi2 (MPICH, Intel MPI), cray_shasta" \
        "(Cray) or mpirun; mpirun has to be that of $library." \
        "This Slurm has: $(srun --mpi=list 2>&1 | tr -s '[:space:]' ' ')" \
        "What was said: $(head -n 12 <<< "$said")"
}

if [ "$MPIDDP_LAUNCH" = auto ]; then choose_launcher; fi
launcher
check_launcher
if [ "$MPIDDP_RESTARTS" != 0 ]; then
    start=("$PYTHON" -m mpiddp run --restarts "$MPIDDP_RESTARTS" -- "${start[@]}")
fi
echo "$library, started by ${start[*]}, OMP_NUM_THREADS=$OMP_NUM_THREADS" >&2


# Starts the command on all ranks, hands Slurm's warning (SIGUSR1) on to them, and returns their exit code.
run() { # COMMAND...
    local pid
    if [ -n "$warned" ]; then return "$stopped"; fi
    "${start[@]}" "$@" &
    pid=$!
    trap 'warned=yes; kill -USR1 $pid || true' USR1
    trap 'terminated=yes; kill -TERM $pid || true' TERM
    # A trapped signal ends `wait` while the ranks go on, so wait again.
    while kill -0 "$pid" 2> /dev/null; do wait "$pid" || true; done
    trap 'warned=yes' USR1
    trap - TERM
    wait "$pid"
}
