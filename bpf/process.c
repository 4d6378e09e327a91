/* The life of processes: what one held leaves with it, and who follows into a container.
 *
 * A process is dropped when its main thread's task is freed: then its files, and with them the
 * driver's memory, are closed for certain (sched_process_exit comes before that). Where the agent
 * runs it asks for this earlier, when it sees a zombie.
 *
 * The kernel passes an event over when another BPF program, or a system call on a map, is under way
 * on that CPU (trace_call_bpf), which an interrupt such as RCU's makes possible. So the agent sweeps,
 * and a new task of the same number begins with nothing.
 */
#include <uapi/linux/bpf.h>
#include <uapi/linux/ptrace.h>

#include "calls.h"
#include "charge.h"

static __always_inline void drop_share(__u32 tgid, __u32 share_id)
{
	struct mgpu_held_key key = {.tgid = tgid, .share_id = share_id};
	struct mgpu_count *count = counts.lookup(&share_id);
	struct mgpu_limit *limit = limits.lookup(&share_id);
	struct mgpu_held *mine = held.lookup(&key);
	__u64 *extra = unseen.lookup(&key);

	if (mine && count)
		__sync_fetch_and_add(&count->used_bytes, -mine->bytes);
	if (extra && limit)
		__sync_fetch_and_add(&limit->unseen_bytes, -*extra);
	held.delete(&key);
	unseen.delete(&key);
}

/* Its objects stay behind under its stamp, which no later process has; the agent sweeps them. */
static __always_inline void drop_process(__u32 tgid)
{
	struct mgpu_process *process = processes.lookup(&tgid);
	struct mgpu_process gone;

	if (!process)
		return;
	gone = *process;
	if (processes.delete(&tgid))
		return; /* somebody else drops it */
	MGPU_LOOP (int i = 0; i < MGPU_MAX_SHARES; i++) {
		if (i >= gone.share_count)
			break;
		drop_share(tgid, gone.share_ids[i]);
	}
}

/* A field of a tracepoint's record. The offsets come from the kernel's own format files. */
#define FIELD(ctx, type, offset) (*(type *)((char *)(ctx) + (offset)))

/* sched_process_free */
int mgpu_task_freed(void *ctx)
{
	__u32 tid = FIELD(ctx, __u32, FREE_PID);

	drop_process(tid);
	followed.delete(&tid);
	return 0;
}

/* sched_process_exit: of one thread. What it had reserved stays charged to its process, and the
 * main thread stays followed as long as it is a zombie: the others may be followed by it. */
int mgpu_task_exit(void *ctx)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 tid = id;

	calls.delete(&id);
	threads.delete(&id);
	if (tid != mgpu_tgid())
		followed.delete(&tid);
	return 0;
}

/* sched_process_exec. A new program holds nothing of what the old one allocated: its descriptors and
 * its address space are gone. A thread that executes takes over its leader's PID. */
int mgpu_task_exec(void *ctx)
{
	__u32 tid = FIELD(ctx, __u32, EXEC_PID), old = FIELD(ctx, __u32, EXEC_OLD_PID);
	__u64 id = bpf_get_current_pid_tgid();
	__u64 *cgroup, copy;

	drop_process(mgpu_tgid());
	threads.delete(&id);
	if (old != tid) {
		cgroup = followed.lookup(&old);
		if (cgroup) {
			copy = *cgroup;
			followed.update(&tid, &copy);
			followed.delete(&old);
		}
	}
	return 0;
}

/* sched_process_fork: what a followed task starts, thread or process, is followed too. Whatever is
 * known under the number of the new task is of one that has ended unseen (trace_call_bpf). */
int mgpu_task_fork(void *ctx)
{
	__u32 child = FIELD(ctx, __u32, FORK_CHILD);
	__u64 *cgroup = mgpu_followed(), copy;

	drop_process(child);
	if (cgroup) {
		copy = *cgroup;
		followed.update(&child, &copy);
	} else if (followed.lookup(&child)) {
		followed.delete(&child);
	}
	return 0;
}

/* cgroup_attach_task: whoever moves into a bound v1 cgroup (docker exec) is followed. */
int mgpu_task_attach(void *ctx)
{
	__u64 id = FIELD(ctx, __u64, ATTACH_ID) | ((__u64)FIELD(ctx, __u32, ATTACH_ROOT) << MGPU_ROOT_SHIFT);
	__u32 tid = FIELD(ctx, __u32, ATTACH_PID);

	if (bound.lookup(&id))
		followed.update(&tid, &id);
	return 0;
}

/* Runs when the agent asks (BPF_PROG_TEST_RUN): counters can be changed with atomics only here. */
int mgpu_command(struct __sk_buff *ctx)
{
	struct mgpu_command command = {};

	if (bpf_skb_load_bytes(ctx, 0, &command, sizeof(command)))
		return 0;
	if (command.verb == MGPU_DROP_PROCESS)
		drop_process(command.tgid);
	return 0;
}
