/* The simulated libcuda: what there is at an address. */
#include "cuda_sim.h"

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

    TRY(ready());
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

static CUresult attribute(const struct range *range, CUdeviceptr at, CUpointer_attribute which,
                          void *value)
{
    bool host = range->kind == KIND_HOST || range->kind == KIND_REGISTERED;

    switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = range->context; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned int *)value = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(CUdeviceptr *)value = at; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = range->device; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned int *)value = range->kind == KIND_MANAGED;
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)value = range->start; break;
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

    TRY(ready());
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(look_up(at, &range));
    return attribute(&range, at, which, value);
}

/* Of an address that is none of CUDA's: 0 for each. */
CUresult impl_cuPointerGetAttributes(unsigned int count, CUpointer_attribute *which, void **values,
                                     CUdeviceptr at)
{
    struct range range;

    TRY(ready());
    if (!which || !values)
        return CUDA_ERROR_INVALID_VALUE;
    bool found = look_up(at, &range) == CUDA_SUCCESS;
    for (unsigned int i = 0; i < count; i++)
        if (found)
            TRY(attribute(&range, at, which[i], values[i]));
        else if (which[i] == CU_POINTER_ATTRIBUTE_MAPPED)
            *(bool *)values[i] = false;
        else if (which[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
            *(int *)values[i] = CU_DEVICE_INVALID;
        else if (which[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ||
                 which[i] == CU_POINTER_ATTRIBUTE_IS_MANAGED)
            *(unsigned int *)values[i] = 0;
        else
            *(uint64_t *)values[i] = 0;
    return CUDA_SUCCESS;
}

/* Hints of where managed memory should be: it is where it is. */
static CUresult hint(CUdeviceptr at, size_t bytes)
{
    struct range range;

    TRY(look_up(at, &range));
    return bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuMemPrefetchAsync_v2(CUdeviceptr at, size_t bytes, CUmemLocation location,
                                    unsigned int flags, CUstream stream)
{
    CUcontext context;

    (void)location;
    TRY(context_of(stream, &context));
    return flags ? CUDA_ERROR_INVALID_VALUE : hint(at, bytes);
}

CUresult impl_cuMemAdvise_v2(CUdeviceptr at, size_t bytes, CUmem_advise advice,
                             CUmemLocation location)
{
    (void)advice;
    (void)location;
    return hint(at, bytes);
}
