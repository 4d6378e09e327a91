/* What the BPF programs and the agent share: the layout of every map. probes/layout.py has the same
 * in Python, and a test compares the two. Sizes in bytes, times in nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef MGPU_H
#define MGPU_H

#include <linux/types.h>

#define MGPU_MAX_CARDS 8    /* cards of one container */
#define MGPU_MAX_LEVELS 16  /* depth of a cgroup below the root that is looked at */
#define MGPU_MAX_STACK 8    /* contexts pushed by one thread that are remembered */

#define MGPU_MAX_SHARES 16  /* that one process was charged to in its life; a power of two */

#define MGPU_CLOSED_MAJORS 6 /* further majors of NVIDIA's, which no container may open */

#define MGPU_ENFORCE_OBSERVE 0
#define MGPU_ENFORCE_KILL 1

/* settings[0]: written by the agent alone. */
struct mgpu_settings {
	__u64 context_bytes; /* what one CUDA context is charged */
	__u32 card_major;    /* of /dev/nvidiaX and nvidiactl; 0: no NVIDIA node is known */
	__u32 ctl_minor;
	__u32 uvm_major;
	__u32 uvm_minor;
	__u32 closed_majors[MGPU_CLOSED_MAJORS]; /* nvidia-caps and the like; 0: none */
};

/* bound[cgroup id]: the container whose own cgroup that is. Written by the agent alone. On cgroup
 * v1 the id is the directory's inode with the hierarchy's number above it. */
#define MGPU_ROOT_SHIFT 56
struct mgpu_card {
	__u32 share_id;
	__u32 minor;
};

struct mgpu_bound {
	__u32 card_count;
	__u32 pad;
	struct mgpu_card cards[MGPU_MAX_CARDS]; /* by index of the device */
};

/* limits[share_id]: written by the agent alone, save that the death of a process takes its part of
 * unseen_bytes away. */
struct mgpu_limit {
	__u64 limit_bytes;
	__u64 unseen_bytes; /* what the driver reports beyond what was counted, all processes */
	__u32 enforcer;
	__u32 pad;
};

/* counts[share_id]: written by the programs alone. */
struct mgpu_count {
	__u64 used_bytes;
	__u64 denials;
	__u64 kills;
	__u64 unrecorded; /* allocations that no map had room to remember */
};

/* processes[tgid]: the shares that a process was charged to, from its first charge on. It may move
 * from one container to another, and a container may be released and bound again around it. */
struct mgpu_process {
	__u64 born_ns; /* tells it from an earlier process of the same PID */
	__u32 share_count;
	__u32 first; /* share of the container that it was last charged in */
	__u32 share_ids[MGPU_MAX_SHARES]; /* a ring */
};

/* held[tgid, share_id], unseen[tgid, share_id] */
struct mgpu_held_key {
	__u32 tgid;
	__u32 share_id;
};

struct mgpu_held {
	__u64 bytes;
	__u64 contexts;
	__u64 denials;
	__u64 calls; /* charges and discharges so far */
};

/* objects[handle, tgid, kind] */
#define MGPU_MEMORY 1   /* a device pointer, array, mipmapped array */
#define MGPU_PHYSICAL 2 /* cuMemCreate: one reference for the handle, one for each mapping */
#define MGPU_MAPPING 3  /* cuMemMap: address -> handle */
#define MGPU_CONTEXT 4  /* a context; bytes: its own and all memory that dies with it */
#define MGPU_PRIMARY 5  /* by device ordinal: handle of the primary context, references */
#define MGPU_POOL 6     /* share_id: of the card that it allocates on, 0 for the host's memory */

struct mgpu_object_key {
	__u64 handle;
	__u32 tgid;
	__u32 kind;
};

struct mgpu_object {
	__u64 bytes;
	__u64 born_ns; /* of the process */
	__u64 context; /* memory: the context it dies with; mapping, primary: the other handle */
	__u64 stamp;   /* of that context, which may be made anew under the same handle */
	__u32 share_id;
	__s32 references;
};

/* calls[pid_tgid]: between entry and return of one libcuda call. */
struct mgpu_call {
	__u64 bytes;  /* reserved at entry */
	__u64 out;    /* where the caller wants the new handle */
	__u64 argument; /* pitch pointer, address, handle: by call */
	__u64 extra;    /* rows, ordinal: by call */
	__u64 born_ns;
	__u64 context;
	__u64 stamp;
	__u32 share_id;
	__u32 kind;
	struct mgpu_object taken; /* out of objects, until the call has told its result */
};

/* threads[pid_tgid]: the stack of current contexts. */
struct mgpu_thread {
	__u32 depth;
	__u32 pad;
	__u64 contexts[MGPU_MAX_STACK];
};

/* ordinals[tgid, ordinal]: which share a CUDA ordinal means, where it is not the n-th card. */
struct mgpu_ordinal_key {
	__u32 tgid;
	__u32 ordinal;
};

/* kills[sequence]: read, logged and deleted by the agent. */
struct mgpu_kill {
	__u64 at_ns;
	__u64 asked_bytes;
	__u64 held_bytes;
	__u64 used_bytes;
	__u64 limit_bytes;
	__u32 share_id;
	__u32 tgid;
	__u32 killed;
	__u32 pad;
	char comm[16];
};

/* uuids[UUID of a card] -> its minor: which card cuDeviceGetUuid spoke of. */
struct mgpu_uuid {
	__u8 bytes[16];
};

/* What the agent has done through BPF_PROG_TEST_RUN of mgpu_command. It comes after an Ethernet
 * header of zeroes, which the kernel takes off before the program sees the data. */
#define MGPU_DROP_PROCESS 1

struct mgpu_command {
	__u32 verb;
	__u32 tgid;
};

#endif
