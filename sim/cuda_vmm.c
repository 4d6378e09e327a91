/* The simulated libcuda: virtual memory management. Physical memory is charged when it is created
 * and given back with its last reference: handles, retained ones too, and mappings. Its content is a
 * stretch of one file in memory, so that it is the same wherever and whenever it is mapped. */
#include "cuda_sim.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRANULE (2ull << 20) /* cuMemCreate gives memory in pieces of 2 MiB */

/* All of this under memory_lock. */
struct physical {
    size_t bytes;
    CUdevice device; /* -1: of the host, not charged */
    CUmemAllocationProp properties;
    unsigned int references;
    off_t offset; /* in `contents` */
};

/* Addresses that cuMemAddressReserve gave. What lies in them is a range, once mapped. */
struct reserved {
    uintptr_t start;
    size_t bytes;
    struct reserved *next;
};

static struct reserved *reserves;
static int contents = -1;
static off_t contents_end;

static struct physical *physical_of(CUmemGenericAllocationHandle handle)
{
    struct physical *physical = (struct physical *)(uintptr_t)handle;

    return handle_is(physical, HANDLE_PHYSICAL) ? physical : NULL;
}

/* One reference less. */
static void drop_physical(struct physical *physical)
{
    if (--physical->references)
        return;
    handle_drop(physical, HANDLE_PHYSICAL);
    fallocate(contents, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, physical->offset,
              (off_t)physical->bytes);
    if (physical->device >= 0)
        sim_uncharge(device_at(physical->device)->card, physical->bytes);
    free(physical);
}

static bool is_granular(size_t bytes)
{
    return bytes && bytes % GRANULE == 0;
}

CUresult impl_cuMemGetAllocationGranularity(size_t *granularity,
                                            const CUmemAllocationProp *properties,
                                            CUmemAllocationGranularity_flags flags)
{
    (void)flags;
    TRY(ready());
    if (!granularity || !properties)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = GRANULE;
    return CUDA_SUCCESS;
}

/* Room for the content. */
static bool grow_contents(size_t bytes, off_t *offset)
{
    if (contents < 0)
        contents = memfd_create("mgpu-sim", MFD_CLOEXEC);
    if (contents < 0 || ftruncate(contents, contents_end + (off_t)bytes))
        return false;
    *offset = contents_end;
    contents_end += (off_t)bytes;
    return true;
}

static CUresult make_physical(size_t bytes, const CUmemAllocationProp *properties,
                              struct physical **made)
{
    struct physical *physical = calloc(1, sizeof *physical);
    bool host = properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE;

    if (!physical)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *physical = (struct physical){.bytes = bytes, .properties = *properties, .references = 1,
                                  .device = host ? -1 : properties->location.id};
    pthread_mutex_lock(&memory_lock);
    bool grown = grow_contents(bytes, &physical->offset);
    pthread_mutex_unlock(&memory_lock);
    CUresult result = grown ? handle_add(physical, HANDLE_PHYSICAL) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS)
        free(physical);
    *made = physical;
    return result;
}

CUresult impl_cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                          const CUmemAllocationProp *properties, unsigned long long flags)
{
    struct device *device = NULL;
    struct physical *physical;

    TRY(ready());
    if (!handle || !properties || flags || !is_granular(bytes) ||
        properties->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->requestedHandleTypes)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        TRY(device_of(properties->location.id, &device));
        TRY(from_errno(sim_charge(device->card, bytes)));
    }
    CUresult result = make_physical(bytes, properties, &physical);
    if (result == CUDA_SUCCESS)
        *handle = (uintptr_t)physical;
    else if (device)
        sim_uncharge(device->card, bytes);
    return result;
}

CUresult impl_cuMemRelease(CUmemGenericAllocationHandle handle)
{
    TRY(ready());
    pthread_mutex_lock(&memory_lock);
    struct physical *physical = physical_of(handle);
    if (physical)
        drop_physical(physical);
    pthread_mutex_unlock(&memory_lock);
    return physical ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *at)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;

    TRY(ready());
    if (!handle)
        return result;
    pthread_mutex_lock(&memory_lock);
    struct range *range = find_range((uintptr_t)at);
    if (range && range->kind == KIND_MAPPED) {
        range->physical->references++;
        *handle = (uintptr_t)range->physical;
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&memory_lock);
    return result;
}

