/* A solver that starts MPI. All ranks but the first also start a Python interpreter, and train after each of its steps.
     mpicc solver.c -o solver $(python3-config --includes) $(python3-config --ldflags --embed)
     mpirun -np 3 ./solver train.py 101
   solver FILE STEPS [MULTIPLE]: FILE has a function `step`. PYTHONPATH says where mpi4py, NumPy and mpiddp are. */
#include <Python.h>
#include <mpi.h>

enum { CELLS = 32 };
static float heat[CELLS];

static void solve(int step) { /* all ranks make its collective call, also the rank without Python */
    int rank, size, sum = -1, mine;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    mine = rank + step;
    MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (sum != size * (size - 1) / 2 + size * step) MPI_Abort(MPI_COMM_WORLD, 3);
    for (int i = 1; i < CELLS - 1; i++) heat[i] += 0.4f * (heat[i - 1] - 2 * heat[i] + heat[i + 1]);
}

int main(int argc, char **argv) {
    int rank, level, step, steps = atoi(argv[2]);
    char text[512];
    MPI_Comm part;
    MPI_Init_thread(NULL, NULL, argc > 3 ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_split(MPI_COMM_WORLD, rank > 0 ? 0 : MPI_UNDEFINED, -rank, &part);
    heat[0] = 1 + rank;
    if (rank > 0) {
        Py_Initialize();
        snprintf(text, sizeof text, "communicator, address, cells = %d, %zu, %d; exec(open('%s').read())",
                 (int)MPI_Comm_c2f(part), (size_t)heat, CELLS, argv[1]);
        PyRun_SimpleString(text);
    }
    for (step = 0; step < steps; step++) {
        solve(step);
        if (rank > 0) {
            snprintf(text, sizeof text, "step(%d)", step);
            PyRun_SimpleString(text);
        }
    }
    if (rank > 0) Py_FinalizeEx();
    solve(step);
    MPI_Finalize();
    printf("solver %d is through\n", rank);
    return 0;
}
