/* Contexts of libcuda: what each costs, which one a thread uses, and what dies with one. */
#include <uapi/linux/bpf.h>
#include <uapi/linux/ptrace.h>

#include "objects.h"

MGPU_MAP("hash", struct mgpu_uuid, __u32, uuids, 256, 0);

/* ---- the stack of current contexts -------------------------------------------------------- */

static __always_inline struct mgpu_thread *this_thread(void)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct mgpu_thread fresh = {}, *thread = threads.lookup(&id);

	if (thread)
		return thread;
	threads.insert(&id, &fresh);
	return threads.lookup(&id);
}

static __always_inline void push(__u64 context)
{
	struct mgpu_thread *thread = this_thread();

	if (!thread)
		return;
	thread->contexts[thread->depth & (MGPU_MAX_STACK - 1)] = context;
	thread->depth++;
}

/* Whether this is a container's process, and a context that it made: else the call will fail. */
static __always_inline int known_context(__u64 context)
{
	return mgpu_whose() && find(context, MGPU_CONTEXT);
}

/* cuCtxPushCurrent(context) */
int mgpu_ctx_push(struct pt_regs *ctx)
{
	if (known_context(PT_REGS_PARM1(ctx)))
		push(PT_REGS_PARM1(ctx));
	return 0;
}

/* cuCtxSetCurrent(context); NULL is one less */
int mgpu_ctx_set(struct pt_regs *ctx)
{
	__u64 context = PT_REGS_PARM1(ctx);
	struct mgpu_thread *thread;

	if (context && !known_context(context))
		return 0;
	if (!context && !mgpu_whose())
		return 0;
	thread = this_thread();
	if (!thread)
		return 0;
	if (thread->depth)
		thread->depth--;
	if (context)
		push(context);
	return 0;
}

/* cuCtxPopCurrent(out) */
int mgpu_ctx_pop(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct mgpu_thread *thread = threads.lookup(&id);

	if (thread && thread->depth)
		thread->depth--;
	return 0;
}

/* ---- making and destroying ---------------------------------------------------------------- */

static __always_inline int enter_context(__u64 out, __u32 ordinal, __u32 kind)
{
	struct mgpu_settings *now = mgpu_settings();
	struct mgpu_bound *container;
	struct mgpu_call *call = begin(&container);

	if (!call || !now)
		return 0;
	call->kind = kind;
	call->out = out;
	call->extra = ordinal;
	call->share_id = share_at(container, ordinal);
	if (kind == MGPU_PRIMARY && find(ordinal, MGPU_PRIMARY))
		return 0; /* there is one already: nothing to charge */
	call->bytes = mgpu_reserve(call->share_id, now->context_bytes) ? 0 : now->context_bytes;
	return 0;
}

static __always_inline void context_made(struct mgpu_call *call, __u64 handle)
{
	call->kind = MGPU_CONTEXT;
	call->stamp = bpf_ktime_get_ns();
	store(call, handle, 1);
	mgpu_count_context(mgpu_tgid(), call->share_id, 1);
}

/* cuCtxCreate(out, flags, device) */
int mgpu_ctx_create(struct pt_regs *ctx)
{
	return enter_context(PT_REGS_PARM1(ctx), PT_REGS_PARM3(ctx), MGPU_CONTEXT);
}

/* cuCtxCreate_v3(out, affinities, count, flags, device) */
int mgpu_ctx_create3(struct pt_regs *ctx)
{
	return enter_context(PT_REGS_PARM1(ctx), PT_REGS_PARM5(ctx), MGPU_CONTEXT);
}

/* cuCtxCreate_v4(out, parameters, flags, device) */
int mgpu_ctx_create4(struct pt_regs *ctx)
{
	return enter_context(PT_REGS_PARM1(ctx), PT_REGS_PARM4(ctx), MGPU_CONTEXT);
}