CUresult impl_cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                     CUmemGenericAllocationHandle handle)
{
    TRY(ready());
    if (!properties)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    struct physical *physical = physical_of(handle);
    if (physical)
        *properties = physical->properties;
    pthread_mutex_unlock(&memory_lock);
    return physical ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Addresses that nothing can be done with, aligned to a granule. */
static char *reserve_pages(CUdeviceptr wish, size_t bytes)
{
    char *pages = mmap((void *)wish, bytes + GRANULE, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (pages == MAP_FAILED)
        return NULL;
    size_t before = (GRANULE - (uintptr_t)pages % GRANULE) % GRANULE;
    if (before)
        munmap(pages, before);
    munmap(pages + before + bytes, GRANULE - before);
    return pages + before;
}

CUresult impl_cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr wish,
                                  unsigned long long flags)
{
    TRY(ready());
    if (!at || !is_granular(bytes) || bytes + GRANULE < bytes || flags || alignment > GRANULE ||
        alignment & (alignment - 1))
        return CUDA_ERROR_INVALID_VALUE;
    struct reserved *reserved = malloc(sizeof *reserved);
    char *pages = reserved ? reserve_pages(wish, bytes) : NULL;
    if (!pages) {
        free(reserved);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&memory_lock);
    *reserved = (struct reserved){(uintptr_t)pages, bytes, reserves};
    reserves = reserved;
    pthread_mutex_unlock(&memory_lock);
    *at = (CUdeviceptr)pages;
    return CUDA_SUCCESS;
}

CUresult impl_cuMemAddressFree(CUdeviceptr at, size_t bytes)
{
    struct reserved **link = &reserves, *found;

    TRY(ready());
    pthread_mutex_lock(&memory_lock);
    while (*link && ((*link)->start != at || (*link)->bytes != bytes))
        link = &(*link)->next;
    found = *link;
    if (found && find_overlap(at, bytes))
        found = NULL; /* something is still mapped there */
    if (found) {
        *link = found->next;
        munmap((void *)at, bytes);
    }
    pthread_mutex_unlock(&memory_lock);
    free(found);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool is_reserved(uintptr_t start, size_t bytes)
{
    const struct reserved *it = reserves;

    while (it && (start < it->start || bytes > it->bytes ||
                  start - it->start > it->bytes - bytes))
        it = it->next;
    return it;
}

static CUresult map(CUdeviceptr at, size_t bytes, struct physical *physical)
{
    void *start;

    if (!physical || bytes > physical->bytes || !is_reserved(at, bytes) || find_overlap(at, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    if (mmap((void *)at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
             contents, physical->offset) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    TRY(add_range_locked(&(struct range){.start = at, .bytes = bytes, .kind = KIND_MAPPED,
                                         .device = physical->device < 0 ? 0 : physical->device,
                                         .physical = physical}, &start));
    physical->references++;
    return CUDA_SUCCESS;
}

CUresult impl_cuMemMap(CUdeviceptr at, size_t bytes, size_t offset,
                       CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    TRY(ready());
    if (!at || at % GRANULE || !is_granular(bytes) || flags || offset)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    CUresult result = map(at, bytes, physical_of(handle));
    pthread_mutex_unlock(&memory_lock);
    return result;
}

/* Whether the stretch is made up of mappings, and of nothing else. */
static bool is_mapped(CUdeviceptr at, size_t bytes, bool whole)
{
    CUdeviceptr end = at + bytes, next = at;

    if (!bytes || end < at)
        return false;
    while (next < end) {
        const struct range *range = find_range(next);

        if (!range || range->kind != KIND_MAPPED)
            return false;
        if (whole && (range->start != next || range->bytes > end - next))
            return false;
        next = range->start + range->bytes;
    }
    return true;
}

/* All mappings in the stretch; each must lie in it as a whole. */
CUresult impl_cuMemUnmap(CUdeviceptr at, size_t bytes)
{
    TRY(ready());
    pthread_mutex_lock(&memory_lock);
    bool mapped = is_mapped(at, bytes, true);
    for (CUdeviceptr next = at; mapped && next < at + bytes;) {
        struct range *range = find_range(next);
        struct physical *physical = range->physical;

        next += range->bytes;
        mmap((void *)range->start, range->bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        drop_range(range);
        drop_physical(physical);
    }
    pthread_mutex_unlock(&memory_lock);
    return mapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    TRY(ready());
    if (!access || !count)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    bool mapped = is_mapped(at, bytes, false);
    pthread_mutex_unlock(&memory_lock);
    return mapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr at)
{
    TRY(ready());
    if (!flags || !location)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    bool mapped = is_mapped(at, 1, false);
    pthread_mutex_unlock(&memory_lock);
    *flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return mapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
