/* The device gate: which NVIDIA nodes a task in a closed cgroup may open or make.
 *
 * Attached with BPF_F_ALLOW_MULTI to the cgroup of every container and to the guarded subtrees. It
 * only ever takes away, and only what is NVIDIA's. Who has no instance may make a node, not open it:
 * runtimes make a container's nodes inside its cgroup before it can be bound (runc 1.1, where it is not
 * let, bind-mounts the host's node of that name instead, which need not be there).
 */
#include <uapi/linux/bpf.h>

#include "whose.h"

/* Kernels before 6.1 let device programs call less than they let those that count. */
#ifdef MGPU_GATE_NO_ANCESTORS
#define GATE_ANCESTORS 0
#else
#define GATE_ANCESTORS 1
#endif
#ifdef MGPU_GATE_NO_TASK_ID
#define GATE_TASK_IDS 0
#else
#define GATE_TASK_IDS 1
#endif

static __always_inline int is_card(struct mgpu_bound *container, __u32 minor)
{
	for (int i = 0; i < MGPU_MAX_CARDS; i++) {
		if (i >= container->card_count)
			break;
		if (container->cards[i].minor == minor)
			return 1;
	}
	return 0;
}

static __always_inline int is_closed(struct mgpu_settings *now, __u32 major)
{
	for (int i = 0; i < MGPU_CLOSED_MAJORS; i++) {
		if (now->closed_majors[i] == major)
			return 1;
	}
	return 0;
}

int mgpu_gate(struct bpf_cgroup_dev_ctx *ctx)
{
	__u32 zero = 0, major = ctx->major, minor = ctx->minor;
	struct mgpu_settings *now = settings.lookup(&zero);
	struct mgpu_bound *container;

	if (!now || (ctx->access_type & 0xffff) != BPF_DEVCG_DEV_CHAR || !major)
		return 1;
	if (major != now->card_major && major != now->uvm_major && !is_closed(now, major))
		return 1;
	container = mgpu_whose_by(GATE_TASK_IDS, GATE_ANCESTORS);
	if (!container)
		return ctx->access_type >> 16 == BPF_DEVCG_ACC_MKNOD;
	if (major == now->card_major && minor == now->ctl_minor)
		return 1;
	if (major == now->uvm_major && minor == now->uvm_minor)
		return 1;
	return major == now->card_major && is_card(container, minor);
}
