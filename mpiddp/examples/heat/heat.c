/* A solver of the heat equation on a square that streams its solutions: it knows MPI and one header of mpiddp.
   heat SIMULATIONS [SEED]: each simulation has five random temperatures, an initial one and those of the four sides. */
#include "mpiddp_stream.h"

enum { N = 16, STEPS = 100, EVERY = 5 };

static float uniform(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(*state >> 40) / (1 << 24);
}

int main(int argc, char **argv) {
    int rank, sent = 1;
    int64_t simulation, step;
    float x[6], u[N][N], next[N][N];
    mpiddp_stream stream;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    uint64_t state = (argc > 2 ? strtoull(argv[2], NULL, 10) : 1) * 1000 + rank;
    mpiddp_stream_open(&stream, MPI_COMM_WORLD, MPIDDP_TAG, "x float32 6; u float32 16 16; simulation int64; step int64");
    const void *sample[] = {x, u, &simulation, &step};
    for (simulation = 0; simulation < atoi(argv[1]) && sent >= 0; simulation++) {
        for (int i = 0; i < 5; i++) x[i] = uniform(&state);
        for (int i = 0; i < N; i++)
            for (int j = 0; j < N; j++)
                u[i][j] = i == 0 ? x[1] : i == N - 1 ? x[2] : j == 0 ? x[3] : j == N - 1 ? x[4] : x[0];
        memcpy(next, u, sizeof u);
        for (step = 1; step <= STEPS && sent >= 0; step++) {
            for (int i = 1; i < N - 1; i++)
                for (int j = 1; j < N - 1; j++)
                    next[i][j] = u[i][j] + 0.2f * (u[i - 1][j] + u[i + 1][j] + u[i][j - 1] + u[i][j + 1] - 4 * u[i][j]);
            memcpy(u, next, sizeof u);
            x[5] = (float)step / STEPS;
            if (step % EVERY == 0) sent = mpiddp_stream_put(&stream, sample);
        }
    }
    mpiddp_stream_close(&stream);
    return MPI_Finalize();
}
