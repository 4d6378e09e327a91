/* The simulated libcuda: linear memory, of the card and of the host. */
#include "cuda_sim.h"

#include <errno.h>
#include <search.h>
#include <stdlib.h>

#define PITCH_GRANULE 512u
#define OF_CARD (1u << KIND_DEVICE | 1u << KIND_MANAGED | 1u << KIND_ASYNC)

pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static void *tree;           /* of ranges, by address */
static struct range *ranges; /* the same in a list */

/* Ranges that overlap are equal: so a range of one byte finds the one that it lies in. */
static int compare(const void *a, const void *b)
{
    const struct range *one = a, *other = b;

    if (one->start + one->bytes <= other->start)
        return -1;
    return one->start >= other->start + other->bytes;
}

struct range *find_overlap(uintptr_t start, size_t bytes)
{
    struct range key = {.start = start, .bytes = bytes};
    struct range **found = tfind(&key, &tree, compare);

    return found ? *found : NULL;
}

struct range *find_range(uintptr_t at)
{
    return find_overlap(at, 1);
}

struct range *find_import(uint64_t export, CUcontext context)
{
    struct range *it = ranges;

    while (it && (it->kind != KIND_IMPORT || it->export != export || it->context != context))
        it = it->next;
    return it;
}

static CUresult enter(struct range *range)
{
    struct range **entered;

    if (range->start + range->bytes < range->start)
        return CUDA_ERROR_INVALID_VALUE;
    entered = tsearch(range, &tree, compare);
    if (!entered)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (*entered != range)
        return CUDA_ERROR_INVALID_VALUE;
    range->before = NULL;
    range->next = ranges;
    if (ranges)
        ranges->before = range;
    ranges = range;
    return CUDA_SUCCESS;
}

/* Charge the range and find addresses for it, unless it has a start already. */
static CUresult furnish(struct range *range)
{
    if (range->charged)
        TRY(from_errno(sim_charge(device_at(range->device)->card, range->charged)));
    if (range->start)
        return CUDA_SUCCESS;
    range->start = (uintptr_t)addresses_take(range->bytes);
    range->own_addresses = true;
    if (range->start)
        return CUDA_SUCCESS;
    if (range->charged)
        sim_uncharge(device_at(range->device)->card, range->charged);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult make_range(const struct range *wanted, void **start, bool locked)
{
    struct range *range = malloc(sizeof *range);

    if (!range)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *range = *wanted;
    CUresult result = furnish(range);
    if (result != CUDA_SUCCESS) {
        free(range);
        return result;
    }
    *start = (void *)range->start;
    if (!locked)
        pthread_mutex_lock(&memory_lock);
    result = enter(range);
    if (!locked)
        pthread_mutex_unlock(&memory_lock);
    if (result == CUDA_SUCCESS)
        return result;
    if (range->charged)
        sim_uncharge(device_at(range->device)->card, range->charged);
    if (range->own_addresses)
        addresses_give((void *)range->start, range->bytes);
    free(range);
    return result;
}

CUresult add_range(const struct range *range, void **start)
{
    return make_range(range, start, false);
}

CUresult add_range_locked(const struct range *range, void **start)
{
    return make_range(range, start, true);
}

/* Take it out and give back what it is charged. Under memory_lock. */
void drop_range(struct range *range)
{
    tdelete(range, &tree, compare);
    if (range->before)
        range->before->next = range->next;
    else
        ranges = range->next;
    if (range->next)
        range->next->before = range->before;
    if (range->export && range->kind == KIND_IMPORT)
        sim_unimport(range->export);
    else if (range->export)
        sim_unexport(range->export); /* gives back or hands on the charge too */
    else if (range->charged)
        sim_uncharge(device_at(range->device)->card, range->charged);
    if (range->pool)
        pool_give_back(range->pool, range->bytes);
    if (range->export)
        addresses_renew((void *)range->start, range->bytes);
    if (range->own_addresses)
        addresses_give((void *)range->start, range->bytes);
    free(range);
}

void drop_ranges_of(CUcontext context)
{
    pthread_mutex_lock(&memory_lock);
    for (struct range *next, *it = ranges; it; it = next) {
        next = it->next;
        if (it->context == context)
            drop_range(it);
    }
    pthread_mutex_unlock(&memory_lock);
}

/* Free the range that begins exactly there and is of one of the kinds (a set of bits). */
CUresult free_range(uintptr_t start, unsigned int kinds)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;

    pthread_mutex_lock(&memory_lock);
    struct range *range = find_range(start);
    if (range && range->start == start && (1u << range->kind) & kinds) {
        if (range->kind != KIND_IMPORT || --range->opened == 0)
            drop_range(range);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&memory_lock);
    return result;
}

