/* Objects of libcuda: what each call allocates, by handle, and the call that is under way. */
#ifndef MGPU_OBJECTS_H
#define MGPU_OBJECTS_H

#include "calls.h"
#include "charge.h"

MGPU_MAP("hash", struct mgpu_ordinal_key, __u32, ordinals, 16384, BPF_F_NO_PREALLOC);
/* Never written: a record of nothing, too large for the stack of a program. */
BPF_ARRAY(no_call, struct mgpu_call, 1);

/* The one place that names this helper: for each, bcc 0.26 reads all of /proc/kallsyms (0.1 s), to
 * see whether the kernel has it, and takes bpf_probe_read where it has not (before 5.5). What cannot
 * be read is zero. */
static __always_inline void read_user(void *to, __u32 bytes, const void *from)
{
	bpf_probe_read_user(to, bytes, from);
}

/* ---- whose, which card, which context ---------------------------------------------------- */

static __always_inline __u64 current_context(void)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct mgpu_thread *thread = threads.lookup(&id);

	if (!thread || !thread->depth)
		return 0;
	return thread->contexts[(thread->depth - 1) & (MGPU_MAX_STACK - 1)];
}

static __always_inline struct mgpu_object *find(__u64 handle, __u32 kind)
{
	struct mgpu_object_key key = {.handle = handle, .tgid = mgpu_tgid(), .kind = kind};

	return objects.lookup(&key);
}

static __always_inline __u32 share_at(struct mgpu_bound *container, __u32 ordinal)
{
	struct mgpu_ordinal_key key = {.tgid = mgpu_tgid(), .ordinal = ordinal};
	__u32 *known;

	if (container->card_count > 1) {
		known = ordinals.lookup(&key);
		if (known)
			return *known;
		if (ordinal < container->card_count)
			return container->cards[ordinal & (MGPU_MAX_CARDS - 1)].share_id;
	}
	return container->cards[0].share_id;
}

/* CUmemLocation: 0 for the host's memory, else the share on that card */
#define LOCATION_DEVICE 1 /* CU_MEM_LOCATION_TYPE_DEVICE */

struct location {
	__u32 type, id;
};

static __always_inline __u32 share_of(struct mgpu_bound *container, struct location *location)
{
	return location->type == LOCATION_DEVICE ? share_at(container, location->id) : 0;
}

/* A cleared record of the call that begins. NULL: nothing to count. */
static __always_inline struct mgpu_call *begin(struct mgpu_bound **container)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct mgpu_process *process;
	struct mgpu_call *call, *none;
	__u32 zero = 0;

	*container = mgpu_whose();
	none = no_call.lookup(&zero);
	if (!*container || !none)
		return 0;
	process = mgpu_process_of(*container);
	if (!process)
		return 0;
	calls.update(&id, none);
	call = calls.lookup(&id);
	if (call)
		call->born_ns = process->born_ns;
	return call;
}

/* The record of the call that returns. */
static __always_inline struct mgpu_call *end(void)
{
	__u64 id = bpf_get_current_pid_tgid();

	return calls.lookup(&id);
}

/* Forget the record: the last thing done with it, as its memory may be another's at once. */
static __always_inline int done(void)
{
	__u64 id = bpf_get_current_pid_tgid();

	calls.delete(&id);
	return 0;
}

/* ---- objects ------------------------------------------------------------------------------ */

/* Memory goes with the context that it was allocated in. */
static __always_inline void join_context(struct mgpu_call *call)
{
	struct mgpu_object *context = find(call->context, MGPU_CONTEXT);

	if (call->context && context && context->stamp == call->stamp)
		__sync_fetch_and_add(&context->bytes, call->bytes);
}

/* Whether the memory was still there: its context has not been destroyed under it. */
static __always_inline int leave_context(struct mgpu_object *object)
{
	struct mgpu_object *context;

	if (!object->context)
		return 1;
	context = find(object->context, MGPU_CONTEXT);
	if (!context || context->stamp != object->stamp)
		return 0;
	__sync_fetch_and_add(&context->bytes, -object->bytes);
	return 1;
}

/* The driver gives a handle out anew: what it named before was freed by a way that no probe sees,
 * such as the end of a context made before the probes were. */
static __always_inline void forget(struct mgpu_object_key *key, __u64 born_ns)
{
	struct mgpu_object *old = objects.lookup(key);

	if (!old || old->born_ns != born_ns)
		return;
	if (key->kind == MGPU_CONTEXT)
		mgpu_count_context(key->tgid, old->share_id, -1);
	if (leave_context(old))
		mgpu_give_back(key->tgid, old->share_id, old->bytes);
}

/* Put what was allocated into `objects`. Without a handle (its place cannot be read) or with no
 * room it stays charged until the process ends. */
static __always_inline void store(struct mgpu_call *call, __u64 handle, __s32 references)
{
	struct mgpu_object_key key = {.handle = handle, .tgid = mgpu_tgid(), .kind = call->kind};
	struct mgpu_object *object = &call->taken;
	struct mgpu_count *count;

	object->bytes = call->bytes;
	object->born_ns = call->born_ns;
	object->context = call->context;
	object->stamp = call->stamp;
	object->share_id = call->share_id;
	object->references = references;
	if (key.kind == MGPU_MEMORY || key.kind == MGPU_CONTEXT)
		forget(&key, call->born_ns);
	if (!handle || objects.update(&key, object)) {
		count = counts.lookup(&object->share_id);
		if (count)
			__sync_fetch_and_add(&count->unrecorded, 1);
	}
}

/* Move an object out of the map into the call. Who deletes it has it: nobody else will. Without
 * success the call holds no object. */
static __always_inline int take(struct mgpu_call *call, __u64 handle, __u32 kind)
{
	struct mgpu_object_key key = {.handle = handle, .tgid = mgpu_tgid(), .kind = kind};
	struct mgpu_object *object = objects.lookup(&key);

	if (!object)
		return 0;
	call->taken = *object;
	/* another thread was first, or it was left by an earlier process of this PID */
	if (objects.delete(&key) || call->taken.born_ns != call->born_ns) {
		call->taken.born_ns = 0;
		return 0;
	}
	call->kind = kind;
	call->argument = handle;
	call->share_id = call->taken.share_id;
	return 1;
}

/* Drop one reference; the last one takes the object. */
static __always_inline int take_reference(struct mgpu_call *call, __u64 handle, __u32 kind)
{
	struct mgpu_object *object = find(handle, kind);

	if (!object || object->born_ns != call->born_ns)
		return 0;
	__sync_fetch_and_add(&object->references, -1);
	call->argument = handle;
	call->kind = kind;
	call->extra = 1; /* one reference was dropped */
	if (*(volatile __s32 *)&object->references > 0)
		return 0;
	return take(call, handle, kind);
}

static __always_inline void put_back(struct mgpu_call *call)
{
	struct mgpu_object_key key = {
		.handle = call->argument, .tgid = mgpu_tgid(), .kind = call->kind};
	struct mgpu_object *object;

	if (call->extra) {
		object = objects.lookup(&key);
		if (object) {
			__sync_fetch_and_add(&object->references, 1);
			return;
		}
		call->taken.references = 1;
	}
	if (call->taken.born_ns)
		objects.update(&key, &call->taken);
}

#endif
