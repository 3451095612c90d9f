/* Feeds mpiddp.data.Stream from C or C++. It needs MPI only; the README beside it describes the messages. */
#ifndef MPIDDP_STREAM_H
#define MPIDDP_STREAM_H
#include <ctype.h>
#include <mpi.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MPIDDP_TAG = 31000, MPIDDP_MAX_FIELDS = 32, MPIDDP_WAIT = 0, MPIDDP_DROP = 1, MPIDDP_STOP = 2 };
typedef struct { int rank, stopped, ended; int64_t credits, sent; } mpiddp_trainer;
typedef struct {
    MPI_Comm comm;
    int tag, fields, bytes[MPIDDP_MAX_FIELDS], trainers, known, stopped, ended, next, mode;
    int64_t dropped, slowed;
    double look; /* time at which `put` next looks for messages of the trainers */
    mpiddp_trainer *trainer;
} mpiddp_stream;

/* Tell a trainer that it gets no more samples. The last trainer also learns how many were dropped or had to wait. */
static void mpiddp_stream_end(mpiddp_stream *s, mpiddp_trainer *to) {
    if (to->ended++) return;
    int last = ++s->ended == s->trainers;
    int64_t end[3] = {to->sent, last ? s->dropped : 0, last ? s->slowed : 0};
    MPI_Send(end, 3, MPI_INT64_T, to->rank, s->tag + 3, s->comm);
}

/* Receive one message of trainer `rank`, which may be MPI_ANY_SOURCE: credits, a mode, the number of trainers. */
static void mpiddp_stream_hear(mpiddp_stream *s, int rank) {
    int64_t news[3];
    MPI_Status status;
    int i = 0;
    MPI_Recv(news, 3, MPI_INT64_T, rank, s->tag, s->comm, &status);
    if (!s->trainer) s->trainer = (mpiddp_trainer *)calloc(s->trainers = (int)news[2], sizeof(mpiddp_trainer));
    while (i < s->known && s->trainer[i].rank != status.MPI_SOURCE) i++;
    if (i == s->known) s->trainer[s->known++].rank = status.MPI_SOURCE;
    s->trainer[i].credits += news[0];
    if (news[1] == MPIDDP_STOP) {
        s->stopped += s->trainer[i].stopped = 1;
        mpiddp_stream_end(s, &s->trainer[i]);
    } else s->mode = (int)news[1];
}

/* Receive one message, if there is any, of a trainer that has not stopped. A message of a trainer that has stopped
   belongs to its next stream. */
static int mpiddp_stream_news(mpiddp_stream *s) {
    int news = 0;
    for (int i = 0; i < s->known && !news; i++) {
        if (s->trainer[i].stopped) continue;
        MPI_Iprobe(s->trainer[i].rank, s->tag, s->comm, &news, MPI_STATUS_IGNORE);
        if (news) mpiddp_stream_hear(s, s->trainer[i].rank);
    }
    return news;
}

/* Wait for the trainers, and send them the fields of a sample, such as "u float32 64 64; step int64". */
static void mpiddp_stream_open(mpiddp_stream *s, MPI_Comm comm, int tag, const char *fields) {
    const char *c = fields;
    memset(s, 0, sizeof *s);
    s->comm = comm, s->tag = tag, s->trainers = 1;
    while (*c && s->fields < MPIDDP_MAX_FIELDS) { /* a name, a dtype that ends with its bits, dimensions */
        long bytes = 1;
        while (isspace((unsigned char)*c)) c++;
        while (*c && !isspace((unsigned char)*c)) c++;
        while (isspace((unsigned char)*c)) c++;
        while (*c && *c != ';' && !isdigit((unsigned char)*c) && !isspace((unsigned char)*c)) c++;
        if (isdigit((unsigned char)*c)) bytes = strtol(c, (char **)&c, 10) / 8;
        while (isspace((unsigned char)*c) || isdigit((unsigned char)*c))
            if (isspace((unsigned char)*c)) c++;
            else bytes *= strtol(c, (char **)&c, 10);
        s->bytes[s->fields++] = (int)bytes;
        if (*c == ';') c++;
    }
    while (s->known < s->trainers) mpiddp_stream_hear(s, MPI_ANY_SOURCE);
    for (int i = 0; i < s->known; i++)
        MPI_Send(fields, (int)strlen(fields), MPI_CHAR, s->trainer[i].rank, tag + 1, comm);
}

/* Send a sample, given as a pointer for each field. Return 1 if it was sent, 0 if it was dropped, and -1 if the
   trainers want no more samples. */
static int mpiddp_stream_put(mpiddp_stream *s, const void *const *sample) {
    mpiddp_trainer *to = NULL;
    for (int waits = 0;;) {
        to = NULL;
        for (int i = 0; i < s->trainers && !to; i++) {
            mpiddp_trainer *each = &s->trainer[(s->next + i) % s->trainers];
            if (each->credits > 0 && !each->stopped) to = each;
        }
        if (to && MPI_Wtime() < s->look) break; /* to look for messages costs as much as to send a short sample */
        s->look = MPI_Wtime() + 0.005;
        if (mpiddp_stream_news(s)) continue;
        if (to) break;
        if (s->stopped == s->trainers) return -1;
        if (s->mode == MPIDDP_DROP) return s->dropped++, 0;
        s->slowed += !waits++;
    }
    s->next = (int)(to - s->trainer + 1) % s->trainers;
    to->credits--, to->sent++;
    if (s->fields == 1) {
        MPI_Send(sample[0], s->bytes[0], MPI_BYTE, to->rank, s->tag + 2, s->comm);
    } else { /* no copy: MPI sends the arrays from where they are */
        MPI_Aint at[MPIDDP_MAX_FIELDS];
        MPI_Datatype together;
        for (int i = 0; i < s->fields; i++) MPI_Get_address((void *)sample[i], &at[i]);
        MPI_Type_create_hindexed(s->fields, s->bytes, at, MPI_BYTE, &together);
        MPI_Type_commit(&together);
        MPI_Send(MPI_BOTTOM, 1, together, to->rank, s->tag + 2, s->comm);
        MPI_Type_free(&together);
    }
    return 1;
}

/* Tell the trainers that there are no more samples, and wait for their answers. */
static void mpiddp_stream_close(mpiddp_stream *s) {
    for (int i = 0; i < s->trainers; i++) mpiddp_stream_end(s, &s->trainer[i]);
    while (s->stopped < s->trainers) mpiddp_stream_news(s);
    free(s->trainer);
}
#endif