int mgpu_ctx_create_end(struct pt_regs *ctx)
{
	struct mgpu_call *call = end();
	__u64 handle = 0;

	if (!call)
		return 0;
	if ((__u32)PT_REGS_RC(ctx)) {
		mgpu_give_back(mgpu_tgid(), call->share_id, call->bytes);
		return done();
	}
	read_user(&handle, sizeof(handle), (const void *)call->out);
	context_made(call, handle);
	push(handle);
	return done();
}

/* cuDevicePrimaryCtxRetain(out, device) */
int mgpu_primary(struct pt_regs *ctx)
{
	return enter_context(PT_REGS_PARM1(ctx), PT_REGS_PARM2(ctx), MGPU_PRIMARY);
}

int mgpu_primary_end(struct pt_regs *ctx)
{
	struct mgpu_settings *now = mgpu_settings();
	struct mgpu_call *call = end();
	struct mgpu_object_key key = {.tgid = mgpu_tgid(), .kind = MGPU_PRIMARY};
	struct mgpu_object *there;
	__u64 handle = 0;

	if (!call || !now)
		return 0;
	if ((__u32)PT_REGS_RC(ctx)) {
		mgpu_give_back(key.tgid, call->share_id, call->bytes);
		return done();
	}
	read_user(&handle, sizeof(handle), (const void *)call->out);
	key.handle = call->extra;
	there = objects.lookup(&key);
	if (there && there->born_ns != call->born_ns) {
		objects.delete(&key);
		there = 0;
	}
	if (!there) {
		call->taken.born_ns = call->born_ns;
		call->taken.context = handle;
		call->taken.share_id = call->share_id;
		call->taken.references = 1;
		if (!objects.insert(&key, &call->taken)) {
			if (!call->bytes) { /* the one seen at entry was released meanwhile */
				call->bytes = now->context_bytes;
				mgpu_add(call->share_id, call->bytes);
			}
			context_made(call, handle);
			return done();
		}
		there = objects.lookup(&key);
	}
	if (there)
		__sync_fetch_and_add(&there->references, 1);
	mgpu_give_back(key.tgid, call->share_id, call->bytes); /* another thread was first */
	return done();
}

/* What a context held goes with it. It is taken at entry: its handle may soon be another's. */
static __always_inline int context_gone(struct mgpu_call *call)
{
	if (call->taken.born_ns) {
		mgpu_give_back(mgpu_tgid(), call->taken.share_id, call->taken.bytes);
		mgpu_count_context(mgpu_tgid(), call->taken.share_id, -1);
	}
	return done();
}

/* cuCtxDestroy(context) */
int mgpu_ctx_destroy(struct pt_regs *ctx)
{
	struct mgpu_bound *container;
	struct mgpu_call *call = begin(&container);

	if (!call)
		return 0;
	return take(call, PT_REGS_PARM1(ctx), MGPU_CONTEXT) ? 0 : done();
}

int mgpu_ctx_destroy_end(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct mgpu_thread *thread = threads.lookup(&id);
	struct mgpu_call *call = end();

	if (!call)
		return 0;
	if ((__u32)PT_REGS_RC(ctx)) {
		put_back(call);
		return done();
	}
	if (thread && thread->depth && current_context() == call->argument)
		thread->depth--;
	return context_gone(call);
}

/* The primary context of `ordinal`, whose last reference has been taken: take it as well. */
static __always_inline int enter_primary_end(struct mgpu_call *call, __u32 ordinal)
{
	__u64 context = call->taken.context;

	call->taken.born_ns = 0;
	call->out = ordinal;
	call->context = context;
	take(call, context, MGPU_CONTEXT);
	return 0;
}

/* cuDevicePrimaryCtxRelease(device) */
int mgpu_primary_drop(struct pt_regs *ctx)
{
	__u32 ordinal = PT_REGS_PARM1(ctx);
	struct mgpu_bound *container;
	struct mgpu_call *call = begin(&container);

	if (!call)
		return 0;
	if (take_reference(call, ordinal, MGPU_PRIMARY))
		return enter_primary_end(call, ordinal);
	return done();
}

