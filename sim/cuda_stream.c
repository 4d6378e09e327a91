/* The simulated libcuda: streams. All work of a context is one queue in the simulation, whatever the
 * stream; its order is kept. */
#include "cuda_sim.h"

#include <stdlib.h>
#include <time.h>

struct CUstream_st {
    CUcontext context;
    unsigned int flags;
    int priority;
    unsigned long long id;
    int64_t last; /* the number of its last work in the context's queue */
    struct CUstream_st *next, *before;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *streams;

void sleep_ns(uint64_t ns)
{
    nanosleep(&(struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)}, NULL);
}

CUresult wait_work(CUcontext context, int64_t work)
{
    uint64_t left;

    while ((left = sim_pending_ns(context->work, (uint64_t)work)))
        sleep_ns(left);
    return CUDA_SUCCESS;
}

CUresult wait_context(CUcontext context)
{
    return wait_work(context, (int64_t)sim_submitted(context->work));
}

static bool is_own(CUstream stream)
{
    return stream != NULL && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD;
}

CUresult context_of(CUstream stream, CUcontext *context)
{
    if (!is_own(stream))
        return current(context);
    TRY(ready());
    if (!handle_is(stream, HANDLE_STREAM))
        return CUDA_ERROR_INVALID_HANDLE;
    *context = stream->context;
    return CUDA_SUCCESS;
}

int64_t last_work(CUstream stream, CUcontext context)
{
    return is_own(stream) ? __atomic_load_n(&stream->last, __ATOMIC_RELAXED)
                          : (int64_t)sim_submitted(context->work);
}

void set_last_work(CUstream stream, int64_t work)
{
    if (is_own(stream))
        __atomic_store_n(&stream->last, work, __ATOMIC_RELAXED);
}

CUresult impl_cuStreamCreateWithPriority(CUstream *made, unsigned int flags, int priority)
{
    static unsigned long long last_id = 2; /* 1 and 2 are the context's own streams */
    CUcontext context;

    TRY(current(&context));
    if (!made || flags & ~(unsigned int)CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    struct CUstream_st *stream = calloc(1, sizeof *stream);
    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = handle_add(stream, HANDLE_STREAM);
    if (result != CUDA_SUCCESS) {
        free(stream);
        return result;
    }
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    pthread_mutex_lock(&lock);
    stream->id = ++last_id;
    stream->next = streams;
    if (streams)
        streams->before = stream;
    streams = stream;
    pthread_mutex_unlock(&lock);
    *made = stream;
    return CUDA_SUCCESS;
}

CUresult impl_cuStreamCreate(CUstream *made, unsigned int flags)
{
    return impl_cuStreamCreateWithPriority(made, flags, 0);
}

/* Under the lock. Whoever drops its handle does. */
static void unlink_and_free(CUstream stream)
{
    if (stream->before)
        stream->before->next = stream->next;
    else
        streams = stream->next;
    if (stream->next)
        stream->next->before = stream->before;
    free(stream);
}

CUresult impl_cuStreamDestroy_v2(CUstream stream)
{
    TRY(ready());
    if (!handle_drop(stream, HANDLE_STREAM))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    unlink_and_free(stream);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult impl_cuStreamDestroy(CUstream stream)
{
    return impl_cuStreamDestroy_v2(stream);
}

void drop_streams_of(CUcontext context)
{
    pthread_mutex_lock(&lock);
    for (struct CUstream_st *next, *it = streams; it; it = next) {
        next = it->next;
        if (it->context == context && handle_drop(it, HANDLE_STREAM))
            unlink_and_free(it);
    }
    pthread_mutex_unlock(&lock);
}

CUresult impl_cuStreamSynchronize(CUstream stream)
{
    CUcontext context;

    TRY(context_of(stream, &context));
    return wait_work(context, last_work(stream, context));
}

CUresult impl_cuStreamQuery(CUstream stream)
{
    CUcontext context;

    TRY(context_of(stream, &context));
    bool busy = sim_pending_ns(context->work, (uint64_t)last_work(stream, context));
    return busy ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CUresult impl_cuStreamGetFlags(CUstream stream, unsigned int *flags)
{
    CUcontext context;

    TRY(context_of(stream, &context));
    if (!flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = is_own(stream) ? stream->flags : 0;
    return CUDA_SUCCESS;
}

CUresult impl_cuStreamGetPriority(CUstream stream, int *priority)
{
    CUcontext context;

    TRY(context_of(stream, &context));
    if (!priority)
        return CUDA_ERROR_INVALID_VALUE;
    *priority = is_own(stream) ? stream->priority : 0;
    return CUDA_SUCCESS;
}

CUresult impl_cuStreamGetId(CUstream stream, unsigned long long *id)
{
    CUcontext context;

    TRY(context_of(stream, &context));
    if (!id)
        return CUDA_ERROR_INVALID_VALUE;
    *id = is_own(stream) ? stream->id : stream == CU_STREAM_PER_THREAD ? 2 : 1;
    return CUDA_SUCCESS;
}

CUresult impl_cuStreamGetCtx(CUstream stream, CUcontext *context)
{
    TRY(ready());
    return context ? context_of(stream, context) : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuStreamGetDevice(CUstream stream, CUdevice *device)
{
    CUcontext context;

    TRY(context_of(stream, &context));
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = context->device;
    return CUDA_SUCCESS;
}

CUresult impl_cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    CUcontext context;

    TRY(context_of(stream, &context));
    if (!status)
        return CUDA_ERROR_INVALID_VALUE;
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

/* The function runs in the caller, after what is queued before it. */
CUresult impl_cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument)
{
    TRY(ready());
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(impl_cuStreamSynchronize(stream));
    function(argument);
    return CUDA_SUCCESS;
}

CUresult impl_cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void *argument,
                                  unsigned int flags)
{
    TRY(ready());
    if (!callback || flags)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(impl_cuStreamSynchronize(stream));
    callback(stream, CUDA_SUCCESS, argument);
    return CUDA_SUCCESS;
}
