/* The simulated libcuda: memory pools. They keep nothing: memory goes back at the free call. */
#include "cuda_sim.h"

#include <stdlib.h>

static CUresult make_pool(CUdevice device, CUmemoryPool *made)
{
    struct CUmemPoolHandle_st *pool = calloc(1, sizeof *pool);

    if (!pool)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pool->device = device;
    *made = pool;
    return CUDA_SUCCESS;
}

static CUresult default_pool(CUdevice ordinal, CUmemoryPool *pool)
{
    struct device *device;
    CUresult result = CUDA_SUCCESS;

    TRY(device_of(ordinal, &device));
    pthread_mutex_lock(&memory_lock);
    if (!device->default_pool)
        result = make_pool(ordinal, &device->default_pool);
    *pool = device->default_pool;
    pthread_mutex_unlock(&memory_lock);
    return result;
}

CUresult impl_cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice ordinal)
{
    return pool ? default_pool(ordinal, pool) : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice ordinal)
{
    struct device *device;

    TRY(device_of(ordinal, &device));
    if (!pool)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device->pool)
        return default_pool(ordinal, pool);
    *pool = device->pool;
    return CUDA_SUCCESS;
}

CUresult impl_cuDeviceSetMemPool(CUdevice ordinal, CUmemoryPool pool)
{
    struct device *device;

    TRY(device_of(ordinal, &device));
    if (!pool || pool->device != ordinal)
        return CUDA_ERROR_INVALID_VALUE;
    device->pool = pool;
    return CUDA_SUCCESS;
}

CUresult impl_cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    struct device *device;

    TRY(ready());
    if (!pool || !properties)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return make_pool(-1, pool);
    TRY(device_of(properties->location.id, &device));
    return make_pool(properties->location.id, pool);
}

CUresult impl_cuMemPoolDestroy(CUmemoryPool pool)
{
    TRY(ready());
    if (!pool)
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS; /* its allocations, which point to it, may outlive it */
}

CUresult impl_cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    (void)keep;
    TRY(ready());
    return pool ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void *value)
{
    TRY(ready());
    if (!pool || !value)
        return CUDA_ERROR_INVALID_VALUE;
    if (which == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        pool->release_threshold = *(cuuint64_t *)value;
    else if (which == CU_MEMPOOL_ATTR_USED_MEM_HIGH || which == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
        pool->used_high = pool->used;
    return CUDA_SUCCESS;
}

CUresult impl_cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void *value)
{
    TRY(ready());
    if (!pool || !value)
        return CUDA_ERROR_INVALID_VALUE;
    switch (which) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        *(cuuint64_t *)value = pool->release_threshold;
        break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        *(cuuint64_t *)value = pool->used;
        break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        *(cuuint64_t *)value = pool->used_high;
        break;
    default:
        *(int *)value = 1;
    }
    return CUDA_SUCCESS;
}

CUresult impl_cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count)
{
    TRY(ready());
    return pool && access && count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult allocate(CUdeviceptr *at, size_t bytes, CUmemoryPool pool, CUcontext context)
{
    bool host = pool->device < 0;
    void *start;

    if (!at || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(add_range(&(struct range){.bytes = bytes, .kind = KIND_ASYNC, .pool = pool,
                                  .device = host ? context->device : pool->device,
                                  .charged = host ? 0 : bytes}, &start));
    pthread_mutex_lock(&memory_lock);
    pool->used += bytes;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
    pthread_mutex_unlock(&memory_lock);
    *at = (CUdeviceptr)start;
    return CUDA_SUCCESS;
}

CUresult impl_cuMemAllocFromPoolAsync(CUdeviceptr *at, size_t bytes, CUmemoryPool pool,
                                      CUstream stream)
{
    CUcontext context;

    (void)stream;
    TRY(current(&context));
    return pool ? allocate(at, bytes, pool, context) : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuMemAllocAsync(CUdeviceptr *at, size_t bytes, CUstream stream)
{
    CUcontext context;
    CUmemoryPool pool;

    (void)stream;
    TRY(current(&context));
    TRY(impl_cuDeviceGetMemPool(&pool, context->device));
    return allocate(at, bytes, pool, context);
}

CUresult impl_cuMemFreeAsync(CUdeviceptr at, CUstream stream)
{
    CUcontext context;

    (void)stream;
    TRY(current(&context));
    return free_range(at, 1u << KIND_DEVICE | 1u << KIND_MANAGED | 1u << KIND_ASYNC);
}
