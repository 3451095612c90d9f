/* A solver that starts MPI, and later a Python interpreter for the ranks of a communicator of its own. */
#include <Python.h>
#include <mpi.h>

static void solve(int round) { /* its own collective, which ranks without Python call as well */
    int rank, size, sum = -1, mine;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    mine = rank + round;
    MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (sum != size * (size - 1) / 2 + size * round) MPI_Abort(MPI_COMM_WORLD, 3);
}

int main(int argc, char **argv) {
    int rank, level, round;
    char text[256];
    MPI_Comm part;
    MPI_Init_thread(NULL, NULL, argc > 3 ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_split(MPI_COMM_WORLD, rank > 0 ? 0 : MPI_UNDEFINED, -rank, &part);
    if (rank > 0) {
        Py_Initialize();
        snprintf(text, sizeof text, "import sys; sys.path[:0] = %s; communicator = %d", argv[2], (int)MPI_Comm_c2f(part));
        PyRun_SimpleString(text);
    }
    for (round = 0; round < 3; round++) {
        solve(round);
        if (rank > 0) {
            snprintf(text, sizeof text, "step = %d; exec(open('%s').read())", round, argv[1]);
            PyRun_SimpleString(text);
        }
    }
    if (rank > 0) Py_FinalizeEx();
    solve(round);
    MPI_Finalize();
    printf("solver %d is through\n", rank);
    return 0;
}
