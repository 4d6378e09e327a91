/* Random operations through every allocating and freeing entry point of libcuda, in threads.
 *
 * operations SEED THREADS OPERATIONS PHASES ROOM_MIB [ORDINAL]: every thread makes OPERATIONS calls in
 * PHASES parts. After each part the process prints "quiet" and waits for a line on standard input, so
 * that counters can be compared with nothing going on. Calls that fail for lack of memory are
 * part of it; the exit status is 1 when a call fails in a way it must not.
 */
#include <cuda.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HELD 24
#define KINDS 11
#define GRANULE (2u << 20)
#define DIE(what, result)                                                    \
	do {                                                                 \
		fprintf(stderr, "operations: %s: %d\n", what, (int)(result)); \
		exit(1);                                                     \
	} while (0)

enum kind { PLAIN, PITCH, MANAGED, ASYNC, POOLED, ARRAY, ARRAY3D, MIPMAP, PHYSICAL, MAPPED, CONTEXT };

struct held {
	enum kind kind;
	unsigned long long handle;
	CUdeviceptr address;
	size_t bytes;
};

struct worker {
	pthread_t thread;
	unsigned seed;
	struct held held[HELD];
	int count;
};

static int thread_count, operations, phases;
static size_t room;
static CUdevice device;
static CUcontext primary;
static CUmemoryPool pool;
static pthread_barrier_t barrier;

static unsigned pick(struct worker *w, unsigned below)
{
	return (unsigned)rand_r(&w->seed) % below;
}

static CUresult make_array(struct worker *w, struct held *h)
{
	CUDA_ARRAY_DESCRIPTOR flat = {.Width = 1 + pick(w, 2000), .Height = pick(w, 3) ? 1 + pick(w, 500) : 0,
				      .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1u << pick(w, 3)};
	return cuArrayCreate((CUarray *)&h->handle, &flat);
}

static CUresult make_array3d(struct worker *w, struct held *h, int levels)
{
	CUDA_ARRAY3D_DESCRIPTOR solid = {.Width = 8 + pick(w, 256), .Height = 8 + pick(w, 128),
					 .Depth = 8 + pick(w, 16), .Format = CU_AD_FORMAT_HALF,
					 .NumChannels = 2};
	if (levels)
		return cuMipmappedArrayCreate((CUmipmappedArray *)&h->handle, &solid, levels);
	return cuArray3DCreate((CUarray *)&h->handle, &solid);
}

static CUresult make_physical(struct worker *w, struct held *h)
{
	CUmemAllocationProp property = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
					.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
	CUresult result;

	h->bytes = GRANULE * (size_t)(1 + pick(w, 3));
	result = cuMemCreate((CUmemGenericAllocationHandle *)&h->handle, h->bytes, &property, 0);
	if (result || h->kind == PHYSICAL)
		return result;
	if ((result = cuMemAddressReserve(&h->address, h->bytes, 0, 0, 0)))
		DIE("cuMemAddressReserve", result);
	if ((result = cuMemMap(h->address, h->bytes, 0, h->handle, 0)))
		DIE("cuMemMap", result);
	if (pick(w, 2)) { /* the mapping alone holds it from now on */
		if ((result = cuMemRelease(h->handle)))
			DIE("cuMemRelease", result);
		h->handle = 0;
	}
	return CUDA_SUCCESS;
}

static CUresult make(struct worker *w, struct held *h)
{
	size_t bytes = 1 + pick(w, 4u << 20), pitch;

	switch (h->kind) {
	case PLAIN:
		return cuMemAlloc(&h->address, bytes);
	case PITCH:
		return cuMemAllocPitch(&h->address, &pitch, 1 + pick(w, 5000), 1 + pick(w, 400), 4);
	case MANAGED:
		return cuMemAllocManaged(&h->address, bytes, CU_MEM_ATTACH_GLOBAL);
	case ASYNC:
		return cuMemAllocAsync(&h->address, bytes, 0);
	case POOLED:
		return cuMemAllocFromPoolAsync(&h->address, bytes, pool, 0);
	case ARRAY:
		return make_array(w, h);
	case ARRAY3D:
		return make_array3d(w, h, 0);
	case MIPMAP:
		return make_array3d(w, h, 1 + (int)pick(w, 4));
	case PHYSICAL:
	case MAPPED:
		return make_physical(w, h);
	default: {
		CUcontext old;
		CUresult result = cuCtxCreate((CUcontext *)&h->handle, NULL, 0, device);

		if (result)
			return result;
		if (pick(w, 2)) /* what dies with it */
			cuMemAlloc(&h->address, bytes);
		h->address = 0;
		if (pick(w, 2)) /* what does not */
			cuMemAllocAsync(&h->address, bytes, 0);
		cuCtxPopCurrent(&old);
		return CUDA_SUCCESS;
	}
	}
}

