/* Tracker `cuda`: uprobes on the allocating and freeing calls of libcuda.
 *
 * Entry reserves, return commits or gives back. What a call frees is taken out of `objects` at its
 * entry: after the driver has freed it, another thread may be given the same handle at once.
 * Argument lists are those of cuda.h.
 */
#include <uapi/linux/bpf.h>
#include <uapi/linux/ptrace.h>

#include "objects.h"

#define PITCH_BYTES 512        /* least alignment of a row; corrected by the pitch returned */
#define MAX_MIP_LEVELS 20
#define MAX_UNMAPPED 32        /* mappings that one cuMemUnmap may cover */
#define ARRAY_LAYERED 1        /* CUDA_ARRAY3D_LAYERED */
#define ARRAY_CUBEMAP 4        /* CUDA_ARRAY3D_CUBEMAP */

/* ---- allocating --------------------------------------------------------------------------- */

/* On the card of the current context. NULL: nothing to count. */
static __always_inline struct mgpu_call *enter_call(__u64 bytes, __u64 out)
{
	__u64 handle = current_context();
	struct mgpu_bound *container;
	struct mgpu_call *call = begin(&container);
	struct mgpu_object *context;

	if (!call)
		return 0;
	call->kind = MGPU_MEMORY;
	call->out = out;
	context = find(handle, MGPU_CONTEXT);
	if (context && context->born_ns == call->born_ns) {
		call->context = handle;
		call->stamp = context->stamp;
		call->share_id = context->share_id;
	} else {
		call->share_id = container->cards[0].share_id;
	}
	call->bytes = mgpu_reserve(call->share_id, bytes) ? 0 : bytes;
	return call;
}

static __always_inline int enter(__u64 bytes, __u64 out, __u64 argument, __u64 extra)
{
	struct mgpu_call *call = enter_call(bytes, out);

	if (call) {
		call->argument = argument;
		call->extra = extra;
	}
	return 0;
}

/* cuMemAlloc(out, bytes), Managed */
int mgpu_alloc(struct pt_regs *ctx)
{
	return enter(PT_REGS_PARM2(ctx), PT_REGS_PARM1(ctx), 0, 0);
}

static __always_inline int enter_pool(__u64 bytes, __u64 out)
{
	struct mgpu_call *call = enter_call(bytes, out);

	if (call)
		call->context = 0;
	return 0;
}

/* cuMemAllocAsync(out, bytes, stream): from a pool of the device, not of a context */
int mgpu_alloc_pool(struct pt_regs *ctx)
{
	return enter_pool(PT_REGS_PARM2(ctx), PT_REGS_PARM1(ctx));
}

/* cuMemAllocFromPoolAsync(out, bytes, pool, stream): on the pool's card, whatever is current */
int mgpu_alloc_from(struct pt_regs *ctx)
{
	struct mgpu_object *pool = find(PT_REGS_PARM3(ctx), MGPU_POOL);
	__u64 bytes = PT_REGS_PARM2(ctx);
	struct mgpu_bound *container;
	struct mgpu_call *call = begin(&container);

	if (!call)
		return 0;
	if (!pool || pool->born_ns != call->born_ns)
		return enter_pool(bytes, PT_REGS_PARM1(ctx));
	if (!pool->share_id)
		return done(); /* host memory */
	call->kind = MGPU_MEMORY;
	call->out = PT_REGS_PARM1(ctx);
	call->share_id = pool->share_id;
	call->bytes = mgpu_reserve(call->share_id, bytes) ? 0 : bytes;
	return 0;
}

/* cuMemAllocPitch(out, pitch, width, rows, element) */
int mgpu_pitch(struct pt_regs *ctx)
{
	__u64 width = PT_REGS_PARM3(ctx), rows = PT_REGS_PARM4(ctx);

	if (width > MGPU_MOST_BYTES || rows > MGPU_MOST_BYTES)
		width = rows = 1ULL << 31; /* what no card grants either */
	width = (width + PITCH_BYTES - 1) & ~(__u64)(PITCH_BYTES - 1);
	return enter(width * rows, PT_REGS_PARM1(ctx), PT_REGS_PARM2(ctx), rows);
}

/* CUDA_ARRAY3D_DESCRIPTOR; the two-dimensional one has no depth and no flags. */
struct array_shape {
	__u64 width, height, depth;
	__u32 format, channels, flags, pad;
};

