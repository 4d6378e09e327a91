/* The layout of the state file. Everything in it is read and written under its mutex. */
#ifndef MGPU_SIM_SHARED_H
#define MGPU_SIM_SHARED_H

#include "state.h"

#include <pthread.h>
#include <stdatomic.h>

#define SHARED_MAGIC 0x6d677075u
#define SHARED_VERSION 1u

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
    _Atomic int fault; /* also read without the mutex */
    uint64_t used_bytes;
    uint64_t now_ns; /* how far the timeline has been worked out, CLOCK_MONOTONIC */
    unsigned int waiting; /* contexts with work, in turn from the front */
    int queue[SIM_CONTEXTS];
    uint64_t slice_left_ns;
    struct bucket buckets[SIM_BUCKETS];
};

struct slot {
    uint64_t born; /* 0: free; else unlike that of any owner before */
    uint64_t bytes[SIM_CARDS];
    unsigned int contexts[SIM_CARDS];
};

struct context {
    bool taken;
    int slot;
    unsigned int card;
    uint64_t submitted, done;
    uint64_t left_ns[SIM_QUEUE];  /* of work n at n % SIM_QUEUE */
    uint64_t ended_ns[SIM_QUEUE]; /* of work that is done, likewise */
};

/* Memory that its owner has handed out by IPC. Charged to `holder`: the owner while it has it,
 * after that one of the importers. */
struct export {
    uint64_t id; /* 0: free; told to importers */
    unsigned int card;
    uint64_t bytes;
    int holder;
    bool owned; /* the holder is still the one that allocated it */
    unsigned int importers;
    int importer[SIM_IMPORTERS];
};

struct shared {
    unsigned int magic, version;
    pthread_mutex_t mutex;
    uint64_t reaped_ns;
    uint64_t births;
    struct shared_card cards[SIM_CARDS];
    struct slot slots[SIM_SLOTS];
    struct context contexts[SIM_CONTEXTS];
    uint64_t exported;
    struct export exports[SIM_EXPORTS];
};

/* state.c */
struct shared *sim_lock(void);
void sim_unlock(void);
/* Give back what dead processes held. Under the mutex. */
void sim_reap(void);
int sim_own_slot(void);
pid_t sim_slot_pid(int slot);
uint64_t sim_now_ns(void);

/* exports.c, under the mutex: what becomes of exports when a process dies. */
void exports_leave(struct shared *shared, int slot);

/* timeline.c, under the mutex */
void timeline_advance(struct shared *shared, unsigned int card, uint64_t until_ns);
void timeline_drop(struct shared *shared, int context);
void timeline_rebuild(struct shared *shared);

#endif
