/* The simulated libcuda: contexts. Each, the primary one of a device too, costs context_mib. */
#include "cuda_sim.h"

#include <stdlib.h>

#define MAX_STACK 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUctx_st *all;
static unsigned long long last_id;
static _Thread_local CUcontext stack[MAX_STACK];
static _Thread_local int depth;

bool context_exists(CUcontext context)
{
    bool found = false;

    pthread_mutex_lock(&lock);
    for (struct CUctx_st *it = all; it && !found; it = it->next)
        found = it == context;
    pthread_mutex_unlock(&lock);
    return found;
}

CUresult current(CUcontext *context)
{
    TRY(ready());
    *context = depth ? stack[depth - 1] : NULL;
    if (!*context || !context_exists(*context))
        return CUDA_ERROR_INVALID_CONTEXT;
    return CUDA_SUCCESS;
}

static CUresult make(CUdevice ordinal, unsigned int flags, bool primary, CUcontext *made)
{
    struct device *device;

    TRY(device_of(ordinal, &device));
    struct CUctx_st *context = calloc(1, sizeof *context);
    if (!context)
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = sim_charge(device->card, sim_conf()->context_bytes);
    if (!result) {
        context->work = sim_context_open(device->card);
        if (context->work < 0) {
            result = context->work;
            sim_uncharge(device->card, sim_conf()->context_bytes);
        }
    }
    if (result) {
        free(context);
        return from_errno(result);
    }
    context->device = ordinal;
    context->flags = flags;
    context->primary = primary;
    pthread_mutex_lock(&lock);
    context->id = ++last_id;
    context->next = all;
    all = context;
    pthread_mutex_unlock(&lock);
    *made = context;
    return CUDA_SUCCESS;
}

/* Take it away with all that was made in it. */
static void destroy(CUcontext context)
{
    unsigned int card = device_at(context->device)->card;

    pthread_mutex_lock(&lock);
    struct CUctx_st **link = &all;
    while (*link && *link != context)
        link = &(*link)->next;
    if (*link)
        *link = context->next;
    pthread_mutex_unlock(&lock);
    drop_arrays_of(context);
    drop_ranges_of(context);
    forget_context_work(context);
    sim_context_close(context->work);
    sim_uncharge(card, sim_conf()->context_bytes);
    free(context);
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
    TRY(ready());
    if (!made)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(make(ordinal, flags, false, made));
    return push(*made);
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
    if (!context_exists(context) || context->primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth && stack[depth - 1] == context)
        depth--;
    destroy(context);
    return CUDA_SUCCESS;
}

CUresult impl_cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice ordinal)
{
    static pthread_mutex_t primary_lock = PTHREAD_MUTEX_INITIALIZER;
    struct device *device;
    CUresult result = CUDA_SUCCESS;

    TRY(device_of(ordinal, &device));
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&primary_lock);
    if (!device->primary)
        result = make(ordinal, device->primary_flags, true, &device->primary);
    if (result == CUDA_SUCCESS) {
        device->primary_refs++;
        *context = device->primary;
    }
    pthread_mutex_unlock(&primary_lock);
    return result;
}

CUresult impl_cuDevicePrimaryCtxReset_v2(CUdevice ordinal)
{
    struct device *device;

    TRY(device_of(ordinal, &device));
    if (device->primary)
        destroy(device->primary);
    device->primary = NULL;
    return CUDA_SUCCESS;
}

CUresult impl_cuDevicePrimaryCtxRelease_v2(CUdevice ordinal)
{
    struct device *device;

    TRY(device_of(ordinal, &device));
    if (!device->primary_refs)
        return CUDA_ERROR_INVALID_CONTEXT;
    return --device->primary_refs ? CUDA_SUCCESS : impl_cuDevicePrimaryCtxReset_v2(ordinal);
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
    *active = device->primary != NULL;
    return CUDA_SUCCESS;
}

CUresult impl_cuCtxPushCurrent_v2(CUcontext context)
{
    TRY(ready());
    return context_exists(context) ? push(context) : CUDA_ERROR_INVALID_CONTEXT;
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

CUresult impl_cuCtxSetCurrent(CUcontext context)
{
    TRY(ready());
    if (context && !context_exists(context))
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

CUresult impl_cuCtxGetDevice(CUdevice *device)
{
    CUcontext context;

    TRY(current(&context));
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = context->device;
    return CUDA_SUCCESS;
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

/* NULL stands for the current context. */
static CUresult named(CUcontext *context)
{
    if (!*context)
        return current(context);
    return context_exists(*context) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult impl_cuCtxGetId(CUcontext context, unsigned long long *id)
{
    TRY(ready());
    TRY(named(&context));
    if (!id)
        return CUDA_ERROR_INVALID_VALUE;
    *id = context->id;
    return CUDA_SUCCESS;
}

CUresult impl_cuCtxGetApiVersion(CUcontext context, unsigned int *version)
{
    TRY(ready());
    TRY(named(&context));
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = 3020;
    return CUDA_SUCCESS;
}

CUresult impl_cuCtxSynchronize(void)
{
    CUcontext context;

    TRY(current(&context));
    return wait_context(context);
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
