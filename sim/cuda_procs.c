/* The simulated libcuda: errors, and entry points by name. */
#include "cuda_sim.h"

#include <string.h>

static const struct error_text *error_text(CUresult error)
{
    const struct error_text *it = error_texts;

    while (it->name && it->number != (int)error)
        it++;
    return it->name ? it : NULL;
}

CUresult impl_cuGetErrorName(CUresult error, const char **name)
{
    const struct error_text *it = error_text(error);

    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    *name = it ? it->name : NULL;
    return it ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuGetErrorString(CUresult error, const char **text)
{
    const struct error_text *it = error_text(error);

    if (!text)
        return CUDA_ERROR_INVALID_VALUE;
    *text = it ? it->text : NULL;
    return it ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The newest form of a function that is not newer than `version`, as a driver of `driver` has it. */
static void *newest(const char *name, int version, int driver, bool threaded,
                    CUdriverProcAddressQueryResult *status)
{
    void *function = NULL;

    *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    for (const struct procedure *it = procedures; it->name; it++) {
        if (it->version > driver || strcmp(it->name, name))
            continue;
        if (it->version <= version) { /* rows of one name go up by version: the last one counts */
            function = threaded ? it->per_thread : it->legacy;
            *status = CU_GET_PROC_ADDRESS_SUCCESS;
        } else if (!function)
            *status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    }
    return function;
}

CUresult impl_cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                                  CUdriverProcAddressQueryResult *status)
{
    bool threaded = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    CUdriverProcAddressQueryResult found;

    if (!name || !function || flags & ~3ull)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(from_errno(sim_attach()));
    *function = newest(name, version, sim_conf()->cuda_version, threaded, &found);
    if (status)
        *status = found;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult impl_cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags)
{
    return impl_cuGetProcAddress_v2(name, function, version, flags, NULL);
}
