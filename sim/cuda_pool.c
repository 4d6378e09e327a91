/* The simulated libcuda: memory pools. They keep nothing: memory goes back at the free call. */
#include "cuda_sim.h"

#include <stdlib.h>

static CUresult make_pool(CUdevice device, CUmemoryPool *made)
{
    struct CUmemPoolHandle_st *pool = calloc(1, sizeof *pool);

    if (!pool)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pool->device = device;
    CUresult result = handle_add(pool, HANDLE_POOL);
    if (result == CUDA_SUCCESS)
        *made = pool;
    else
        free(pool);
    return result;
}

static CUresult is_pool(CUmemoryPool pool)
{
    TRY(ready());
    return handle_is(pool, HANDLE_POOL) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
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

static CUresult current_pool(CUdevice ordinal, CUmemoryPool *pool)
{
    struct device *device;

    TRY(device_of(ordinal, &device));
    *pool = device->pool;
    return *pool ? CUDA_SUCCESS : default_pool(ordinal, pool);
}

static CUresult set_pool(CUdevice ordinal, CUmemoryPool pool)
{
    struct device *device;

    TRY(device_of(ordinal, &device));
    TRY(is_pool(pool));
    if (pool->device != ordinal)
        return CUDA_ERROR_INVALID_VALUE;
    device->pool = pool;
    return CUDA_SUCCESS;
}

CUresult impl_cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice ordinal)
{
    TRY(ready());
    return pool ? default_pool(ordinal, pool) : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice ordinal)
{
    TRY(ready());
    return pool ? current_pool(ordinal, pool) : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuDeviceSetMemPool(CUdevice ordinal, CUmemoryPool pool)
{
    return set_pool(ordinal, pool);
}

static CUresult of_device(const CUmemLocation *location, CUmemAllocationType type)
{
    TRY(ready());
    if (!location)
        return CUDA_ERROR_INVALID_VALUE;
    bool device = location->type == CU_MEM_LOCATION_TYPE_DEVICE &&
                  type == CU_MEM_ALLOCATION_TYPE_PINNED;
    return device ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult impl_cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location,
                                     CUmemAllocationType type)
{
    TRY(of_device(location, type));
    return pool ? default_pool(location->id, pool) : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
    TRY(of_device(location, type));
    return pool ? current_pool(location->id, pool) : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
    TRY(of_device(location, type));
    return set_pool(location->id, pool);
}

CUresult impl_cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    struct device *device;

    TRY(ready());
    if (!pool || !properties || properties->handleTypes)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return make_pool(-1, pool);
    TRY(device_of(properties->location.id, &device));
    return make_pool(properties->location.id, pool);
}

/* Its allocations may outlive it. */
CUresult impl_cuMemPoolDestroy(CUmemoryPool pool)
{
    struct device *device = NULL;

    TRY(is_pool(pool));
    if (pool->device >= 0)
        device = device_at(pool->device);
    if ((device && pool == device->default_pool) || !handle_drop(pool, HANDLE_POOL))
        return CUDA_ERROR_INVALID_VALUE;
    if (device && device->pool == pool)
        device->pool = NULL;
    pthread_mutex_lock(&memory_lock);
    pool->destroyed = true;
    pool_give_back(pool, 0);
    pthread_mutex_unlock(&memory_lock);
    return CUDA_SUCCESS;
}

void pool_give_back(CUmemoryPool pool, size_t bytes)
{
    pool->used -= bytes;
    if (pool->destroyed && !pool->used)
        free(pool);
}

CUresult impl_cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    (void)keep;
    return is_pool(pool);
}

CUresult impl_cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void *value)
{
    TRY(is_pool(pool));
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    switch (which) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        pool->release_threshold = *(cuuint64_t *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: pool->used_high = pool->used; return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult impl_cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void *value)
{
    TRY(is_pool(pool));
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    switch (which) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: *(int *)value = 1; break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        *(cuuint64_t *)value = pool->release_threshold;
        break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: *(cuuint64_t *)value = pool->used; break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: *(cuuint64_t *)value = pool->used_high; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult impl_cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count)
{
    TRY(is_pool(pool));
    return access && count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location)
{
    TRY(is_pool(pool));
    if (!flags || !location)
        return CUDA_ERROR_INVALID_VALUE;
    bool own = location->type == CU_MEM_LOCATION_TYPE_DEVICE && location->id == pool->device;
    *flags = own ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}

/* The pool counts the bytes first, so that it stays as long as they do. */
static CUresult allocate(CUdeviceptr *at, size_t bytes, CUmemoryPool pool, CUcontext context)
{
    bool host = pool->device < 0;
    void *start;

    if (!at || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    pool->used += bytes;
    pthread_mutex_unlock(&memory_lock);
    CUresult result = add_range(
        &(struct range){.bytes = bytes, .kind = KIND_ASYNC, .pool = pool,
                        .device = host ? context->device : pool->device,
                        .charged = host ? 0 : bytes}, &start);
    pthread_mutex_lock(&memory_lock);
    if (result != CUDA_SUCCESS)
        pool_give_back(pool, bytes);
    else if (pool->used > pool->used_high)
        pool->used_high = pool->used;
    pthread_mutex_unlock(&memory_lock);
    if (result == CUDA_SUCCESS)
        *at = (CUdeviceptr)start;
    return result;
}

CUresult impl_cuMemAllocFromPoolAsync(CUdeviceptr *at, size_t bytes, CUmemoryPool pool,
                                      CUstream stream)
{
    CUcontext context;

    TRY(context_of(stream, &context));
    TRY(is_pool(pool));
    return allocate(at, bytes, pool, context);
}

CUresult impl_cuMemAllocAsync(CUdeviceptr *at, size_t bytes, CUstream stream)
{
    CUcontext context;
    CUmemoryPool pool;

    TRY(context_of(stream, &context));
    TRY(current_pool(context->device, &pool));
    return allocate(at, bytes, pool, context);
}