/* cuDevicePrimaryCtxReset(device): whatever its references */
int mgpu_primary_reset(struct pt_regs *ctx)
{
	__u32 ordinal = PT_REGS_PARM1(ctx);
	struct mgpu_bound *container;
	struct mgpu_call *call = begin(&container);

	if (!call)
		return 0;
	if (take(call, ordinal, MGPU_PRIMARY))
		return enter_primary_end(call, ordinal);
	return done();
}

int mgpu_primary_drop_end(struct pt_regs *ctx)
{
	struct mgpu_object_key key = {.tgid = mgpu_tgid(), .kind = MGPU_PRIMARY};
	struct mgpu_object again = {};
	struct mgpu_call *call = end();

	if (!call)
		return 0;
	if (!(__u32)PT_REGS_RC(ctx))
		return context_gone(call);
	key.handle = call->out;
	again.born_ns = call->born_ns;
	again.context = call->context;
	again.share_id = call->share_id;
	again.references = 1;
	objects.update(&key, &again);
	call->extra = 0;
	put_back(call);
	return done();
}

/* ---- which card an ordinal is ------------------------------------------------------------- */

/* cuDeviceGetUuid(out, device) */
int mgpu_uuid(struct pt_regs *ctx)
{
	struct mgpu_bound *container;
	struct mgpu_call *call = begin(&container);

	if (!call)
		return 0;
	if (container->card_count < 2)
		return done();
	call->out = PT_REGS_PARM1(ctx);
	call->extra = PT_REGS_PARM2(ctx);
	return 0;
}

int mgpu_uuid_end(struct pt_regs *ctx)
{
	struct mgpu_bound *container = mgpu_whose();
	struct mgpu_call *call = end();
	struct mgpu_ordinal_key key = {.tgid = mgpu_tgid()};
	struct mgpu_uuid uuid = {};
	__u32 *minor;

	if (!call)
		return 0;
	if ((__u32)PT_REGS_RC(ctx) || !container)
		return done();
	read_user(&uuid, sizeof(uuid), (const void *)call->out);
	key.ordinal = call->extra;
	minor = uuids.lookup(&uuid);
	for (int i = 0; minor && i < MGPU_MAX_CARDS; i++) {
		if (i >= container->card_count)
			break;
		if (container->cards[i].minor == *minor)
			ordinals.update(&key, &container->cards[i].share_id);
	}
	return done();
}

/* ---- which card a pool allocates on ------------------------------------------------------- */

static __always_inline int enter_pool(__u64 out, struct location *location)
{
	struct mgpu_bound *container;
	struct mgpu_call *call = begin(&container);

	if (!call)
		return 0;
	call->kind = MGPU_POOL;
	call->out = out;
	call->share_id = share_of(container, location);
	return 0;
}

/* cuMemPoolCreate(out, properties) */
int mgpu_pool(struct pt_regs *ctx)
{
	struct location location = {};

	read_user(&location, sizeof(location), (const char *)PT_REGS_PARM2(ctx) + 8);
	return enter_pool(PT_REGS_PARM1(ctx), &location);
}

/* cuMemGetDefaultMemPool(out, location, type), cuMemGetMemPool */
int mgpu_pool_at(struct pt_regs *ctx)
{
	struct location location = {};

	read_user(&location, sizeof(location), (const void *)PT_REGS_PARM2(ctx));
	return enter_pool(PT_REGS_PARM1(ctx), &location);
}

/* cuDeviceGetDefaultMemPool(out, device), cuDeviceGetMemPool */
int mgpu_pool_of(struct pt_regs *ctx)
{
	struct location location = {.type = LOCATION_DEVICE, .id = PT_REGS_PARM2(ctx)};

	return enter_pool(PT_REGS_PARM1(ctx), &location);
}

int mgpu_pool_end(struct pt_regs *ctx)
{
	struct mgpu_call *call = end();
	__u64 handle = 0;

	if (!call)
		return 0;
	read_user(&handle, sizeof(handle), (const void *)call->out);
	if (!(__u32)PT_REGS_RC(ctx))
		store(call, handle, 1);
	return done();
}
