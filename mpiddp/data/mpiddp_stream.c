/* The C functions that mpiddp_stream.f90 calls. Compile this file with the MPI's mpicc, and link it with the Fortran
   program. */
#include "mpiddp_stream.h"

typedef struct { mpiddp_stream stream; int began; } opened;

void *mpiddp_stream_open_f(const int *comm, int tag, const char *fields) {
    opened *o = (opened *)malloc(sizeof *o);
    int initialized;
    MPI_Initialized(&initialized);
    o->began = !initialized; /* if the program has not called MPI_Init, the stream begins and ends MPI */
    if (o->began) MPI_Init(NULL, NULL);
    mpiddp_stream_open(&o->stream, comm ? MPI_Comm_f2c(*comm) : MPI_COMM_WORLD, tag, fields);
    return o;
}

int mpiddp_stream_put_f(void *o, const void *const *sample) { return mpiddp_stream_put(&((opened *)o)->stream, sample); }

void mpiddp_stream_close_f(void *o) {
    mpiddp_stream_close(&((opened *)o)->stream);
    if (((opened *)o)->began) MPI_Finalize();
    free(o);
}
