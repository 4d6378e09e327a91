/* Whose process is it: the container of the running task. */
#ifndef MGPU_WHOSE_H
#define MGPU_WHOSE_H

#include "maps.h"

/* The cgroup that the running task is followed in: its own entry, else that of its process, as the
 * kernel reports a process that moves by its main thread alone. NULL: it is not followed. */
static __always_inline __u64 *mgpu_followed(void)
{
	__u64 task = bpf_get_current_pid_tgid();
	__u32 tid = task, tgid = task >> 32;
	__u64 *cgroup = followed.lookup(&tid);

	return cgroup || tid == tgid ? cgroup : followed.lookup(&tgid);
}

/* Followed tasks first (cgroup v1, kernels without ancestor ids), then the task's own cgroup and
 * its ancestors. NULL: no container's. The arguments are constants: what this kernel lets a program
 * of the caller's kind ask for. Where it does not tell ancestors, the agent puts the cgroups inside a
 * container's into `bound` too. */
static __always_inline struct mgpu_bound *mgpu_whose_by(int task_ids, int ancestors)
{
	__u64 *cgroup = task_ids ? mgpu_followed() : 0, id;
	struct mgpu_bound *found;

	if (cgroup) {
		id = *cgroup;
		return bound.lookup(&id);
	}
	id = bpf_get_current_cgroup_id();
	found = bound.lookup(&id);
	MGPU_LOOP (int level = 1; ancestors && level <= MGPU_MAX_LEVELS; level++) {
		if (found)
			break;
		id = bpf_get_current_ancestor_cgroup_id(level);
		if (!id)
			break;
		found = bound.lookup(&id);
	}
	return found;
}

#ifdef MGPU_NO_ANCESTORS
#define MGPU_ANCESTORS 0
#else
#define MGPU_ANCESTORS 1
#endif

static __always_inline struct mgpu_bound *mgpu_whose(void)
{
	return mgpu_whose_by(1, MGPU_ANCESTORS);
}

#endif
