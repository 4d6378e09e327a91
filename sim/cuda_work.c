/* The simulated libcuda: modules, launches, streams and events.
 *
 * A kernel `spin_ns` occupies the card for as many nanoseconds as its first parameter says. All
 * work of a context is one queue in the simulation, whatever the stream; its order is kept. */
#include "cuda_sim.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SPIN "spin_ns"

struct CUmod_st {
    CUcontext context;
};

struct CUfunc_st {
    CUmodule module;
};

struct CUstream_st {
    CUcontext context;
    unsigned int flags;
    int priority;
    int64_t last; /* the number of its last work in the context's queue */
    struct CUstream_st *next;
};

struct CUevent_st {
    CUcontext context; /* in which it was recorded; NULL: not yet */
    unsigned int flags;
    int64_t work;
    uint64_t recorded_ns;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *streams;
static struct CUmod_st image; /* all images are alike, and so are all kernels */
static struct CUfunc_st spin = {&image};

static uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void sleep_ns(uint64_t ns)
{
    nanosleep(&(struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)}, NULL);
}

static CUresult wait_work(CUcontext context, int64_t work)
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

void forget_context_work(CUcontext context)
{
    pthread_mutex_lock(&lock);
    for (struct CUstream_st **link = &streams; *link;) {
        struct CUstream_st *it = *link;

        if (it->context == context) {
            *link = it->next;
            free(it);
        } else
            link = &it->next;
    }
    pthread_mutex_unlock(&lock);
}

/* Modules: any image will do. */

static CUresult load(CUmodule *module, const void *given)
{
    CUcontext context;

    TRY(current(&context));
    if (!module || !given)
        return CUDA_ERROR_INVALID_VALUE;
    *module = &image;
    return CUDA_SUCCESS;
}

CUresult impl_cuModuleLoadData(CUmodule *module, const void *data)
{
    return load(module, data);
}

CUresult impl_cuModuleLoadDataEx(CUmodule *module, const void *data, unsigned int count,
                                 CUjit_option *options, void **values)
{
    (void)count;
    (void)options;
    (void)values;
    return load(module, data);
}

CUresult impl_cuModuleLoadFatBinary(CUmodule *module, const void *data)
{
    return load(module, data);
}

CUresult impl_cuModuleUnload(CUmodule module)
{
    TRY(ready());
    return module == &image ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult impl_cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    TRY(ready());
    if (!function || module != &image || !name)
        return CUDA_ERROR_INVALID_VALUE;
    if (strcmp(name, SPIN))
        return CUDA_ERROR_NOT_FOUND;
    *function = &spin;
    return CUDA_SUCCESS;
}

CUresult impl_cuFuncGetModule(CUmodule *module, CUfunction function)
{
    TRY(ready());
    if (!module || function != &spin)
        return CUDA_ERROR_INVALID_VALUE;
    *module = &image;
    return CUDA_SUCCESS;
}

/* Streams. NULL and the two special values stand for the default streams of the current context. */