static CUresult unmake(struct held *h)
{
	CUresult result;

	switch (h->kind) {
	case PLAIN:
	case PITCH:
	case MANAGED:
		return cuMemFree(h->address);
	case ASYNC:
	case POOLED:
		return cuMemFreeAsync(h->address, 0);
	case ARRAY:
	case ARRAY3D:
		return cuArrayDestroy((CUarray)h->handle);
	case MIPMAP:
		return cuMipmappedArrayDestroy((CUmipmappedArray)h->handle);
	case PHYSICAL:
		return cuMemRelease(h->handle);
	case MAPPED:
		if ((result = cuMemUnmap(h->address, h->bytes)))
			return result;
		if ((result = cuMemAddressFree(h->address, h->bytes)))
			return result;
		return h->handle ? cuMemRelease(h->handle) : CUDA_SUCCESS;
	default:
		if ((result = cuCtxDestroy((CUcontext)h->handle)) || !h->address)
			return result;
		return cuMemFreeAsync(h->address, 0);
	}
}

static size_t held_bound(struct worker *w)
{
	return (size_t)w->count * (8u << 20);
}

static void operate(struct worker *w)
{
	struct held *h;
	CUresult result;

	if (w->count == HELD || (w->count && pick(w, 2)) || held_bound(w) > room) {
		h = &w->held[pick(w, (unsigned)w->count)];
		if ((result = unmake(h)))
			DIE("free", result);
		*h = w->held[--w->count];
		return;
	}
	h = &w->held[w->count];
	memset(h, 0, sizeof(*h));
	/* contexts are dear: one of forty */
	h->kind = pick(w, 40) ? pick(w, CONTEXT) : CONTEXT;
	result = make(w, h);
	if (result == CUDA_SUCCESS)
		w->count++;
	else if (result != CUDA_ERROR_OUT_OF_MEMORY)
		DIE("allocate", result);
}

static void *work(void *arg)
{
	struct worker *w = arg;
	CUresult result = cuCtxSetCurrent(primary);

	if (result)
		DIE("cuCtxSetCurrent", result);
	for (int phase = 0; phase < phases; phase++) {
		for (int i = 0; i < operations / phases; i++)
			operate(w);
		pthread_barrier_wait(&barrier); /* quiet */
		pthread_barrier_wait(&barrier); /* go on */
	}
	return NULL;
}

int main(int argc, char **argv)
{
	struct worker *workers;
	CUresult result;

	if (argc < 6)
		return 2;
	thread_count = atoi(argv[2]);
	operations = atoi(argv[3]);
	phases = atoi(argv[4]);
	room = (size_t)atoi(argv[5]) << 20;
	if ((result = cuInit(0)) ||
	    (result = cuDeviceGet(&device, argc > 6 ? atoi(argv[6]) : 0)) ||
	    (result = cuDevicePrimaryCtxRetain(&primary, device)) ||
	    (result = cuDeviceGetDefaultMemPool(&pool, device)))
		DIE("start", result);
	pthread_barrier_init(&barrier, NULL, (unsigned)thread_count + 1);
	workers = calloc((size_t)thread_count, sizeof(*workers));
	for (int i = 0; i < thread_count; i++) {
		workers[i].seed = (unsigned)(atoi(argv[1]) * 1000 + i);
		pthread_create(&workers[i].thread, NULL, work, &workers[i]);
	}
	for (int phase = 0; phase < phases; phase++) {
		pthread_barrier_wait(&barrier);
		puts("quiet");
		fflush(stdout);
		if (getchar() == EOF)
			return 0;
		pthread_barrier_wait(&barrier);
	}
	for (int i = 0; i < thread_count; i++)
		pthread_join(workers[i].thread, NULL);
	return 0;
}
