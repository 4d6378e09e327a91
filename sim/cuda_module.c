/* The simulated libcuda: modules, libraries and their kernels. Any image will do: it has one kernel,
 * `spin_ns`, with one parameter of 64 bits. */
#include "cuda_sim.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SPIN "spin_ns"
#define MOST_THREADS 1024

/* A function is a kernel, too: both names stand for the same. */
struct CUfunc_st {
    CUmodule module;
};

struct CUmod_st {
    CUcontext context; /* NULL: a library's */
    struct CUfunc_st spin;
};

static CUresult make(CUcontext context, enum handle kind, CUmodule *made)
{
    struct CUmod_st *module = calloc(1, sizeof *module);

    if (!module)
        return CUDA_ERROR_OUT_OF_MEMORY;
    module->context = context;
    module->spin.module = module;
    CUresult result = handle_add(module, kind);
    if (result == CUDA_SUCCESS)
        result = handle_add(&module->spin, HANDLE_FUNCTION);
    if (result == CUDA_SUCCESS)
        *made = module;
    return result;
}

static CUresult unmake(CUmodule module, enum handle kind)
{
    TRY(ready());
    if (!handle_drop(module, kind))
        return CUDA_ERROR_INVALID_HANDLE;
    handle_drop(&module->spin, HANDLE_FUNCTION);
    free(module);
    return CUDA_SUCCESS;
}

static CUresult load(CUmodule *module, const void *given)
{
    CUcontext context;

    TRY(current(&context));
    if (!module || !given)
        return CUDA_ERROR_INVALID_VALUE;
    return make(context, HANDLE_MODULE, module);
}

CUresult impl_cuModuleLoad(CUmodule *module, const char *path)
{
    if (path && access(path, R_OK))
        return CUDA_ERROR_FILE_NOT_FOUND;
    return load(module, path);
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
    return unmake(module, HANDLE_MODULE);
}

CUresult impl_cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
    TRY(ready());
    if (!mode)
        return CUDA_ERROR_INVALID_VALUE;
    *mode = CU_MODULE_EAGER_LOADING;
    return CUDA_SUCCESS;
}

static CUresult spin_of(CUmodule module, enum handle kind, const char *name, CUfunction *function)
{
    TRY(ready());
    if (!handle_is(module, kind))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!function || !name)
        return CUDA_ERROR_INVALID_VALUE;
    if (strcmp(name, SPIN))
        return CUDA_ERROR_NOT_FOUND;
    *function = &module->spin;
    return CUDA_SUCCESS;
}

CUresult impl_cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    return spin_of(module, HANDLE_MODULE, name, function);
}

CUresult impl_cuModuleGetFunctionCount(unsigned int *count, CUmodule module)
{
    TRY(ready());
    if (!handle_is(module, HANDLE_MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = 1;
    return CUDA_SUCCESS;
}

static CUresult no_variable(CUmodule module, enum handle kind, const char *name)
{
    TRY(ready());
    if (!handle_is(module, kind))
        return CUDA_ERROR_INVALID_HANDLE;
    return name ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuModuleGetGlobal_v2(CUdeviceptr *at, size_t *bytes, CUmodule module, const char *name)
{
    (void)at;
    (void)bytes;
    return no_variable(module, HANDLE_MODULE, name);
}

/* Libraries are modules of every context. */

CUresult impl_cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options,
                                void **values, unsigned int count, CUlibraryOption *more,
                                void **more_values, unsigned int more_count)
{
    (void)options;
    (void)values;
    (void)count;
    (void)more;
    (void)more_values;
    (void)more_count;
    TRY(ready());
    if (!library || !code)
        return CUDA_ERROR_INVALID_VALUE;
    return make(NULL, HANDLE_LIBRARY, (CUmodule *)library);
}

CUresult impl_cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *options,
                                    void **values, unsigned int count, CUlibraryOption *more,
                                    void **more_values, unsigned int more_count)
{
    if (path && access(path, R_OK))
        return CUDA_ERROR_FILE_NOT_FOUND;
    return impl_cuLibraryLoadData(library, path, options, values, count, more, more_values,
                                  more_count);
}

CUresult impl_cuLibraryUnload(CUlibrary library)
{
    return unmake((CUmodule)library, HANDLE_LIBRARY);
}

CUresult impl_cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    return spin_of((CUmodule)library, HANDLE_LIBRARY, name, (CUfunction *)kernel);
}