static __always_inline __u64 element_bytes(__u32 format, __u32 channels)
{
	__u64 bytes = 1; /* CU_AD_FORMAT_(UN)SIGNED_INT8 = 1, 8 and whatever came later */

	if (format == 0x02 || format == 0x09 || format == 0x10)
		bytes = 2; /* (UN)SIGNED_INT16, HALF */
	if (format == 0x03 || format == 0x0a || format == 0x20)
		bytes = 4; /* (UN)SIGNED_INT32, FLOAT */
	return bytes * channels;
}

/* Without a branch, which would double what the verifier has to follow; for extents below 2^63 */
static __always_inline __u64 at_least_1(__u64 extent)
{
	return extent | ((extent - 1) >> 63);
}

static __always_inline int is_sane(struct array_shape *shape)
{
	return !((shape->width | shape->height | shape->depth) >> 20) && !(shape->channels >> 4);
}

/* 0 for extents beyond what any card takes: it will refuse them */
static __always_inline __u64 array_bytes(struct array_shape *shape)
{
	if (!is_sane(shape))
		return 0;
	return shape->width * at_least_1(shape->height) * at_least_1(shape->depth) *
	       element_bytes(shape->format, shape->channels);
}

/* cuArrayCreate(out, descriptor) */
int mgpu_array(struct pt_regs *ctx)
{
	struct array_shape shape = {};
	const char *from = (const char *)PT_REGS_PARM2(ctx);

	read_user(&shape.width, 16, from);
	read_user(&shape.format, 8, from + 16);
	return enter(array_bytes(&shape), PT_REGS_PARM1(ctx), 0, 0);
}

/* cuArray3DCreate(out, descriptor) */
int mgpu_array3d(struct pt_regs *ctx)
{
	struct array_shape shape = {};

	read_user(&shape, 36, (const void *)PT_REGS_PARM2(ctx));
	return enter(array_bytes(&shape), PT_REGS_PARM1(ctx), 0, 0);
}

/* cuMipmappedArrayCreate(out, descriptor, levels): each level has half of the extents before */
int mgpu_mipmap(struct pt_regs *ctx)
{
	struct array_shape shape = {};
	__u32 levels = PT_REGS_PARM3(ctx), depth_shift;
	__u64 elements = 0, extents;

	read_user(&shape, 36, (const void *)PT_REGS_PARM2(ctx));
	if (!is_sane(&shape))
		return enter(0, PT_REGS_PARM1(ctx), 0, 0);
	depth_shift = shape.flags & (ARRAY_LAYERED | ARRAY_CUBEMAP) ? 0 : 1;
	/* past the level of one element there is none, whatever was asked for */
	extents = shape.width | shape.height | (depth_shift ? shape.depth : 0);
	MGPU_LOOP (int level = 0; level < MAX_MIP_LEVELS; level++) {
		/* Else clang makes one bound of the two, which the verifier of 6.1 does not follow. */
		asm volatile("" : "+r"(levels));
		if (level >= levels || !(extents >> level))
			break;
		elements += at_least_1(shape.width >> level) * at_least_1(shape.height >> level) *
			    at_least_1(shape.depth >> (level * depth_shift));
	}
	return enter(elements * element_bytes(shape.format, shape.channels),
		     PT_REGS_PARM1(ctx), 0, 0);
}

/* The end of all of these */
int mgpu_alloc_end(struct pt_regs *ctx)
{
	struct mgpu_call *call = end();
	__u64 handle = 0, pitch = 0, actual;

	if (!call)
		return 0;
	if ((__u32)PT_REGS_RC(ctx)) {
		mgpu_give_back(mgpu_tgid(), call->share_id, call->bytes);
		return done();
	}
	read_user(&handle, sizeof(handle), (const void *)call->out);
	if (call->argument) {
		/* only ever upwards, and not far: another thread may write there too */
		read_user(&pitch, sizeof(pitch), (const void *)call->argument);
		actual = (__u32)pitch * call->extra;
		if (actual > call->bytes && actual <= MGPU_MOST_BYTES) {
			mgpu_add(call->share_id, actual - call->bytes);
			call->bytes = actual;
		}
	}
	join_context(call);
	store(call, handle, 1);
	return done();
}

/* cuMemCreate(out, bytes, properties, flags): not of a context */
int mgpu_create(struct pt_regs *ctx)
{
	const char *properties = (const char *)PT_REGS_PARM3(ctx);
	struct mgpu_bound *container;
	struct location location = {};
	struct mgpu_call *call;

	read_user(&location, sizeof(location), properties + 8);
	call = begin(&container);
	if (!call)
		return 0;
	call->kind = MGPU_PHYSICAL;
	call->out = PT_REGS_PARM1(ctx);
	call->share_id = share_of(container, &location);
	if (!call->share_id)
		return done(); /* host memory */
	call->bytes = PT_REGS_PARM2(ctx);
	if (mgpu_reserve(call->share_id, call->bytes))
		call->bytes = 0;
	return 0;
}

