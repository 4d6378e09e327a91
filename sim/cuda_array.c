/* The simulated libcuda: arrays and mipmapped arrays, charged the sum of their elements. */
#include "cuda_sim.h"

#include <stdlib.h>

#define MAX_LEVELS 32
#define MOST_2D 131072u
#define MOST_LAYERED 32768u
#define MOST_3D 16384u

struct CUarray_st {
    CUDA_ARRAY3D_DESCRIPTOR descriptor;
};

/* One level, and an array; or a mipmapped array. All under memory_lock. */
struct CUmipmappedArray_st {
    enum handle kind;
    CUcontext context;
    size_t charged;
    struct CUmipmappedArray_st *next, *before;
    unsigned int levels;
    struct CUarray_st level[]; /* the first is an array's handle */
};

static struct CUmipmappedArray_st *all;

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

/* What the cards of the last years take, at most. */
static bool is_valid(const CUDA_ARRAY3D_DESCRIPTOR *it)
{
    bool channels = it->NumChannels == 1 || it->NumChannels == 2 || it->NumChannels == 4;
    bool layered = it->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
    size_t widest = layered ? MOST_LAYERED : it->Depth ? MOST_3D : MOST_2D;

    return channels && element_bytes(it->Format) && it->Width && it->Width <= widest &&
           it->Height <= widest && it->Depth <= MOST_3D;
}

/* Product of the extents (0 counts as 1), element size and channels. */
static size_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *of)
{
    return extent(of->Width) * extent(of->Height) * extent(of->Depth) *
           element_bytes(of->Format) * of->NumChannels;
}

static unsigned int card_of(const struct CUmipmappedArray_st *it)
{
    return device_at(it->context->device)->card;
}

static size_t halved(size_t extent_now)
{
    return extent_now > 1 ? extent_now / 2 : extent_now;
}

/* The next smaller level; false: there is none, whatever was asked for. */
static bool shrink(CUDA_ARRAY3D_DESCRIPTOR *level)
{
    bool layered = level->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);

    if (extent(level->Width) == 1 && extent(level->Height) == 1 &&
        (layered || extent(level->Depth) == 1))
        return false;
    level->Width = halved(level->Width);
    level->Height = halved(level->Height);
    if (!layered) /* else the depth is a number of layers */
        level->Depth = halved(level->Depth);
    return true;
}

/* The handle of an array is its first level; that of a mipmapped one is itself. */
static const void *handle_of(const struct CUmipmappedArray_st *it)
{
    return it->kind == HANDLE_ARRAY ? (const void *)&it->level[0] : it;
}

static struct CUmipmappedArray_st *owner_of(CUarray array)
{
    return (void *)((char *)array - offsetof(struct CUmipmappedArray_st, level));
}

static void unlink_it(struct CUmipmappedArray_st *it)
{
    if (it->before)
        it->before->next = it->next;
    else
        all = it->next;
    if (it->next)
        it->next->before = it->before;
}

/* Charged already. */
static CUresult enter(struct CUmipmappedArray_st *it)
{
    TRY(handle_add(handle_of(it), it->kind));
    for (unsigned int i = 0; it->kind == HANDLE_MIPMAP && i < it->levels; i++)
        TRY(handle_add(&it->level[i], HANDLE_LEVEL));
    pthread_mutex_lock(&memory_lock);
    it->next = all;
    if (all)
        all->before = it;
    all = it;
    pthread_mutex_unlock(&memory_lock);
    return CUDA_SUCCESS;
}

static CUresult make(enum handle kind, const CUDA_ARRAY3D_DESCRIPTOR *descriptor,
                     unsigned int levels, struct CUmipmappedArray_st **made)
{
    struct CUmipmappedArray_st *it;
    CUDA_ARRAY3D_DESCRIPTOR level;
    CUcontext context;

    TRY(current(&context));
    if (!descriptor || !is_valid(descriptor) || !levels || levels > MAX_LEVELS)
        return CUDA_ERROR_INVALID_VALUE;
    it = calloc(1, sizeof *it + levels * sizeof it->level[0]);
    if (!it)
        return CUDA_ERROR_OUT_OF_MEMORY;
    it->kind = kind;
    it->context = context;
    level = *descriptor;
    do {
        it->level[it->levels++].descriptor = level;
        it->charged += array_bytes(&level);
    } while (it->levels < levels && shrink(&level));
    CUresult result = from_errno(sim_charge(card_of(it), it->charged));
    if (result == CUDA_SUCCESS) {
        result = enter(it);
        if (result != CUDA_SUCCESS)
            sim_uncharge(card_of(it), it->charged);
    }
    if (result == CUDA_SUCCESS)
        *made = it;
    else
        free(it);
    return result;
}

