/* The simulated libcuda: linear memory. A card's memory is only counted; what a client writes into
 * it lands in pages of the host that the kernel gives at first touch. */
#include "cuda_sim.h"

#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PITCH_GRANULE 512u

pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static void *tree;          /* of ranges, by address */
static struct range *ranges; /* the same in a list */

/* Ranges that overlap are equal: so a range of one byte finds the one that it lies in. */
static int compare(const void *a, const void *b)
{
    const struct range *one = a, *other = b;

    if (one->start + one->bytes <= other->start)
        return -1;
    return one->start >= other->start + other->bytes;
}

struct range *find_range(uintptr_t at)
{
    struct range key = {.start = at, .bytes = 1};
    struct range **found = tfind(&key, &tree, compare);

    return found ? *found : NULL;
}

/* Charge the range and enter it, with pages of its own unless it has a start already. */
CUresult add_range(const struct range *wanted, void **start)
{
    struct range *range = malloc(sizeof *range);

    if (!range)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *range = *wanted;
    int result = range->charged ? sim_charge(device_at(range->device)->card, range->charged) : 0;
    if (!result && !range->start) {
        void *pages = mmap(NULL, range->bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        range->start = (uintptr_t)pages;
        range->own_pages = true;
        if (pages == MAP_FAILED && range->charged)
            sim_uncharge(device_at(range->device)->card, range->charged);
        result = pages == MAP_FAILED ? -12 : 0;
    }
    if (result) {
        free(range);
        return from_errno(result);
    }
    *start = (void *)range->start;
    pthread_mutex_lock(&memory_lock);
    tsearch(range, &tree, compare);
    range->before = NULL;
    range->next = ranges;
    if (ranges)
        ranges->before = range;
    ranges = range;
    pthread_mutex_unlock(&memory_lock);
    return CUDA_SUCCESS;
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
        range->pool->used -= range->bytes;
    if (range->own_pages)
        munmap((void *)range->start, range->bytes);
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
    if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)
        return CUDA_ERROR_INVALID_VALUE;
    return allocate(at, bytes, KIND_MANAGED, flags);
}

CUresult impl_cuMemAllocPitch_v2(CUdeviceptr *at, size_t *pitch, size_t width, size_t height,
                                 unsigned int element)
{
    if (!pitch || !width || !height || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    *pitch = (width + PITCH_GRANULE - 1) / PITCH_GRANULE * PITCH_GRANULE;
    return allocate(at, *pitch * height, KIND_DEVICE, 0);
}

CUresult impl_cuMemFree_v2(CUdeviceptr at)
{
    TRY(ready());
    if (!at)
        return CUDA_SUCCESS;
    return free_range(at, 1u << KIND_DEVICE | 1u << KIND_MANAGED | 1u << KIND_ASYNC);
}

CUresult impl_cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    CUcontext context;

    TRY(current(&context));
    if (!free_bytes || !total)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned int card = device_at(context->device)->card;
    *total = sim_conf()->card[card].memory_bytes - sim_conf()->card[card].reserved_bytes;
    *free_bytes = *total - sim_used(card);
    return CUDA_SUCCESS;
}

