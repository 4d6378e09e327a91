/* The simulated libcuda: arrays and mipmapped arrays, charged the sum of their elements. */
#include "cuda_sim.h"

#include <stdlib.h>

#define MAX_LEVELS 32

struct CUarray_st {
    CUcontext context;
    CUDA_ARRAY3D_DESCRIPTOR descriptor;
    size_t charged; /* 0 for a level of a mipmapped array */
    struct CUarray_st *next;
};

struct CUmipmappedArray_st {
    CUcontext context;
    unsigned int levels;
    size_t charged;
    struct CUarray_st level[MAX_LEVELS];
    struct CUmipmappedArray_st *next;
};

static struct CUarray_st *arrays;
static struct CUmipmappedArray_st *mipmaps;

static size_t element_bytes(CUarray_format format)
{
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8: return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF: return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT: return 4;
    default: return 0;
    }
}

static size_t extent(size_t given)
{
    return given ? given : 1;
}

/* Product of the extents (0 counts as 1), element size and channels; 0: not a valid array. */
static size_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *of)
{
    if (of->NumChannels != 1 && of->NumChannels != 2 && of->NumChannels != 4)
        return 0;
    return extent(of->Width) * extent(of->Height) * extent(of->Depth) *
           element_bytes(of->Format) * of->NumChannels;
}

static unsigned int card_of(CUcontext context)
{
    return device_at(context->device)->card;
}

CUresult impl_cuArray3DCreate_v2(CUarray *made, const CUDA_ARRAY3D_DESCRIPTOR *descriptor)
{
    CUcontext context;

    TRY(current(&context));
    if (!made || !descriptor || !descriptor->Width || !array_bytes(descriptor))
        return CUDA_ERROR_INVALID_VALUE;
    struct CUarray_st *array = calloc(1, sizeof *array);
    if (!array)
        return CUDA_ERROR_OUT_OF_MEMORY;
    array->context = context;
    array->descriptor = *descriptor;
    array->charged = array_bytes(descriptor);
    CUresult result = from_errno(sim_charge(card_of(context), array->charged));
    if (result != CUDA_SUCCESS) {
        free(array);
        return result;
    }
    pthread_mutex_lock(&memory_lock);
    array->next = arrays;
    arrays = array;
    pthread_mutex_unlock(&memory_lock);
    *made = array;
    return CUDA_SUCCESS;
}

CUresult impl_cuArrayCreate_v2(CUarray *made, const CUDA_ARRAY_DESCRIPTOR *descriptor)
{
    if (!descriptor)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_ARRAY3D_DESCRIPTOR full = {.Width = descriptor->Width, .Height = descriptor->Height,
                                    .Format = descriptor->Format,
                                    .NumChannels = descriptor->NumChannels};
    return impl_cuArray3DCreate_v2(made, &full);
}

/* Unlink the array; whether it was there. Levels of mipmapped arrays are not. Under memory_lock. */
static bool unlink_array(CUarray array)
{
    struct CUarray_st **link = &arrays;

    while (*link && *link != array)
        link = &(*link)->next;
    if (!*link)
        return false;
    *link = array->next;
    return true;
}

CUresult impl_cuArrayDestroy(CUarray array)
{
    TRY(ready());
    pthread_mutex_lock(&memory_lock);
    bool found = unlink_array(array);
    pthread_mutex_unlock(&memory_lock);
    if (!found)
        return CUDA_ERROR_INVALID_HANDLE;
    sim_uncharge(card_of(array->context), array->charged);
    free(array);
    return CUDA_SUCCESS;
}

CUresult impl_cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *descriptor, CUarray array)
{
    TRY(ready());
    if (!descriptor || !array)
        return CUDA_ERROR_INVALID_VALUE;
    *descriptor = array->descriptor;
    return CUDA_SUCCESS;
}

CUresult impl_cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *descriptor, CUarray array)
{
    TRY(ready());
    if (!descriptor || !array)
        return CUDA_ERROR_INVALID_VALUE;
    *descriptor = (CUDA_ARRAY_DESCRIPTOR){
        .Width = array->descriptor.Width, .Height = array->descriptor.Height,
        .Format = array->descriptor.Format, .NumChannels = array->descriptor.NumChannels};
    return CUDA_SUCCESS;
}

static size_t halved(size_t extent_now)
{
    return extent_now > 1 ? extent_now / 2 : extent_now;
}

CUresult impl_cuMipmappedArrayCreate(CUmipmappedArray *made,
                                     const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels)
{
    CUcontext context;

    TRY(current(&context));
    if (!made || !descriptor || !descriptor->Width || !array_bytes(descriptor) || !levels ||
        levels > MAX_LEVELS)
        return CUDA_ERROR_INVALID_VALUE;
    struct CUmipmappedArray_st *mipmap = calloc(1, sizeof *mipmap);
    if (!mipmap)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUDA_ARRAY3D_DESCRIPTOR level = *descriptor;
    mipmap->context = context;
    while (mipmap->levels < levels) {
        struct CUarray_st *array = &mipmap->level[mipmap->levels++];

        array->context = context;
        array->descriptor = level;
        mipmap->charged += array_bytes(&level);
        if (extent(level.Width) * extent(level.Height) * extent(level.Depth) == 1)
            break; /* there is no smaller level, whatever was asked for */
        level.Width = halved(level.Width);
        level.Height = halved(level.Height);
        if (!(level.Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)))
            level.Depth = halved(level.Depth); /* else it is a number of layers */
    }
    CUresult result = from_errno(sim_charge(card_of(context), mipmap->charged));
    if (result != CUDA_SUCCESS) {
        free(mipmap);
        return result;
    }
    pthread_mutex_lock(&memory_lock);
    mipmap->next = mipmaps;
    mipmaps = mipmap;
    pthread_mutex_unlock(&memory_lock);
    *made = mipmap;
    return CUDA_SUCCESS;
}

CUresult impl_cuMipmappedArrayGetLevel(CUarray *array, CUmipmappedArray mipmap, unsigned int level)
{
    TRY(ready());
    if (!array || !mipmap || level >= mipmap->levels)
        return CUDA_ERROR_INVALID_VALUE;
    *array = &mipmap->level[level];
    return CUDA_SUCCESS;
}

static bool unlink_mipmap(CUmipmappedArray mipmap)
{
    struct CUmipmappedArray_st **link = &mipmaps;

    while (*link && *link != mipmap)
        link = &(*link)->next;
    if (!*link)
        return false;
    *link = mipmap->next;
    return true;
}

CUresult impl_cuMipmappedArrayDestroy(CUmipmappedArray mipmap)
{
    TRY(ready());
    pthread_mutex_lock(&memory_lock);
    bool found = unlink_mipmap(mipmap);
    pthread_mutex_unlock(&memory_lock);
    if (!found)
        return CUDA_ERROR_INVALID_HANDLE;
    sim_uncharge(card_of(mipmap->context), mipmap->charged);
    free(mipmap);
    return CUDA_SUCCESS;
}

void drop_arrays_of(CUcontext context)
{
    pthread_mutex_lock(&memory_lock);
    for (struct CUarray_st *next, *it = arrays; it; it = next) {
        next = it->next;
        if (it->context == context && unlink_array(it)) {
            sim_uncharge(card_of(context), it->charged);
            free(it);
        }
    }
    for (struct CUmipmappedArray_st *next, *it = mipmaps; it; it = next) {
        next = it->next;
        if (it->context == context && unlink_mipmap(it)) {
            sim_uncharge(card_of(context), it->charged);
            free(it);
        }
    }
    pthread_mutex_unlock(&memory_lock);
}