/* Out of the list already, and without a handle. */
static void unmake(struct CUmipmappedArray_st *it)
{
    for (unsigned int i = 0; it->kind == HANDLE_MIPMAP && i < it->levels; i++)
        handle_drop(&it->level[i], HANDLE_LEVEL);
    sim_uncharge(card_of(it), it->charged);
    free(it);
}

CUresult impl_cuArray3DCreate_v2(CUarray *made, const CUDA_ARRAY3D_DESCRIPTOR *descriptor)
{
    struct CUmipmappedArray_st *it;

    TRY(ready());
    if (!made)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(make(HANDLE_ARRAY, descriptor, 1, &it));
    *made = &it->level[0];
    return CUDA_SUCCESS;
}

CUresult impl_cuArrayCreate_v2(CUarray *made, const CUDA_ARRAY_DESCRIPTOR *descriptor)
{
    TRY(ready());
    if (!descriptor)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_ARRAY3D_DESCRIPTOR full = {.Width = descriptor->Width, .Height = descriptor->Height,
                                    .Format = descriptor->Format,
                                    .NumChannels = descriptor->NumChannels};
    return impl_cuArray3DCreate_v2(made, &full);
}

CUresult impl_cuMipmappedArrayCreate(CUmipmappedArray *made,
                                     const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels)
{
    TRY(ready());
    return made ? make(HANDLE_MIPMAP, descriptor, levels, made) : CUDA_ERROR_INVALID_VALUE;
}

CUresult impl_cuArrayDestroy(CUarray array)
{
    TRY(ready());
    if (!handle_drop(array, HANDLE_ARRAY))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&memory_lock);
    unlink_it(owner_of(array));
    pthread_mutex_unlock(&memory_lock);
    unmake(owner_of(array));
    return CUDA_SUCCESS;
}

CUresult impl_cuMipmappedArrayDestroy(CUmipmappedArray mipmap)
{
    TRY(ready());
    if (!handle_drop(mipmap, HANDLE_MIPMAP))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&memory_lock);
    unlink_it(mipmap);
    pthread_mutex_unlock(&memory_lock);
    unmake(mipmap);
    return CUDA_SUCCESS;
}

CUresult impl_cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *descriptor, CUarray array)
{
    TRY(ready());
    if (!handle_is(array, HANDLE_ARRAY) && !handle_is(array, HANDLE_LEVEL))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!descriptor)
        return CUDA_ERROR_INVALID_VALUE;
    *descriptor = array->descriptor;
    return CUDA_SUCCESS;
}

CUresult impl_cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *descriptor, CUarray array)
{
    CUDA_ARRAY3D_DESCRIPTOR full;

    TRY(impl_cuArray3DGetDescriptor_v2(&full, array));
    if (!descriptor)
        return CUDA_ERROR_INVALID_VALUE;
    *descriptor = (CUDA_ARRAY_DESCRIPTOR){.Width = full.Width, .Height = full.Height,
                                          .Format = full.Format, .NumChannels = full.NumChannels};
    return CUDA_SUCCESS;
}

CUresult impl_cuMipmappedArrayGetLevel(CUarray *array, CUmipmappedArray mipmap, unsigned int level)
{
    TRY(ready());
    if (!handle_is(mipmap, HANDLE_MIPMAP))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!array || level >= mipmap->levels)
        return CUDA_ERROR_INVALID_VALUE;
    *array = &mipmap->level[level];
    return CUDA_SUCCESS;
}

void drop_arrays_of(CUcontext context)
{
    pthread_mutex_lock(&memory_lock);
    for (struct CUmipmappedArray_st *next, *it = all; it; it = next) {
        next = it->next;
        if (it->context == context && handle_drop(handle_of(it), it->kind)) {
            unlink_it(it);
            unmake(it);
        }
    }
    pthread_mutex_unlock(&memory_lock);
}
