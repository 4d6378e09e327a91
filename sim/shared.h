/* The layout of the state file, and what its users share.
 *
 * A process may be stopped or frozen at any instruction, and must not hold up the others with it:
 * - What a process holds is written by it alone, read by all, without a lock.
 * - How far a card has got (a `line`) is never changed in place: who works it out does so on a
 *   copy, writes that into a buffer of the card that nobody uses, and makes it the one in force if
 *   no other was faster.
 * - Only births of slots, contexts and exports are under a mutex, which survives its owner's death.
 */
#ifndef MGPU_SIM_SHARED_H
#define MGPU_SIM_SHARED_H

#include "state.h"

#include <pthread.h>
#include <stdatomic.h>

#define SHARED_MAGIC 0x6d677075u
#define SHARED_VERSION 4u
#define SHARED_CELLS 256
#define LINE_MEMBERS 2048
#define LINE_BUFFERS 64

/* A context in a card's line; or, with context -1, what closed contexts of a process have used. */
struct member {
    int context;
    int slot;
    uint64_t born; /* of the slot */
    uint64_t done; /* the number of its last work that is done */
    uint64_t left_ns; /* of the work after that; 0: not begun */
    uint64_t busy_ns;
};

struct line {
    uint64_t now_ns; /* CLOCK_MONOTONIC: how far the card has been followed */
    uint64_t busy_ns;
    uint64_t slice_left_ns; /* of the member whose turn it is */
    unsigned int turn, members;
    struct member member[LINE_MEMBERS];
};

struct shared_card {
    _Atomic int fault;
    _Atomic uint64_t version;              /* changes * LINE_BUFFERS + buffer in force */
    _Atomic uint64_t claims[LINE_BUFFERS]; /* birth of the slot that writes there; 0: free */
    struct line lines[LINE_BUFFERS];
    _Atomic uint64_t totals[SIM_BUCKETS];
    _Atomic uint64_t cells[SIM_BUCKETS][SHARED_CELLS];
    _Atomic uint64_t bytes[SIM_SLOTS]; /* what each process holds */
};

struct slot {
    _Atomic uint64_t born;    /* 0: free; else unlike that of any owner before */
    _Atomic uint64_t changes; /* of its bytes: made << 32 | under way */
    _Atomic unsigned int contexts[SIM_CARDS];
} __attribute__((aligned(64)));

struct work {
    uint64_t at_ns, need_ns;
};

struct ended {
    _Atomic uint64_t number, at_ns;
};

struct context {
    _Atomic bool taken;
    int slot;
    uint64_t born; /* of the slot */
    unsigned int card;
    _Atomic uint64_t submitted;
    struct work work[SIM_QUEUE]; /* work n at n % SIM_QUEUE; by the owner alone */
    struct ended ended[SIM_QUEUE];
};

/* Memory that its owner has handed out by IPC; it is not in the owner's bytes any more. It counts
 * for `holder`: the owner while it has it, after that one of the importers. */
struct export {
    _Atomic uint64_t id; /* 0: free; told to importers */
    _Atomic unsigned int card;
    _Atomic uint64_t bytes;
    _Atomic int holder;
    bool owned; /* the holder is still the one that allocated it */
    _Atomic unsigned int importers;
    _Atomic int importer[SIM_IMPORTERS];
};

/* A limit of the driver's own, of a cgroup on a card. */
struct limit {
    _Atomic uint64_t inode; /* 0: free */
    unsigned int card;
    uint64_t soft, hard;
    char cgroup[SIM_CGROUP_BYTES]; /* its path in the hierarchy */
    char folder[SIM_CGROUP_BYTES]; /* its path for whoever set it */
};

struct shared {
    unsigned int magic, version;
    pthread_mutex_t mutex;
    _Atomic uint64_t reaped_ns;
    uint64_t births, exported;          /* numbers given out so far */
    _Atomic uint64_t export_changes;    /* odd: one is under way */
    _Atomic int slots_end, exports_end; /* behind the last in use */
    _Atomic int contexts_end;           /* behind the last that ever was */
    struct shared_card cards[SIM_CARDS];
    struct slot slots[SIM_SLOTS];
    struct context contexts[SIM_CONTEXTS];
    struct export exports[SIM_EXPORTS];
    struct limit limits[SIM_LIMITS];
};

/* state.c */
struct shared *sim_shared(void);
struct shared *sim_lock(void);
/* NULL when the mutex was not to be had in time. */
struct shared *sim_lock_within_ms(unsigned int ms);
void sim_unlock(void);
/* Give back what dead processes held. Under the mutex. */
void sim_reap(struct shared *shared);
/* The same, but only now and then, and not while somebody keeps the mutex. */
void sim_reap_when_due(void);
/* This process's slot, taken if need be; a negative errno. The second form: under the mutex. */
int sim_own_slot(void);
int sim_own_slot_locked(void);
/* Take one, if that is soon done. */
void sim_want_slot(void);
/* The birth of this process's slot; 0: it has none. */
uint64_t sim_birth(void);
/* Whether the slot's owner lives, and its PID in this process's namespace. */
bool sim_slot_alive(int slot, pid_t *pid);
uint64_t sim_now_ns(void);

/* memory.c: a change of a slot's bytes is between these. */
void memory_begin(int slot);
void memory_end(int slot);

/* exports.c */
/* Bytes of exports on a card that count for a slot; for -1: for any living process. */
uint64_t exports_bytes(unsigned int card, int slot);
/* What becomes of exports when a process dies. Under the mutex. */
void exports_leave(int slot);

/* limits.c */
bool limits_exceeded(unsigned int card);

/* timeline.c */
void timeline_init(struct shared *fresh);
void timeline_child(void);
/* Take the context out. */
void timeline_drop(int context);
/* Card time used in all; and by those in the list, into it. */
uint64_t timeline_busy_ns(unsigned int card, struct sim_use *uses, unsigned int count);
/* Follow the card up to now. */
void timeline_follow(unsigned int card);

/* samples.c */
/* Book `ns` of card time from `start_ns` on for a process, in the buckets that it touches. */
void samples_book(unsigned int card, int slot, uint64_t born, uint64_t start_ns, uint64_t ns);

#endif