CUresult impl_cuLibraryGetKernelCount(unsigned int *count, CUlibrary library)
{
    TRY(ready());
    if (!handle_is(library, HANDLE_LIBRARY))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = 1;
    return CUDA_SUCCESS;
}

CUresult impl_cuLibraryGetGlobal(CUdeviceptr *at, size_t *bytes, CUlibrary library, const char *name)
{
    (void)at;
    (void)bytes;
    return no_variable((CUmodule)library, HANDLE_LIBRARY, name);
}

static CUresult is_function(const void *function)
{
    TRY(ready());
    return handle_is(function, HANDLE_FUNCTION) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult impl_cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    CUcontext context;

    TRY(current(&context));
    TRY(is_function(kernel));
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

CUresult impl_cuKernelGetLibrary(CUlibrary *library, CUkernel kernel)
{
    TRY(is_function(kernel));
    if (!library)
        return CUDA_ERROR_INVALID_VALUE;
    *library = (CUlibrary)((CUfunction)kernel)->module;
    return CUDA_SUCCESS;
}

/* What is known of a function. */

static CUresult name_of(const char **name, const void *function)
{
    TRY(is_function(function));
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    *name = SPIN;
    return CUDA_SUCCESS;
}

CUresult impl_cuFuncGetName(const char **name, CUfunction function)
{
    return name_of(name, function);
}

CUresult impl_cuKernelGetName(const char **name, CUkernel kernel)
{
    return name_of(name, kernel);
}

CUresult impl_cuFuncGetModule(CUmodule *module, CUfunction function)
{
    TRY(is_function(function));
    if (!module)
        return CUDA_ERROR_INVALID_VALUE;
    *module = function->module;
    return CUDA_SUCCESS;
}

static CUresult parameter(const void *function, size_t index, size_t *offset, size_t *size)
{
    TRY(is_function(function));
    if (index || !offset)
        return CUDA_ERROR_INVALID_VALUE;
    *offset = 0;
    if (size)
        *size = sizeof(uint64_t);
    return CUDA_SUCCESS;
}

CUresult impl_cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size)
{
    return parameter(function, index, offset, size);
}

CUresult impl_cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size)
{
    return parameter(kernel, index, offset, size);
}

static CUresult attribute(int *value, CUfunction_attribute which, const void *function)
{
    TRY(is_function(function));
    if (!value || which < 0 || which >= CU_FUNC_ATTRIBUTE_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? MOST_THREADS
             : which == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
             : which == CU_FUNC_ATTRIBUTE_BINARY_VERSION      ? 80
             : which == CU_FUNC_ATTRIBUTE_PTX_VERSION         ? 80
                                                              : 0;
    return CUDA_SUCCESS;
}

CUresult impl_cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function)
{
    return attribute(value, which, function);
}

CUresult impl_cuKernelGetAttribute(int *value, CUfunction_attribute which, CUkernel kernel,
                                   CUdevice device)
{
    struct device *it;

    TRY(device_of(device, &it));
    return attribute(value, which, kernel);
}

CUresult impl_cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value)
{
    return attribute(&value, which, function);
}

CUresult impl_cuKernelSetAttribute(CUfunction_attribute which, int value, CUkernel kernel,
                                   CUdevice device)
{
    return impl_cuKernelGetAttribute(&value, which, kernel, device);
}

CUresult impl_cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config)
{
    (void)config;
    return is_function(function);
}

CUresult impl_cuFuncLoad(CUfunction function)
{
    return is_function(function);
}

CUresult impl_cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction function)
{
    TRY(is_function(function));
    if (!state)
        return CUDA_ERROR_INVALID_VALUE;
    *state = CU_FUNCTION_LOADING_STATE_LOADED;
    return CUDA_SUCCESS;
}

CUresult impl_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function,
                                                                   int threads, size_t shared_bytes,
                                                                   unsigned int flags)
{
    (void)shared_bytes;
    (void)flags;
    TRY(is_function(function));
    if (!blocks || threads <= 0 || threads > MOST_THREADS)
        return CUDA_ERROR_INVALID_VALUE;
    *blocks = 2 * MOST_THREADS / threads < 32 ? 2 * MOST_THREADS / threads : 32;
    return CUDA_SUCCESS;
}

CUresult impl_cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function,
                                                          int threads, size_t shared_bytes)
{
    return impl_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads,
                                                                     shared_bytes, 0);
}