static CUresult allocate(CUdeviceptr *at, size_t bytes, enum kind kind, unsigned int flags)
{
    CUcontext context;
    void *start;

    TRY(current(&context));
    if (!at || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(add_range(&(struct range){.bytes = bytes, .kind = kind, .context = context, .flags = flags,
                                  .device = context->device, .charged = bytes}, &start));
    *at = (CUdeviceptr)start;
    return CUDA_SUCCESS;
}

CUresult impl_cuMemAlloc_v2(CUdeviceptr *at, size_t bytes)
{
    return allocate(at, bytes, KIND_DEVICE, 0);
}

CUresult impl_cuMemAllocManaged(CUdeviceptr *at, size_t bytes, unsigned int flags)
{
    TRY(ready());
    if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)
        return CUDA_ERROR_INVALID_VALUE;
    return allocate(at, bytes, KIND_MANAGED, flags);
}

CUresult impl_cuMemAllocPitch_v2(CUdeviceptr *at, size_t *pitch, size_t width, size_t height,
                                 unsigned int element)
{
    size_t row, bytes;

    TRY(ready());
    if (!pitch || !width || !height || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    if (__builtin_add_overflow(width, PITCH_GRANULE - 1, &row))
        return CUDA_ERROR_OUT_OF_MEMORY;
    row -= row % PITCH_GRANULE;
    if (__builtin_mul_overflow(row, height, &bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    TRY(allocate(at, bytes, KIND_DEVICE, 0));
    *pitch = row;
    return CUDA_SUCCESS;
}

CUresult impl_cuMemFree_v2(CUdeviceptr at)
{
    TRY(ready());
    return at ? free_range(at, OF_CARD) : CUDA_SUCCESS;
}

CUresult impl_cuMemFreeAsync(CUdeviceptr at, CUstream stream)
{
    CUcontext context;

    TRY(context_of(stream, &context));
    return free_range(at, OF_CARD);
}

/* Those that race for the last bytes may for a moment seem to have more than all. */
static uint64_t at_most(uint64_t value, uint64_t most)
{
    return value < most ? value : most;
}

/* Under a limit of the driver's own the card looks as large as that. */
CUresult impl_cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    CUcontext context;

    TRY(current(&context));
    if (!free_bytes || !total)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned int card = device_at(context->device)->card;
    uint64_t used = sim_used(card);
    *total = sim_conf()->card[card].memory_bytes - sim_conf()->card[card].reserved_bytes;
    *free_bytes = used < *total ? *total - used : 0;
    struct sim_limit limit;
    if (sim_own_limit(card, &limit)) {
        *total = limit.hard;
        *free_bytes = at_most(*free_bytes, limit.hard > limit.used ? limit.hard - limit.used : 0);
    }
    return CUDA_SUCCESS;
}

/* Memory of the host is not the card's: not charged. */
static CUresult allocate_host(void **at, size_t bytes, unsigned int flags)
{
    CUcontext context;

    TRY(current(&context));
    if (!at || !bytes || flags & ~7u)
        return CUDA_ERROR_INVALID_VALUE;
    return add_range(&(struct range){.bytes = bytes, .kind = KIND_HOST, .context = context,
                                     .device = context->device, .flags = flags}, at);
}

CUresult impl_cuMemHostAlloc(void **at, size_t bytes, unsigned int flags)
{
    return allocate_host(at, bytes, flags);
}

CUresult impl_cuMemAllocHost_v2(void **at, size_t bytes)
{
    return allocate_host(at, bytes, 0);
}

CUresult impl_cuMemFreeHost(void *at)
{
    TRY(ready());
    return free_range((uintptr_t)at, 1u << KIND_HOST);
}

CUresult impl_cuMemHostRegister_v2(void *at, size_t bytes, unsigned int flags)
{
    CUcontext context;
    void *start;

    TRY(current(&context));
    if (!at || !bytes || (uintptr_t)at + bytes < (uintptr_t)at)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = add_range(
        &(struct range){.start = (uintptr_t)at, .bytes = bytes, .kind = KIND_REGISTERED,
                        .context = context, .device = context->device, .flags = flags}, &start);
    return result == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : result;
}

CUresult impl_cuMemHostUnregister(void *at)
{
    TRY(ready());
    CUresult result = free_range((uintptr_t)at, 1u << KIND_REGISTERED);
    return result == CUDA_SUCCESS ? result : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}
