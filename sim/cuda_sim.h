/* What the parts of the simulated libcuda share. Not an interface to anybody else.
 *
 * The functions of the driver API are written here as impl_NAME, with the prototypes of cuda.h
 * (cuda_impl.h, generated); cuda_exports.c, generated too, exports them. */
#ifndef MGPU_CUDA_SIM_H
#define MGPU_CUDA_SIM_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#define __CUDA_API_VERSION_INTERNAL 1
#include "cuda_impl.h"

#include "state.h"

#define VMM_GRANULE (2ull << 20) /* cuMemCreate gives memory in pieces of 2 MiB */
#define TRY(call)                       \
    do {                                \
        CUresult tried_ = (call);       \
        if (tried_ != CUDA_SUCCESS)     \
            return tried_;              \
    } while (0)

struct procedure {
    const char *name;
    int version; /* from this CUDA version on */
    void *legacy, *per_thread;
};
extern const struct procedure procedures[] __attribute__((visibility("hidden")));

struct error_text {
    int number;
    const char *name, *text;
};
extern const struct error_text error_texts[] __attribute__((visibility("hidden")));

struct device {
    unsigned int card; /* its number in the simulation */
    CUcontext primary;
    unsigned int primary_refs, primary_flags;
    CUmemoryPool default_pool, pool;
};

struct CUctx_st {
    CUdevice device;
    bool primary;
    unsigned int flags;
    unsigned long long id;
    int work;              /* its queue in the simulation */
    struct CUctx_st *next; /* in the list of all */
};

struct CUmemPoolHandle_st {
    CUdevice device; /* -1: host memory, not charged */
    size_t used, used_high;
    cuuint64_t release_threshold;
};

enum kind {
    KIND_DEVICE,  /* cuMemAlloc and so on */
    KIND_MANAGED,
    KIND_ASYNC,   /* from a pool */
    KIND_IMPORT,  /* cuIpcOpenMemHandle */
    KIND_HOST,
    KIND_REGISTERED,
    KIND_MAPPED,   /* cuMemMap */
};

/* A range of addresses. `charged` is what it counts on the card, 0 for what is charged elsewhere. */
struct range {
    uintptr_t start;
    size_t bytes;
    enum kind kind;
    CUcontext context;  /* in which it was made; NULL: none */
    CUdevice device;
    size_t charged;
    unsigned int flags;
    CUmemoryPool pool;          /* KIND_ASYNC */
    struct physical *physical;  /* KIND_MAPPED */
    uint64_t export;            /* its number in the simulation, when exported or imported */
    bool own_pages;             /* mapped by this library */
    struct range *next, *before; /* in the list of all */
};

/* cuda_device.c */
CUresult ready(void);
CUresult device_of(CUdevice ordinal, struct device **device);
struct device *device_at(CUdevice ordinal);
CUresult from_errno(int result);

/* cuda_context.c */
CUresult current(CUcontext *context);
bool context_exists(CUcontext context);

/* cuda_memory.c: the list of ranges. Under `memory_lock` where it says so. */
extern pthread_mutex_t memory_lock __attribute__((visibility("hidden")));
struct range *find_range(uintptr_t at);
CUresult add_range(const struct range *range, void **start);
void drop_range(struct range *range);
CUresult free_range(uintptr_t start, unsigned int kinds);
void drop_ranges_of(CUcontext context);

/* cuda_work.c */
CUresult wait_context(CUcontext context);
void forget_context_work(CUcontext context);

/* cuda_array.c */
void drop_arrays_of(CUcontext context);

#endif
