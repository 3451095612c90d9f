/* stream_sender BYTES COUNT ROUNDS: in each round COUNT messages of BYTES go through a stream, then by MPI_Send. */
#include "mpiddp_stream.h"
#include <stdio.h>

int main(int argc, char **argv) {
    int bytes = atoi(argv[1]), count = atoi(argv[2]), rounds = atoi(argv[3]);
    char fields[64], *sample = calloc(bytes, 1);
    const void *fields_of_sample[] = {sample};
    mpiddp_stream stream;
    MPI_Init(&argc, &argv);
    snprintf(fields, sizeof fields, "x uint8 %d", bytes);
    while (rounds--) {
        MPI_Recv(NULL, 0, MPI_BYTE, 1, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        mpiddp_stream_open(&stream, MPI_COMM_WORLD, MPIDDP_TAG, fields);
        for (int i = 0; i < count; i++) mpiddp_stream_put(&stream, fields_of_sample);
        mpiddp_stream_close(&stream);
        MPI_Recv(NULL, 0, MPI_BYTE, 1, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (int i = 0; i < count; i++) MPI_Send(sample, bytes, MPI_BYTE, 1, 1, MPI_COMM_WORLD);
    }
    free(sample);
    return MPI_Finalize();
}
