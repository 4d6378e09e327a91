/* The simulated libcuda: events. */
#include "cuda_sim.h"

#include <stdlib.h>
#include <time.h>

struct CUevent_st {
    CUcontext context; /* in which it was recorded; NULL: not yet */
    unsigned int flags;
    int64_t work; /* what was queued before it */
    uint64_t recorded_ns;
};

static uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static CUresult is_event(CUevent event)
{
    TRY(ready());
    return handle_is(event, HANDLE_EVENT) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* Whether there is anything to wait for. */
static bool is_recorded(CUevent event)
{
    return event->context && handle_is(event->context, HANDLE_CONTEXT);
}

CUresult impl_cuEventCreate(CUevent *made, unsigned int flags)
{
    CUcontext context;

    TRY(current(&context));
    if (!made || flags & ~7u)
        return CUDA_ERROR_INVALID_VALUE;
    if (flags & CU_EVENT_INTERPROCESS)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUevent event = calloc(1, sizeof *event);
    if (!event)
        return CUDA_ERROR_OUT_OF_MEMORY;
    event->flags = flags;
    CUresult result = handle_add(event, HANDLE_EVENT);
    if (result == CUDA_SUCCESS)
        *made = event;
    else
        free(event);
    return result;
}

CUresult impl_cuEventDestroy_v2(CUevent event)
{
    TRY(ready());
    if (!handle_drop(event, HANDLE_EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    free(event);
    return CUDA_SUCCESS;
}

CUresult impl_cuEventDestroy(CUevent event)
{
    return impl_cuEventDestroy_v2(event);
}

CUresult impl_cuEventRecord(CUevent event, CUstream stream)
{
    CUcontext context;

    TRY(is_event(event));
    TRY(context_of(stream, &context));
    event->work = last_work(stream, context);
    event->context = context;
    event->recorded_ns = now_ns();
    return CUDA_SUCCESS;
}

CUresult impl_cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags)
{
    TRY(ready());
    return flags > 1 ? CUDA_ERROR_INVALID_VALUE : impl_cuEventRecord(event, stream);
}

CUresult impl_cuEventQuery(CUevent event)
{
    TRY(is_event(event));
    if (!is_recorded(event))
        return CUDA_SUCCESS;
    bool busy = sim_pending_ns(event->context->work, (uint64_t)event->work);
    return busy ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CUresult impl_cuEventSynchronize(CUevent event)
{
    TRY(is_event(event));
    return is_recorded(event) ? wait_work(event->context, event->work) : CUDA_SUCCESS;
}

/* One queue keeps the order anyway; between contexts it is kept by waiting. */
CUresult impl_cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
    CUcontext context;

    TRY(is_event(event));
    TRY(context_of(stream, &context));
    if (flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    return event->context == context ? CUDA_SUCCESS : impl_cuEventSynchronize(event);
}

/* When it happened: when the work before it ended, or when it was recorded, if that was later. */
static uint64_t happened_ns(CUevent event)
{
    uint64_t ended = sim_ended_ns(event->context->work, (uint64_t)event->work);

    return ended > event->recorded_ns ? ended : event->recorded_ns;
}

CUresult impl_cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end)
{
    TRY(is_event(start));
    TRY(is_event(end));
    if (!ms)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_recorded(start) || !is_recorded(end) ||
        (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
        return CUDA_ERROR_INVALID_HANDLE;
    TRY(impl_cuEventQuery(start));
    TRY(impl_cuEventQuery(end));
    *ms = (float)((double)((int64_t)happened_ns(end) - (int64_t)happened_ns(start)) / 1e6);
    return CUDA_SUCCESS;
}

CUresult impl_cuEventElapsedTime(float *ms, CUevent start, CUevent end)
{
    return impl_cuEventElapsedTime_v2(ms, start, end);
}