/* Memory of the host is not the card's: not charged. */
static CUresult allocate_host(void **at, size_t bytes, unsigned int flags)
{
    CUcontext context;

    TRY(current(&context));
    if (!at || !bytes)
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
    if (!at || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    struct range *there = find_range((uintptr_t)at);
    pthread_mutex_unlock(&memory_lock);
    if (there)
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    return add_range(&(struct range){.start = (uintptr_t)at, .bytes = bytes, .kind = KIND_REGISTERED,
                                     .context = context, .device = context->device, .flags = flags},
                     &start);
}

CUresult impl_cuMemHostUnregister(void *at)
{
    TRY(ready());
    CUresult result = free_range((uintptr_t)at, 1u << KIND_REGISTERED);
    return result == CUDA_SUCCESS ? result : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

/* A copy of the range that holds the address. */
static CUresult look_up(uintptr_t at, struct range *copy)
{
    TRY(ready());
    pthread_mutex_lock(&memory_lock);
    struct range *range = find_range(at);
    if (range)
        *copy = *range;
    pthread_mutex_unlock(&memory_lock);
    return range ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *at, unsigned int flags)
{
    struct range range;

    if (!device || flags)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(look_up((uintptr_t)at, &range));
    *device = (CUdeviceptr)at;
    return CUDA_SUCCESS;
}

CUresult impl_cuMemHostGetFlags(unsigned int *flags, void *at)
{
    struct range range;

    TRY(look_up((uintptr_t)at, &range));
    if (!flags || range.kind != KIND_HOST)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = range.flags;
    return CUDA_SUCCESS;
}

CUresult impl_cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr at)
{
    struct range range;

    CUresult result = look_up(at, &range);
    if (result != CUDA_SUCCESS)
        return result == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_NOT_FOUND : result;
    if (base)
        *base = range.start;
    if (bytes)
        *bytes = range.bytes;
    return CUDA_SUCCESS;
}

static CUresult pointer_attribute(const struct range *range, CUpointer_attribute which, void *value)
{
    bool host = range->kind == KIND_HOST || range->kind == KIND_REGISTERED;

    switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = range->context; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned int *)value = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = range->device; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned int *)value = range->kind == KIND_MANAGED;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)value = range->start; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = range->bytes; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(bool *)value = true; break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(CUmemoryPool *)value = range->pool; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

CUresult impl_cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr at)
{
    struct range range;

    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(look_up(at, &range));
    if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER || which == CU_POINTER_ATTRIBUTE_HOST_POINTER) {
        *(CUdeviceptr *)value = at;
        return CUDA_SUCCESS;
    }
    return pointer_attribute(&range, which, value);
}

/* In an IPC handle: the number of the export, and whose it is. */
struct ipc {
    uint64_t id;
    int32_t pid;
};

CUresult impl_cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr at)
{
    struct ipc ipc = {.pid = getpid()};
    CUresult result = CUDA_ERROR_INVALID_VALUE;

    TRY(ready());
    if (!handle)
        return result;
    pthread_mutex_lock(&memory_lock);
    struct range *range = find_range(at);
    if (range && range->kind == KIND_DEVICE) {
        int failed = 0;

        if (!range->export)
            failed = sim_export(device_at(range->device)->card, range->bytes, &range->export);
        ipc.id = range->export;
        result = from_errno(failed);
    }
    pthread_mutex_unlock(&memory_lock);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &ipc, sizeof ipc);
    return result;
}

CUresult impl_cuIpcOpenMemHandle_v2(CUdeviceptr *at, CUipcMemHandle handle, unsigned int flags)
{
    unsigned int card;
    uint64_t bytes;
    struct ipc ipc;
    CUcontext context;
    void *start;

    TRY(current(&context));
    if (!at || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(&ipc, &handle, sizeof ipc);
    if (ipc.pid == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    TRY(from_errno(sim_import(ipc.id, &card, &bytes)));
    CUresult result = add_range(
        &(struct range){.bytes = bytes, .kind = KIND_IMPORT, .context = context,
                        .device = context->device, .export = ipc.id}, &start);
    if (result != CUDA_SUCCESS) {
        sim_unimport(ipc.id);
        return result;
    }
    *at = (CUdeviceptr)start;
    return CUDA_SUCCESS;
}

CUresult impl_cuIpcOpenMemHandle(CUdeviceptr *at, CUipcMemHandle handle, unsigned int flags)
{
    return impl_cuIpcOpenMemHandle_v2(at, handle, flags);
}

CUresult impl_cuIpcCloseMemHandle(CUdeviceptr at)
{
    TRY(ready());
    return free_range(at, 1u << KIND_IMPORT);
}