/* ---- freeing ------------------------------------------------------------------------------ */

static __always_inline int enter_free(__u64 handle, __u32 kind, int counted)
{
	struct mgpu_bound *container;
	struct mgpu_call *call = begin(&container);
	int taken;

	if (!call)
		return 0;
	taken = counted ? take_reference(call, handle, kind) : take(call, handle, kind);
	if (!taken && !call->extra)
		return done();
	return 0;
}

/* cuMemFree, cuMemFreeAsync, cuArrayDestroy, cuMipmappedArrayDestroy */
int mgpu_free(struct pt_regs *ctx)
{
	return enter_free(PT_REGS_PARM1(ctx), MGPU_MEMORY, 0);
}

/* cuMemRelease(handle) */
int mgpu_release(struct pt_regs *ctx)
{
	return enter_free(PT_REGS_PARM1(ctx), MGPU_PHYSICAL, 1);
}

int mgpu_free_end(struct pt_regs *ctx)
{
	struct mgpu_call *call = end();

	if (!call)
		return 0;
	if ((__u32)PT_REGS_RC(ctx)) {
		put_back(call);
		return done();
	}
	if (call->taken.born_ns && leave_context(&call->taken))
		mgpu_give_back(mgpu_tgid(), call->taken.share_id, call->taken.bytes);
	return done();
}

/* cuMemRetainAllocationHandle(out, address): one more reference */
int mgpu_retain(struct pt_regs *ctx)
{
	struct mgpu_bound *container;
	struct mgpu_call *call = begin(&container);

	if (!call)
		return 0;
	call->out = PT_REGS_PARM1(ctx);
	return 0;
}

int mgpu_retain_end(struct pt_regs *ctx)
{
	struct mgpu_call *call = end();
	struct mgpu_object *object;
	__u64 handle = 0;

	if (!call)
		return 0;
	if ((__u32)PT_REGS_RC(ctx))
		return done();
	read_user(&handle, sizeof(handle), (const void *)call->out);
	object = find(handle, MGPU_PHYSICAL);
	if (object && object->born_ns == call->born_ns)
		__sync_fetch_and_add(&object->references, 1);
	return done();
}

/* cuMemMap(address, bytes, offset, handle, flags): the mapping holds the memory too */
int mgpu_map(struct pt_regs *ctx)
{
	struct mgpu_bound *container;
	struct mgpu_call *call = begin(&container);

	if (!call)
		return 0;
	call->kind = MGPU_MAPPING;
	call->argument = PT_REGS_PARM1(ctx);
	call->bytes = PT_REGS_PARM2(ctx);
	call->context = PT_REGS_PARM4(ctx); /* the handle */
	return 0;
}

int mgpu_map_end(struct pt_regs *ctx)
{
	struct mgpu_call *call = end();
	struct mgpu_object *object;

	if (!call)
		return 0;
	if ((__u32)PT_REGS_RC(ctx))
		return done();
	object = find(call->context, MGPU_PHYSICAL);
	if (object && object->born_ns == call->born_ns) {
		__sync_fetch_and_add(&object->references, 1);
		store(call, call->argument, 1);
	}
	return done();
}

/* cuMemUnmap(address, bytes): all mappings in that range */
int mgpu_unmap(struct pt_regs *ctx)
{
	struct mgpu_bound *container;
	struct mgpu_call *call = begin(&container);

	if (!call)
		return 0;
	call->argument = PT_REGS_PARM1(ctx);
	call->bytes = PT_REGS_PARM2(ctx);
	return 0;
}

int mgpu_unmap_end(struct pt_regs *ctx)
{
	struct mgpu_call *call = end();
	__u64 address, past, handle;

	if (!call)
		return 0;
	if ((__u32)PT_REGS_RC(ctx))
		return done();
	address = call->argument;
	past = address + call->bytes;
	MGPU_LOOP (int i = 0; i < MAX_UNMAPPED; i++) {
		if (address >= past || !take(call, address, MGPU_MAPPING))
			break;
		address += call->taken.bytes;
		handle = call->taken.context;
		if (take_reference(call, handle, MGPU_PHYSICAL))
			mgpu_give_back(mgpu_tgid(), call->taken.share_id, call->taken.bytes);
	}
	return done();
}
