/* Whose process is it: the container of the running task. */
#ifndef MGPU_WHOSE_H
#define MGPU_WHOSE_H

#include "maps.h"

#ifndef MGPU_NO_TASK_ID
/* The cgroup that the running task is followed in: its own entry, else that of its process, as the
 * kernel reports a process that moves by its main thread alone. NULL: it is not followed. */
static __always_inline __u64 *mgpu_followed(void)
{
	__u64 task = bpf_get_current_pid_tgid();
	__u32 tid = task, tgid = task >> 32;
	__u64 *cgroup = followed.lookup(&tid);

	return cgroup || tid == tgid ? cgroup : followed.lookup(&tgid);
}
#endif

/* Followed tasks first (cgroup v1, kernels without ancestor ids), then the task's own cgroup and
 * its ancestors. NULL: no container's. Where the kernel does not tell ancestors, the agent puts the
 * cgroups inside a container's into `bound` too. */
static __always_inline struct mgpu_bound *mgpu_whose(void)
{
	struct mgpu_bound *found;
	__u64 id;
#ifndef MGPU_NO_TASK_ID
	__u64 *cgroup = mgpu_followed();

	if (cgroup) {
		id = *cgroup;
		return bound.lookup(&id);
	}
#endif
	id = bpf_get_current_cgroup_id();
	found = bound.lookup(&id);
#ifndef MGPU_NO_ANCESTORS
	MGPU_LOOP (int level = 1; level <= MGPU_MAX_LEVELS; level++) {
		if (found)
			break;
		id = bpf_get_current_ancestor_cgroup_id(level);
		if (!id)
			break;
		found = bound.lookup(&id);
	}
#endif
	return found;
}

#endif
