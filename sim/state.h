/* The simulated GPUs of this machine: one memory-mapped file that all their users share.
 *
 * $MGPU_SIM_DIR (default /run/mgpu-sim) holds `sim.conf`, what cards there are, and `state`, what
 * is going on. Each process that uses a card owns a slot in the state and an fcntl lock on the
 * slot's byte of one of the files `locks.N`: the kernel drops the lock at any death and tells the
 * owner's PID in the asker's own PID namespace. Who finds a slot without its lock gives back what
 * the dead process held.
 *
 * How a library uses it: sim_attach() once, then sim_conf() for what the cards are, sim_open_node()
 * for whether this process may see one, sim_uses() and sim_busy() for who holds and who used it,
 * sim_fault() before each answer. Nothing here waits for a process that is stopped or frozen but
 * the births of slots, contexts and exports. */
#ifndef MGPU_SIM_STATE_H
#define MGPU_SIM_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define SIM_CARDS 16
#define SIM_SLOTS 4096
#define SIM_CONTEXTS 4096
#define SIM_QUEUE 1024
#define SIM_EXPORTS 1024
#define SIM_IMPORTERS 16
#define SIM_LIMITS 1024
#define SIM_CGROUP_BYTES 256
#define SIM_BUCKETS 64
#define SIM_BUCKET_NS 166666667ull /* 1/6 s: NVML's sample period */
#define SIM_SLICE_NS 2000000ull    /* 2 ms: how long a context runs before the next one's turn */

enum sim_fault { SIM_WELL, SIM_LOST, SIM_UNKNOWN, SIM_TIMEOUT, SIM_HANG, SIM_FAULTS };
extern const char *const sim_fault_names[SIM_FAULTS];

/* From sim.conf; the same for everybody, so not in the shared state. */
struct sim_card_conf {
    char name[96];
    char uuid[48];
    uint64_t memory_bytes;
    uint64_t reserved_bytes;
    unsigned int minor;
    unsigned int pci_bus;
    int capability_major, capability_minor;
};

struct sim_conf {
    char driver_version[32];
    int cuda_version; /* 13000 for 13.0 */
    uint64_t context_bytes;
    char dev_root[256];
    bool preempt; /* a slice's end interrupts a kernel; else it waits for the kernel's end */
    unsigned int cards;
    struct sim_card_conf card[SIM_CARDS];
};

struct sim_use {
    int slot;
    pid_t pid; /* in the caller's PID namespace; 0 when it has none there */
    uint64_t bytes;
    unsigned int contexts;
    uint64_t busy_ns; /* card time since its birth; in snapshots only */
};

/* All cards at one moment. `settled` is false when they would not keep still for it. */
struct sim_snapshot {
    bool settled;
    uint64_t used_bytes[SIM_CARDS];
    uint64_t busy_ns[SIM_CARDS];
    unsigned int uses[SIM_CARDS];
    struct sim_use use[SIM_CARDS][SIM_SLOTS];
};

struct sim_busy {
    int64_t end_ns;   /* CLOCK_REALTIME */
    int slot;         /* -1 for the card as a whole */
    pid_t pid;
    uint64_t busy_ns; /* of SIM_BUCKET_NS */
};

/* 0, or a negative errno. Idempotent. Children of a fork must attach anew to own anything. */
int sim_attach(void);
const struct sim_conf *sim_conf(void);

/* Open the card's node. >= 0: a descriptor; -ENXIO: let through, but no driver behind the node;
 * -EPERM, -EACCES: closed to this process; -ENOENT: there is no node. */
int sim_open_node(unsigned int card);

enum sim_fault sim_fault(unsigned int card);
int sim_set_fault(unsigned int card, enum sim_fault fault);
/* All cards well, and nothing in use but by processes that live. */
void sim_reset(void);

/* Account for memory and contexts of this process. -ENOMEM: the card has not that much left. */
int sim_charge(unsigned int card, uint64_t bytes);
void sim_uncharge(unsigned int card, uint64_t bytes);
uint64_t sim_used(unsigned int card);
/* How many processes use the card; the first `room` of them are written. */
unsigned int sim_uses(unsigned int card, struct sim_use *to, unsigned int room);
void sim_take_snapshot(struct sim_snapshot *to);

/* The driver's own limits, by the folder of a cgroup (limits.c). */
struct sim_limit {
    uint64_t soft, hard, used;
};

/* Whether the simulated driver is one that has them. */
bool sim_has_limits(void);
/* A hard limit of UINT64_MAX: none. Negative errno: -ENOENT, no such cgroup. */
int sim_set_limit(unsigned int card, const char *folder, uint64_t soft, uint64_t hard);
/* -ENODATA: there is none. */
int sim_get_limit(unsigned int card, const char *folder, struct sim_limit *to);
/* The tightest of the limits that this process is under; false: it is under none. */
bool sim_own_limit(unsigned int card, struct sim_limit *to);

/* IPC. An export stays charged to its owner; when the owner gives it up or dies while others have
 * it open, one of them is charged instead. Negative errno on failure. */
int sim_export(unsigned int card, uint64_t bytes, uint64_t *id);
/* -EBUSY: it is this process's own. */
int sim_import(uint64_t id, unsigned int *card, uint64_t *bytes);
/* The owner frees it; an importer closes it. */
void sim_unexport(uint64_t id);
void sim_unimport(uint64_t id);
/* The file with the content of an export, for its owner to make and importers to open. */
void sim_export_path(uint64_t id, char *path, size_t size);

/* A context of this process on a card, with its queue. */
int sim_context_open(unsigned int card);
void sim_context_close(int context);
/* Queue work; its number in the context, from 1, or -EAGAIN while the queue is full. */
int64_t sim_submit(int context, uint64_t work_ns);
/* 0 when work `number` is done, else how many nanoseconds to sleep before asking again. */
uint64_t sim_pending_ns(int context, uint64_t number);
/* How long the oldest work of the context still needs; 0 when there is none. */
uint64_t sim_oldest_ns(int context);
uint64_t sim_submitted(int context);
/* When done work ended (CLOCK_MONOTONIC); 0 when that is no longer known. */
uint64_t sim_ended_ns(int context, uint64_t number);

/* Busy time by whole bucket that ended after since_ns (CLOCK_REALTIME), oldest first. */
unsigned int sim_busy(unsigned int card, bool by_process, int64_t since_ns, struct sim_busy *to,
                      unsigned int room);

#endif
