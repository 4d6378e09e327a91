/* The simulated libcuda: copies and fills. All memory is the host's, so they are memcpy and memset;
 * they are done when the call returns, whatever the stream. */
#include "cuda_sim.h"

#include <string.h>

static CUresult copy(uintptr_t to, uintptr_t from, size_t bytes)
{
    CUcontext context;

    TRY(current(&context));
    TRY(wait_context(context));
    if (bytes && (!to || !from))
        return CUDA_ERROR_INVALID_VALUE;
    memmove((void *)to, (const void *)from, bytes);
    return CUDA_SUCCESS;
}

static CUresult copy_later(uintptr_t to, uintptr_t from, size_t bytes, CUstream stream)
{
    CUcontext context;

    TRY(context_of(stream, &context));
    if (bytes && (!to || !from))
        return CUDA_ERROR_INVALID_VALUE;
    memmove((void *)to, (const void *)from, bytes);
    return CUDA_SUCCESS;
}

CUresult impl_cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    return copy(to, from, bytes);
}

CUresult impl_cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes)
{
    return copy(to, (uintptr_t)from, bytes);
}

CUresult impl_cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes)
{
    return copy((uintptr_t)to, from, bytes);
}

CUresult impl_cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    return copy(to, from, bytes);
}

CUresult impl_cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return copy_later(to, from, bytes, stream);
}

CUresult impl_cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    return copy_later(to, (uintptr_t)from, bytes, stream);
}

CUresult impl_cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return copy_later((uintptr_t)to, from, bytes, stream);
}

CUresult impl_cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return copy_later(to, from, bytes, stream);
}

CUresult impl_cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                           CUcontext from_context, size_t bytes)
{
    if (!handle_is(to_context, HANDLE_CONTEXT) || !handle_is(from_context, HANDLE_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    return copy(to, from, bytes);
}

CUresult impl_cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                                CUcontext from_context, size_t bytes, CUstream stream)
{
    if (!handle_is(to_context, HANDLE_CONTEXT) || !handle_is(from_context, HANDLE_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    return copy_later(to, from, bytes, stream);
}

static uintptr_t side(CUmemorytype type, const void *host, CUdeviceptr device)
{
    switch (type) {
    case CU_MEMORYTYPE_HOST: return (uintptr_t)host;
    case CU_MEMORYTYPE_DEVICE:
    case CU_MEMORYTYPE_UNIFIED: return device;
    default: return 0; /* arrays keep no content */
    }
}

static CUresult copy_rows(const CUDA_MEMCPY2D *it)
{
    uintptr_t to = side(it->dstMemoryType, it->dstHost, it->dstDevice);
    uintptr_t from = side(it->srcMemoryType, it->srcHost, it->srcDevice);

    if (!to || !from)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (it->Height > 1 && (it->WidthInBytes > it->dstPitch || it->WidthInBytes > it->srcPitch))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t row = 0; row < it->Height; row++)
        memmove((char *)to + (it->dstY + row) * it->dstPitch + it->dstXInBytes,
                (const char *)from + (it->srcY + row) * it->srcPitch + it->srcXInBytes,
                it->WidthInBytes);
    return CUDA_SUCCESS;
}

CUresult impl_cuMemcpy2D_v2(const CUDA_MEMCPY2D *it)
{
    CUcontext context;

    TRY(current(&context));
    TRY(wait_context(context));
    return it ? copy_rows(it) : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *it)
{
    return impl_cuMemcpy2D_v2(it);
}

CUresult impl_cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *it, CUstream stream)
{
    CUcontext context;

    TRY(context_of(stream, &context));
    return it ? copy_rows(it) : CUDA_ERROR_INVALID_VALUE;
}

/* Rows of `width` elements of `size` bytes, each equal to the low bytes of `value`. */
static CUresult fill(CUdeviceptr at, size_t pitch, unsigned int value, size_t size, size_t width,
                     size_t height)
{
    CUcontext context;

    TRY(current(&context));
    if (!at || at % size)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t row = 0; row < height; row++)
        for (size_t i = 0; i < width; i++)
            memcpy((char *)at + row * pitch + i * size, &value, size);
    return CUDA_SUCCESS;
}

#define FILLS(bits, type)                                                                        \
    CUresult impl_cuMemsetD##bits##_v2(CUdeviceptr at, type value, size_t count)                 \
    {                                                                                            \
        return fill(at, 0, value, sizeof value, count, 1);                                       \
    }                                                                                            \
    CUresult impl_cuMemsetD##bits##Async(CUdeviceptr at, type value, size_t count, CUstream s)   \
    {                                                                                            \
        (void)s;                                                                                 \
        return fill(at, 0, value, sizeof value, count, 1);                                       \
    }                                                                                            \
    CUresult impl_cuMemsetD2D##bits##_v2(CUdeviceptr at, size_t pitch, type value, size_t width, \
                                         size_t height)                                          \
    {                                                                                            \
        return fill(at, pitch, value, sizeof value, width, height);                              \
    }

FILLS(8, unsigned char)
FILLS(16, unsigned short)
FILLS(32, unsigned int)
