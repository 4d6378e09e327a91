/* The simulated libcuda: launches. The kernel occupies the card for as many nanoseconds as its first
 * parameter says. A launch returns at once, unless the context's queue is full: then it waits for
 * room, as with a real card. */
#include "cuda_sim.h"

#include <errno.h>
#include <string.h>

#define MOST_THREADS 1024

static bool is_shape(unsigned int x, unsigned int y, unsigned int z, uint64_t most)
{
    return x && y && z && (uint64_t)x * y <= most && (uint64_t)x * y * z <= most;
}

static uint64_t first_parameter(void **parameters, void **extra)
{
    uint64_t ns = 0;

    if (parameters && parameters[0])
        memcpy(&ns, parameters[0], sizeof ns);
    for (int i = 0; !parameters && extra && extra[i] != CU_LAUNCH_PARAM_END; i += 2)
        if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER)
            memcpy(&ns, extra[i + 1], sizeof ns);
    return ns;
}

static CUresult launch(CUfunction function, CUstream stream, uint64_t ns)
{
    CUcontext context;
    int64_t work;

    TRY(context_of(stream, &context));
    if (!handle_is(function, HANDLE_FUNCTION))
        return CUDA_ERROR_INVALID_HANDLE;
    while ((work = sim_submit(context->work, ns)) == -EAGAIN)
        sleep_ns(sim_oldest_ns(context->work));
    set_last_work(stream, work);
    return CUDA_SUCCESS;
}

CUresult impl_cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                             unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                             unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                             void **parameters, void **extra)
{
    (void)shared_bytes;
    TRY(ready());
    if (!is_shape(grid_x, grid_y, grid_z, UINT64_MAX) ||
        !is_shape(block_x, block_y, block_z, MOST_THREADS))
        return CUDA_ERROR_INVALID_VALUE;
    return launch(function, stream, first_parameter(parameters, extra));
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
    TRY(ready());
    if (!config)
        return CUDA_ERROR_INVALID_VALUE;
    return impl_cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ,
                               config->blockDimX, config->blockDimY, config->blockDimZ,
                               config->sharedMemBytes, config->hStream, parameters, extra);
}
