/* The simulated libcuda: contexts. Each, the primary one of a device too, costs context_mib. */
#include "cuda_sim.h"

#include <stdlib.h>

#define MAX_STACK 64

static pthread_mutex_t primary_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic unsigned long long last_id;
static _Thread_local CUcontext stack[MAX_STACK];
static _Thread_local int depth;

CUresult current(CUcontext *context)
{
    TRY(ready());
    *context = depth ? stack[depth - 1] : NULL;
    if (!*context)
        return CUDA_ERROR_INVALID_CONTEXT;
    return handle_is(*context, HANDLE_CONTEXT) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

/* NULL stands for the current context. */
static CUresult named(CUcontext *context)
{
    TRY(ready());
    if (!*context)
        return current(context);
    return handle_is(*context, HANDLE_CONTEXT) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

/* Charge the context, open its queue and make it known. */
static CUresult open_context(CUcontext context, unsigned int card)
{
    uint64_t bytes = sim_conf()->context_bytes;

    TRY(from_errno(sim_charge(card, bytes)));
    context->work = sim_context_open(card);
    CUresult result = context->work < 0 ? from_errno(context->work)
                                        : handle_add(context, HANDLE_CONTEXT);
    if (result == CUDA_SUCCESS)
        return result;
    if (context->work >= 0)
        sim_context_close(context->work);
    sim_uncharge(card, bytes);
    return result;
}

/* In `*made`: a context to be opened again, or NULL. */
static CUresult make(CUdevice ordinal, unsigned int flags, bool primary, CUcontext *made)
{
    CUcontext context = *made ? *made : calloc(1, sizeof *context);

    if (!context)
        return CUDA_ERROR_OUT_OF_MEMORY;
    context->device = ordinal;
    context->flags = flags;
    context->primary = primary;
    context->id = ++last_id;
    CUresult result = open_context(context, device_at(ordinal)->card);
    if (result == CUDA_SUCCESS)
        *made = context;
    else if (!*made)
        free(context);
    return result;
}

/* Take it away with all that was made in it. Whoever drops its handle does. */
static CUresult destroy(CUcontext context)
{
    unsigned int card;

    if (!handle_drop(context, HANDLE_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    card = device_at(context->device)->card;
    drop_arrays_of(context);
    drop_ranges_of(context);
    drop_streams_of(context);
    sim_context_close(context->work);
    sim_uncharge(card, sim_conf()->context_bytes);
    return CUDA_SUCCESS;
}

static CUresult push(CUcontext context)
{
    if (depth == MAX_STACK)
        return CUDA_ERROR_INVALID_VALUE;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult create(CUcontext *made, unsigned int flags, CUdevice ordinal)
{
    struct device *device;
    CUcontext context = NULL;

    TRY(device_of(ordinal, &device));
    if (!made || flags & ~(unsigned int)CU_CTX_FLAGS_MASK || depth == MAX_STACK)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(make(ordinal, flags, false, &context));
    *made = context;
    return push(context);
}

CUresult impl_cuCtxCreate(CUcontext *made, unsigned int flags, CUdevice device)
{
    return create(made, flags, device);
}

CUresult impl_cuCtxCreate_v2(CUcontext *made, unsigned int flags, CUdevice device)
{
    return create(made, flags, device);
}

CUresult impl_cuCtxCreate_v3(CUcontext *made, CUexecAffinityParam *params, int count,
                             unsigned int flags, CUdevice device)
{
    (void)params;
    (void)count;
    return create(made, flags, device);
}

CUresult impl_cuCtxCreate_v4(CUcontext *made, CUctxCreateParams *params, unsigned int flags,
                             CUdevice device)
{
    (void)params;
    return create(made, flags, device);
}

CUresult impl_cuCtxDestroy_v2(CUcontext context)
{
    TRY(ready());
    if (!handle_is(context, HANDLE_CONTEXT) || context->primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    TRY(destroy(context));
    if (depth && stack[depth - 1] == context)
        depth--;
    return CUDA_SUCCESS;
}

CUresult impl_cuCtxDestroy(CUcontext context)
{
    return impl_cuCtxDestroy_v2(context);
}

CUresult impl_cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice ordinal)
{
    struct device *device;
    CUresult result = CUDA_SUCCESS;

    TRY(device_of(ordinal, &device));
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&primary_lock);
    if (!handle_is(device->primary, HANDLE_CONTEXT))
        result = make(ordinal, device->primary_flags, true, &device->primary);
    if (result == CUDA_SUCCESS) {
        device->primary_refs++;
        *context = device->primary;
    }
    pthread_mutex_unlock(&primary_lock);
    return result;
}

/* Those who retained it still have to release it. */
CUresult impl_cuDevicePrimaryCtxReset_v2(CUdevice ordinal)
{
    struct device *device;

    TRY(device_of(ordinal, &device));
    pthread_mutex_lock(&primary_lock);
    destroy(device->primary);
    pthread_mutex_unlock(&primary_lock);
    return CUDA_SUCCESS;
}

CUresult impl_cuDevicePrimaryCtxRelease_v2(CUdevice ordinal)
{
    struct device *device;
    CUresult result = CUDA_SUCCESS;

    TRY(device_of(ordinal, &device));
    pthread_mutex_lock(&primary_lock);
    if (!device->primary_refs)
        result = CUDA_ERROR_INVALID_CONTEXT;
    else if (--device->primary_refs == 0)
        destroy(device->primary);
    pthread_mutex_unlock(&primary_lock);
    return result;
}

CUresult impl_cuDevicePrimaryCtxRelease(CUdevice ordinal)
{
    return impl_cuDevicePrimaryCtxRelease_v2(ordinal);
}

CUresult impl_cuDevicePrimaryCtxReset(CUdevice ordinal)
{
    return impl_cuDevicePrimaryCtxReset_v2(ordinal);
}

CUresult impl_cuDevicePrimaryCtxSetFlags_v2(CUdevice ordinal, unsigned int flags)
{
    struct device *device;

    TRY(device_of(ordinal, &device));
    if (flags & ~(unsigned int)CU_CTX_FLAGS_MASK)
        return CUDA_ERROR_INVALID_VALUE;
    device->primary_flags = flags;
    return CUDA_SUCCESS;
}

CUresult impl_cuDevicePrimaryCtxSetFlags(CUdevice ordinal, unsigned int flags)
{
    return impl_cuDevicePrimaryCtxSetFlags_v2(ordinal, flags);
}

CUresult impl_cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned int *flags, int *active)
{
    struct device *device;

    TRY(device_of(ordinal, &device));
    if (!flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = device->primary_flags;
    *active = handle_is(device->primary, HANDLE_CONTEXT);
    return CUDA_SUCCESS;
}

CUresult impl_cuCtxPushCurrent_v2(CUcontext context)
{
    TRY(ready());
    return handle_is(context, HANDLE_CONTEXT) ? push(context) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult impl_cuCtxPushCurrent(CUcontext context)
{
    return impl_cuCtxPushCurrent_v2(context);
}

CUresult impl_cuCtxPopCurrent_v2(CUcontext *context)
{
    TRY(ready());
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context)
        *context = stack[depth];
    return CUDA_SUCCESS;
}

CUresult impl_cuCtxPopCurrent(CUcontext *context)
{
    return impl_cuCtxPopCurrent_v2(context);
}

CUresult impl_cuCtxSetCurrent(CUcontext context)
{
    TRY(ready());
    if (context && !handle_is(context, HANDLE_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth)
        depth--;
    return context ? push(context) : CUDA_SUCCESS;
}

CUresult impl_cuCtxGetCurrent(CUcontext *context)
{
    TRY(ready());
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    *context = depth ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

CUresult impl_cuCtxGetDevice_v2(CUdevice *device, CUcontext context)
{
    TRY(named(&context));
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = context->device;
    return CUDA_SUCCESS;
}

CUresult impl_cuCtxGetDevice(CUdevice *device)
{
    return impl_cuCtxGetDevice_v2(device, NULL);
}

CUresult impl_cuCtxGetFlags(unsigned int *flags)
{
    CUcontext context;

    TRY(current(&context));
    if (!flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = context->flags;
    return CUDA_SUCCESS;
}

CUresult impl_cuCtxGetId(CUcontext context, unsigned long long *id)
{
    TRY(named(&context));
    if (!id)
        return CUDA_ERROR_INVALID_VALUE;
    *id = context->id;
    return CUDA_SUCCESS;
}

CUresult impl_cuCtxGetApiVersion(CUcontext context, unsigned int *version)
{
    TRY(named(&context));
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = 3020;
    return CUDA_SUCCESS;
}

CUresult impl_cuCtxSynchronize_v2(CUcontext context)
{
    TRY(named(&context));
    return wait_context(context);
}

CUresult impl_cuCtxSynchronize(void)
{
    return impl_cuCtxSynchronize_v2(NULL);
}

CUresult impl_cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    CUcontext context;

    TRY(current(&context));
    if (least)
        *least = 0;
    if (greatest)
        *greatest = 0;
    return CUDA_SUCCESS;
}

/* Settings that change nothing here. */

CUresult impl_cuCtxGetLimit(size_t *value, CUlimit limit)
{
    CUcontext context;

    TRY(current(&context));
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    switch (limit) {
    case CU_LIMIT_STACK_SIZE: *value = 1024; break;
    case CU_LIMIT_PRINTF_FIFO_SIZE: *value = 1 << 20; break;
    case CU_LIMIT_MALLOC_HEAP_SIZE: *value = 8 << 20; break;
    case CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH: *value = 2; break;
    case CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT: *value = 2048; break;
    case CU_LIMIT_MAX_L2_FETCH_GRANULARITY: *value = 64; break;
    case CU_LIMIT_PERSISTING_L2_CACHE_SIZE: *value = 0; break;
    default: return CUDA_ERROR_UNSUPPORTED_LIMIT;
    }
    return CUDA_SUCCESS;
}

CUresult impl_cuCtxSetLimit(CUlimit limit, size_t value)
{
    return impl_cuCtxGetLimit(&value, limit);
}

CUresult impl_cuCtxGetCacheConfig(CUfunc_cache *config)
{
    CUcontext context;

    TRY(current(&context));
    if (!config)
        return CUDA_ERROR_INVALID_VALUE;
    *config = CU_FUNC_CACHE_PREFER_NONE;
    return CUDA_SUCCESS;
}

CUresult impl_cuCtxSetCacheConfig(CUfunc_cache config)
{
    CUcontext context;

    TRY(current(&context));
    return config > CU_FUNC_CACHE_PREFER_EQUAL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
