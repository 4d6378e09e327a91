/* The simulated libcuda: virtual memory management. Physical memory is charged when it is created
 * and given back with its last reference: handles, retained ones too, and mappings. */
#include "cuda_sim.h"

#include <stdlib.h>
#include <sys/mman.h>

struct physical {
    size_t bytes;
    CUdevice device; /* -1: of the host, not charged */
    CUmemAllocationProp properties;
    unsigned int references; /* under memory_lock, as the rest */
    struct physical *next;
};

static struct physical *physicals;

static struct physical *find_physical(CUmemGenericAllocationHandle handle)
{
    struct physical *it = physicals;

    while (it && (uintptr_t)it != handle)
        it = it->next;
    return it;
}

/* One reference less. Under memory_lock. */
static void drop_physical(struct physical *physical)
{
    struct physical **link = &physicals;

    if (--physical->references)
        return;
    while (*link != physical)
        link = &(*link)->next;
    *link = physical->next;
    if (physical->device >= 0)
        sim_uncharge(device_at(physical->device)->card, physical->bytes);
    free(physical);
}

CUresult impl_cuMemGetAllocationGranularity(size_t *granularity,
                                            const CUmemAllocationProp *properties,
                                            CUmemAllocationGranularity_flags flags)
{
    (void)flags;
    TRY(ready());
    if (!granularity || !properties)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = VMM_GRANULE;
    return CUDA_SUCCESS;
}

CUresult impl_cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                          const CUmemAllocationProp *properties, unsigned long long flags)
{
    struct device *device = NULL;

    TRY(ready());
    if (!handle || !properties || flags || !bytes || bytes % VMM_GRANULE)
        return CUDA_ERROR_INVALID_VALUE;
    bool on_card = properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (on_card)
        TRY(device_of(properties->location.id, &device));
    struct physical *physical = calloc(1, sizeof *physical);
    if (!physical)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = from_errno(on_card ? sim_charge(device->card, bytes) : 0);
    if (result != CUDA_SUCCESS) {
        free(physical);
        return result;
    }
    physical->bytes = bytes;
    physical->device = on_card ? properties->location.id : -1;
    physical->properties = *properties;
    physical->references = 1;
    pthread_mutex_lock(&memory_lock);
    physical->next = physicals;
    physicals = physical;
    pthread_mutex_unlock(&memory_lock);
    *handle = (uintptr_t)physical;
    return CUDA_SUCCESS;
}

CUresult impl_cuMemRelease(CUmemGenericAllocationHandle handle)
{
    TRY(ready());
    pthread_mutex_lock(&memory_lock);
    struct physical *physical = find_physical(handle);
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
    struct physical *physical = find_physical(handle);
    if (physical)
        *properties = physical->properties;
    pthread_mutex_unlock(&memory_lock);
    return physical ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Reserved addresses are not ranges: what lies in them is, once mapped. */
CUresult impl_cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr wish,
                                  unsigned long long flags)
{
    TRY(ready());
    if (!at || !bytes || bytes % VMM_GRANULE || flags || alignment > VMM_GRANULE)
        return CUDA_ERROR_INVALID_VALUE;
    char *pages = mmap((void *)wish, bytes + VMM_GRANULE, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    size_t before = (VMM_GRANULE - (uintptr_t)pages % VMM_GRANULE) % VMM_GRANULE;
    if (before)
        munmap(pages, before);
    munmap(pages + before + bytes, VMM_GRANULE - before);
    *at = (CUdeviceptr)(pages + before);
    return CUDA_SUCCESS;
}

CUresult impl_cuMemAddressFree(CUdeviceptr at, size_t bytes)
{
    TRY(ready());
    if (!at || !bytes || bytes % VMM_GRANULE)
        return CUDA_ERROR_INVALID_VALUE;
    return munmap((void *)at, bytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult impl_cuMemMap(CUdeviceptr at, size_t bytes, size_t offset,
                       CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    void *start;

    TRY(ready());
    if (!at || at % VMM_GRANULE || !bytes || bytes % VMM_GRANULE || flags || offset)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    struct physical *physical = find_physical(handle);
    bool fits = physical && bytes <= physical->bytes && !find_range(at);
    if (fits)
        physical->references++;
    pthread_mutex_unlock(&memory_lock);
    if (!fits)
        return CUDA_ERROR_INVALID_VALUE;
    if (mprotect((void *)at, bytes, PROT_READ | PROT_WRITE))
        return impl_cuMemRelease(handle), CUDA_ERROR_INVALID_VALUE;
    return add_range(&(struct range){.start = at, .bytes = bytes, .kind = KIND_MAPPED,
                                     .device = physical->device < 0 ? 0 : physical->device,
                                     .physical = physical}, &start);
}

/* All mappings in the stretch; each must lie in it as a whole. */
CUresult impl_cuMemUnmap(CUdeviceptr at, size_t bytes)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;

    TRY(ready());
    pthread_mutex_lock(&memory_lock);
    for (CUdeviceptr next = at; next < at + bytes;) {
        struct range *range = find_range(next);

        if (!range || range->kind != KIND_MAPPED || range->start != next ||
            next + range->bytes > at + bytes) {
            result = CUDA_ERROR_INVALID_VALUE;
            break;
        }
        next += range->bytes;
        struct physical *physical = range->physical;
        mmap((void *)range->start, range->bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        drop_range(range);
        drop_physical(physical);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&memory_lock);
    return result;
}

CUresult impl_cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    TRY(ready());
    return at && bytes && access && count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr at)
{
    TRY(ready());
    if (!flags || !location || !at)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return CUDA_SUCCESS;
}
