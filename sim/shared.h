/* The layout of the state file, and what its users share.
 *
 * What a process holds is in its slot: written by it alone, read by all, without the mutex. So a
 * process that is stopped or frozen at any point never keeps another from its memory or figures.
 * All else is written under the mutex, which survives the death of its owner. */
#ifndef MGPU_SIM_SHARED_H
#define MGPU_SIM_SHARED_H

#include "state.h"

#include <pthread.h>
#include <stdatomic.h>

#define SHARED_MAGIC 0x6d677075u
#define SHARED_VERSION 2u

struct bucket {
    uint64_t number; /* its start is number * SIM_BUCKET_NS on CLOCK_MONOTONIC */
    uint64_t busy_ns;
    unsigned int users;
    struct {
        int slot;
        uint64_t born; /* of the slot: another owner of it is another user */
        uint64_t busy_ns;
    } user[SIM_BUCKET_USERS];
};

struct shared_card {
    _Atomic int fault;
    uint64_t now_ns;      /* how far the timeline has been worked out, CLOCK_MONOTONIC */
    unsigned int waiting; /* contexts with work, in turn from the front */
    int queue[SIM_CONTEXTS];
    uint64_t slice_left_ns;
    struct bucket buckets[SIM_BUCKETS];
};

struct slot {
    _Atomic uint64_t born; /* 0: free; else unlike that of any owner before */
    _Atomic uint64_t bytes[SIM_CARDS];
    _Atomic unsigned int contexts[SIM_CARDS];
};

struct context {
    bool taken;
    int slot;
    unsigned int card;
    uint64_t submitted, done;
    uint64_t left_ns[SIM_QUEUE];  /* of work n at n % SIM_QUEUE */
    uint64_t ended_ns[SIM_QUEUE]; /* of work that is done, likewise */
};

/* Memory that its owner has handed out by IPC; it is not in the owner's slot any more. It counts
 * for `holder`: the owner while it has it, after that one of the importers. */
struct export {
    _Atomic uint64_t id; /* 0: free; told to importers */
    unsigned int card;
    uint64_t bytes;
    _Atomic int holder;
    bool owned; /* the holder is still the one that allocated it */
    _Atomic unsigned int importers;
    int importer[SIM_IMPORTERS];
};

struct shared {
    unsigned int magic, version;
    pthread_mutex_t mutex;
    uint64_t reaped_ns;
    uint64_t births, exported;           /* numbers given out so far */
    _Atomic int slots_end, exports_end;  /* behind the last that was ever in use */
    struct shared_card cards[SIM_CARDS];
    struct slot slots[SIM_SLOTS];
    struct context contexts[SIM_CONTEXTS];
    struct export exports[SIM_EXPORTS];
};

/* state.c */
struct shared *sim_shared(void);
struct shared *sim_lock(void);
/* NULL when the mutex was not to be had in time. */
struct shared *sim_lock_within_ms(unsigned int ms);
void sim_unlock(void);
/* Give back what dead processes held. Under the mutex. */
void sim_reap(struct shared *shared);
/* This process's slot, taken if need be; a negative errno. The second form: under the mutex. */
int sim_own_slot(void);
int sim_own_slot_locked(void);
/* Whether the slot's owner lives, and its PID in this process's namespace. */
bool sim_slot_alive(int slot, pid_t *pid);
uint64_t sim_now_ns(void);

/* exports.c */
/* Bytes of exports on a card that count for a slot; for -1: for any living process. */
uint64_t exports_bytes(struct shared *shared, unsigned int card, int slot);
/* What becomes of exports when a process dies. Under the mutex. */
void exports_leave(struct shared *shared, int slot);

/* timeline.c, under the mutex */
void timeline_advance(struct shared *shared, unsigned int card, uint64_t until_ns);
void timeline_drop(struct shared *shared, int context);
void timeline_rebuild(struct shared *shared);

#endif