static CUresult context_of(CUstream stream, CUcontext *context)
{
    if (stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD)
        return current(context);
    TRY(ready());
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    for (struct CUstream_st *it = streams; it; it = it->next)
        if (it == stream) {
            *context = it->context;
            result = CUDA_SUCCESS;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

static bool is_own(CUstream stream)
{
    return stream != NULL && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD;
}

/* The number of the last work that the stream has to wait for: its own, or all of the context's. */
static int64_t last_work(CUstream stream, CUcontext context)
{
    return is_own(stream) ? __atomic_load_n(&stream->last, __ATOMIC_RELAXED)
                          : (int64_t)sim_submitted(context->work);
}

CUresult impl_cuStreamCreateWithPriority(CUstream *made, unsigned int flags, int priority)
{
    CUcontext context;

    TRY(current(&context));
    if (!made || flags & ~(unsigned int)CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    struct CUstream_st *stream = calloc(1, sizeof *stream);
    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    pthread_mutex_lock(&lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    *made = stream;
    return CUDA_SUCCESS;
}

CUresult impl_cuStreamCreate(CUstream *made, unsigned int flags)
{
    return impl_cuStreamCreateWithPriority(made, flags, 0);
}

CUresult impl_cuStreamDestroy_v2(CUstream stream)
{
    CUcontext context;

    if (!is_own(stream))
        return CUDA_ERROR_INVALID_HANDLE;
    TRY(context_of(stream, &context));
    pthread_mutex_lock(&lock);
    struct CUstream_st **link = &streams;
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
    pthread_mutex_unlock(&lock);
    free(stream);
    return CUDA_SUCCESS;
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

/* One queue keeps the order anyway; between contexts it is kept by waiting. */
CUresult impl_cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
    CUcontext context;

    TRY(context_of(stream, &context));
    if (!event || flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    if (!event->context || event->context == context)
        return CUDA_SUCCESS;
    return wait_work(event->context, event->work);
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

CUresult impl_cuStreamGetCtx(CUstream stream, CUcontext *context)
{
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

/* Launches. They return at once, unless the context's queue is full: then they wait for room. */

static CUresult launch(CUfunction function, CUstream stream, void **parameters, void **extra)
{
    uint64_t ns = 0;
    CUcontext context;
    int64_t work;

    TRY(context_of(stream, &context));
    if (function != &spin)
        return CUDA_ERROR_INVALID_HANDLE;
    if (parameters)
        memcpy(&ns, parameters[0], sizeof ns);
    for (int i = 0; !parameters && extra && extra[i] != CU_LAUNCH_PARAM_END; i += 2)
        if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER)
            memcpy(&ns, extra[i + 1], sizeof ns);
    while ((work = sim_submit(context->work, ns)) == -EAGAIN)
        sleep_ns(sim_oldest_ns(context->work));
    if (is_own(stream))
        __atomic_store_n(&stream->last, work, __ATOMIC_RELAXED);
    return CUDA_SUCCESS;
}

CUresult impl_cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                             unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                             unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                             void **parameters, void **extra)
{
    (void)shared_bytes;
    if (!grid_x || !grid_y || !grid_z || !block_x || !block_y || !block_z)
        return CUDA_ERROR_INVALID_VALUE;
    return launch(function, stream, parameters, extra);
}

CUresult impl_cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x,
                                        unsigned int grid_y, unsigned int grid_z,
                                        unsigned int block_x, unsigned int block_y,
                                        unsigned int block_z, unsigned int shared_bytes,
                                        CUstream stream, void **parameters)
{
    return impl_cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                               shared_bytes, stream, parameters, NULL);
}

CUresult impl_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                               void **extra)
{
    return config ? launch(function, config->hStream, parameters, extra) : CUDA_ERROR_INVALID_VALUE;
}

/* The function runs in the caller, after what is queued before it. */
CUresult impl_cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument)
{
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(impl_cuStreamSynchronize(stream));
    function(argument);
    return CUDA_SUCCESS;
}

CUresult impl_cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void *argument,
                                  unsigned int flags)
{
    if (!callback || flags)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(impl_cuStreamSynchronize(stream));
    callback(stream, CUDA_SUCCESS, argument);
    return CUDA_SUCCESS;
}

/* Events. */

CUresult impl_cuEventCreate(CUevent *made, unsigned int flags)
{
    CUcontext context;

    TRY(current(&context));
    if (!made)
        return CUDA_ERROR_INVALID_VALUE;
    *made = calloc(1, sizeof **made);
    if (!*made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*made)->flags = flags;
    return CUDA_SUCCESS;
}

CUresult impl_cuEventDestroy_v2(CUevent event)
{
    TRY(ready());
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    free(event);
    return CUDA_SUCCESS;
}

CUresult impl_cuEventRecord(CUevent event, CUstream stream)
{
    CUcontext context;

    TRY(context_of(stream, &context));
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    event->work = last_work(stream, context);
    event->context = context;
    event->recorded_ns = now_ns();
    return CUDA_SUCCESS;
}

CUresult impl_cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags)
{
    (void)flags;
    return impl_cuEventRecord(event, stream);
}

CUresult impl_cuEventQuery(CUevent event)
{
    TRY(ready());
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!event->context || !context_exists(event->context))
        return CUDA_SUCCESS;
    bool busy = sim_pending_ns(event->context->work, (uint64_t)event->work);
    return busy ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CUresult impl_cuEventSynchronize(CUevent event)
{
    TRY(ready());
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!event->context || !context_exists(event->context))
        return CUDA_SUCCESS;
    return wait_work(event->context, event->work);
}

/* When it happened: when the work before it ended, or when it was recorded, if that was later. */
static uint64_t happened_ns(CUevent event)
{
    uint64_t ended = sim_ended_ns(event->context->work, (uint64_t)event->work);

    return ended > event->recorded_ns ? ended : event->recorded_ns;
}

CUresult impl_cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end)
{
    TRY(ready());
    if (!ms || !start || !end || !start->context || !end->context)
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
