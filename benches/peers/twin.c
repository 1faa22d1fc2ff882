/*
 * The measurements of peers.c with MPI calls, as far as MPI has the operations. Rank 0 measures.
 *
 *   twin WHAT [name=value ...]      rtt, ring, one_way, mcast
 */
#define _GNU_SOURCE
#include "measure.h"
#include <mpi.h>

enum { TAG_PING = 1, TAG_PONG };

static struct options o;
static char *block;

static void give(int rank, int tag, long size)
{
    MPI_Send(block, size, MPI_BYTE, rank, tag, MPI_COMM_WORLD);
}

static void take(int rank, int tag, long size)
{
    MPI_Recv(block, size, MPI_BYTE, rank, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static void rtt(int rank)
{
    if (rank > 1)
        return;
    stay_on(o.cores[rank]);
    struct samples trips = samples_for(o.rounds);
    for (int i = -o.warm; i < o.rounds; i++) {
        if (rank == 1) {
            take(0, TAG_PING, o.size);
            give(0, TAG_PONG, o.size);
            continue;
        }
        double begun = now_us();
        give(1, TAG_PING, o.size);
        take(1, TAG_PONG, o.size);
        if (i >= 0)
            note(&trips, now_us() - begun);
    }
    if (rank == 0) {
        tell_copy(o.size);
        tell("rtt", &trips);
    }
}

static void ring(int rank, int ranks)
{
    int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
    struct samples hops = samples_for(o.rounds);
    for (int i = -o.warm; i < o.rounds; i++) {
        if (rank > 0) {
            take(before, TAG_PING, o.size);
            give(next, TAG_PING, o.size);
            continue;
        }
        double begun = now_us();
        give(next, TAG_PING, o.size);
        take(before, TAG_PING, o.size);
        if (i >= 0)
            note(&hops, (now_us() - begun) / ranks);
    }
    if (rank == 0)
        tell("hop", &hops);
}

static void one_way(int rank)
{
    if (rank > 1)
        return;
    stay_on(o.cores[rank]);
    struct samples each = samples_for(o.rounds);
    for (int i = -o.warm; i < o.rounds; i++) {
        double begun = now_us();
        for (int k = 0; k < o.batch; k++) {
            if (rank == 0)
                give(1, TAG_PING, o.size);
            else
                take(0, TAG_PING, o.size);
        }
        if (rank == 1) {
            give(0, TAG_PONG, 1);
            continue;
        }
        take(1, TAG_PONG, 1);
        if (i >= 0)
            note(&each, (now_us() - begun) / o.batch);
    }
    if (rank == 0)
        tell("message", &each);
}

/* A send to one rank and a broadcast to all: the call alone, and until all receivers have acknowledged. */
static void mcast(int rank, int ranks)
{
    struct samples send_call = samples_for(o.rounds), send_all = samples_for(o.rounds);
    struct samples call = samples_for(o.rounds), all = samples_for(o.rounds);
    for (int i = -o.warm; i < o.rounds; i++) {
        double begun = now_us(), returned = begun, there = begun, called = begun;
        if (rank == 0) {
            give(1, TAG_PING, o.size);
            returned = now_us();
            take(1, TAG_PONG, 1);
            there = now_us();
        } else if (rank == 1) {
            take(0, TAG_PING, o.size);
            give(0, TAG_PONG, 1);
        }
        MPI_Bcast(block, o.size, MPI_BYTE, 0, MPI_COMM_WORLD);
        called = now_us();
        for (int k = 1; rank == 0 && k < ranks; k++)
            take(k, TAG_PONG, 1);
        if (rank > 0)
            give(0, TAG_PONG, 1);
        if (rank == 0 && i >= 0) {
            note(&send_call, returned - begun);
            note(&send_all, there - begun);
            note(&call, called - there);
            note(&all, now_us() - there);
        }
    }
    if (rank == 0) {
        tell("send_call", &send_call);
        tell("send_all", &send_all);
        tell("mcast_call", &call);
        tell("mcast_all", &all);
    }
}

int main(int argc, char **argv)
{
    int rank, ranks;
    o = options_of(argc, argv);
    block = block_of(o.size);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (!strcmp(o.what, "rtt"))
        rtt(rank);
    else if (!strcmp(o.what, "ring"))
        ring(rank, ranks);
    else if (!strcmp(o.what, "one_way"))
        one_way(rank);
    else if (!strcmp(o.what, "mcast"))
        mcast(rank, ranks);
    else if (rank == 0)
        fprintf(stderr, "twin: no such thing to measure: %s\n", o.what);
    MPI_Finalize();
    return 0;
}
