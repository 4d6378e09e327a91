/* Charging memory to a share: reserve, commit, give back. No lock and no fetching atomics (kernel
 * 5.4): a reservation is added, then compared, and given back when it was too much, so that two
 * racing requests may both be refused but never both be let through.
 */
#ifndef MGPU_CHARGE_H
#define MGPU_CHARGE_H

#include "whose.h"

#define MGPU_MOST_BYTES (1ULL << 48)

MGPU_MAP("hash", __u32, struct mgpu_limit, limits, 8192, 0);
MGPU_MAP("hash", __u32, struct mgpu_count, counts, 8192, 0);
MGPU_MAP("hash", __u32, struct mgpu_process, processes, 65536, BPF_F_NO_PREALLOC);
MGPU_MAP("hash", struct mgpu_held_key, struct mgpu_held, held, 65536, BPF_F_NO_PREALLOC);
MGPU_MAP("hash", struct mgpu_held_key, __u64, unseen, 65536, BPF_F_NO_PREALLOC);
MGPU_MAP("hash", struct mgpu_object_key, struct mgpu_object, objects, 1048576, BPF_F_NO_PREALLOC);
MGPU_MAP("hash", __u64, struct mgpu_kill, kills, 1024, BPF_F_NO_PREALLOC);

static __always_inline __u32 mgpu_tgid(void)
{
	return bpf_get_current_pid_tgid() >> 32;
}

/* Note the container's shares, so that the process's part leaves them when it dies. One may stand
 * in the ring twice, which does no harm: a search for it would be too much for the verifier. */
static __always_inline void mgpu_join(struct mgpu_process *process, struct mgpu_bound *container)
{
	MGPU_LOOP (int i = 0; i < MGPU_MAX_CARDS; i++) {
		__u32 place = process->share_count & (MGPU_MAX_SHARES - 1);

		if (i >= container->card_count)
			break;
		process->share_ids[place] = container->cards[i].share_id;
		process->share_count++;
	}
	process->first = container->cards[0].share_id;
}

/* The running process, remembered with every share of its container from its first charge on. */
static __always_inline struct mgpu_process *mgpu_process_of(struct mgpu_bound *container)
{
	__u32 tgid = mgpu_tgid();
	struct mgpu_process *process = processes.lookup(&tgid);
	struct mgpu_process fresh = {};

	if (!process) {
		fresh.born_ns = bpf_ktime_get_ns();
		processes.insert(&tgid, &fresh);
		process = processes.lookup(&tgid);
	}
	if (process && process->first != container->cards[0].share_id)
		mgpu_join(process, container);
	return process;
}

/* What the running process holds of a share, from zero on. NULL: no room for one more process. */
static __always_inline struct mgpu_held *mgpu_held_of(__u32 share_id)
{
	struct mgpu_held_key key = {.tgid = mgpu_tgid(), .share_id = share_id};
	struct mgpu_held *mine = held.lookup(&key), none = {};

	if (mine)
		return mine;
	held.insert(&key, &none);
	return held.lookup(&key);
}

/* Both counters; ``bytes`` may be negative. */
static __always_inline void mgpu_change(struct mgpu_held *mine, struct mgpu_count *count, __u64 bytes)
{
	__sync_fetch_and_add(&mine->bytes, bytes);
	__sync_fetch_and_add(&mine->calls, 1);
	__sync_fetch_and_add(&count->used_bytes, bytes);
}

/* Charge what nobody can refuse any more. */
static __always_inline void mgpu_add(__u32 share_id, __u64 bytes)
{
	struct mgpu_count *count = counts.lookup(&share_id);
	struct mgpu_held *mine = mgpu_held_of(share_id);

	if (mine && count)
		mgpu_change(mine, count, bytes);
}

static __always_inline void mgpu_give_back(__u32 tgid, __u32 share_id, __u64 bytes)
{
	struct mgpu_held_key key = {.tgid = tgid, .share_id = share_id};
	struct mgpu_count *count = counts.lookup(&share_id);
	struct mgpu_held *mine = held.lookup(&key);

	if (!mine || !count)
		return; /* both went with the death of the process or with the share */
	mgpu_change(mine, count, -bytes);
}

static __always_inline void mgpu_count_context(__u32 tgid, __u32 share_id, __s64 change)
{
	struct mgpu_held_key key = {.tgid = tgid, .share_id = share_id};
	struct mgpu_held *mine = held.lookup(&key);

	if (mine)
		__sync_fetch_and_add(&mine->contexts, change);
}

/* Leave a record for the agent; it has figures as they were without this request. */
static __always_inline void mgpu_record(struct mgpu_kill *record)
{
	record->at_ns = bpf_ktime_get_ns();
	record->tgid = mgpu_tgid();
	bpf_get_current_comm(&record->comm, sizeof(record->comm));
	kills.insert(&record->at_ns, record);
}

/* Charge before the driver is asked. 0: charged; 1: not charged, as it is over the limit and the
 * process is being killed, or as no driver can grant it. The process must have been made known by
 * mgpu_process_of(). */
static __always_inline int mgpu_reserve(__u32 share_id, __u64 bytes)
{
	struct mgpu_limit *limit = limits.lookup(&share_id);
	struct mgpu_count *count = counts.lookup(&share_id);
	/* no card has more, and adding it could wrap the counter */
	__u64 charged = bytes > MGPU_MOST_BYTES ? 0 : bytes, used;
	struct mgpu_kill record = {.share_id = share_id, .asked_bytes = bytes};
	struct mgpu_held *mine;

	if (!limit || !count || !bytes)
		return 0;
	mine = mgpu_held_of(share_id);
	if (!mine)
		return 1;
	mgpu_change(mine, count, charged);
	used = *(volatile __u64 *)&count->used_bytes + limit->unseen_bytes;
	if (charged && used <= limit->limit_bytes)
		return 0;
	record.held_bytes = mine->bytes - charged;
	record.used_bytes = used - charged;
	record.limit_bytes = limit->limit_bytes;
	record.killed = limit->enforcer == MGPU_ENFORCE_KILL;
	__sync_fetch_and_add(&mine->denials, 1);
	__sync_fetch_and_add(&count->denials, 1);
	if (record.killed) {
		mgpu_change(mine, count, -charged);
		__sync_fetch_and_add(&count->kills, 1);
		bpf_send_signal(9);
	}
	mgpu_record(&record);
	return record.killed || !charged;
}

#endif
