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

#define __CUDA_API_VERSION_INTERNAL 1
#include "cuda_impl.h"

#include "state.h"

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
    CUcontext primary; /* the same at every retain */
    unsigned int primary_refs, primary_flags;
    CUmemoryPool default_pool, pool;
};

/* Never freed: threads may have it on their stack when it is destroyed. */
struct CUctx_st {
    CUdevice device;
    bool primary;
    unsigned int flags;
    unsigned long long id;
    int work; /* its queue in the simulation */
};

struct CUmemPoolHandle_st {
    CUdevice device; /* -1: host memory, not charged */
    size_t used, used_high;
    cuuint64_t release_threshold;
    bool destroyed; /* freed when nothing of it is in use */
};

enum kind {
    KIND_DEVICE,  /* cuMemAlloc and so on */
    KIND_MANAGED,
    KIND_ASYNC,   /* from a pool */
    KIND_IMPORT,  /* cuIpcOpenMemHandle */
    KIND_HOST,
    KIND_REGISTERED,
    KIND_MAPPED,  /* cuMemMap */
};

/* A range of addresses. `charged` is what it counts on the card, 0 for what is charged elsewhere. */
struct range {
    uintptr_t start;
    size_t bytes;
    enum kind kind;
    CUcontext context; /* in which it was made; NULL: none */
    CUdevice device;
    size_t charged;
    unsigned int flags;
    CUmemoryPool pool;           /* KIND_ASYNC */
    struct physical *physical;   /* KIND_MAPPED */
    uint64_t export;             /* its number in the simulation, when exported or imported */
    unsigned int opened;         /* KIND_IMPORT: how often */
    bool own_addresses;          /* from cuda_addresses.c */
    struct range *next, *before; /* in the list of all */
};

/* cuda_device.c */
CUresult ready(void);
CUresult device_of(CUdevice ordinal, struct device **device);
struct device *device_at(CUdevice ordinal);
/* The device that is a card of the simulation; -1: it is not visible. */
CUdevice device_with_card(unsigned int card);
CUresult from_errno(int result);

/* cuda_handles.c: what is a handle of which kind. Who drops one may free what it stands for. */
enum handle {
    HANDLE_CONTEXT = 1,
    HANDLE_STREAM,
    HANDLE_EVENT,
    HANDLE_POOL,
    HANDLE_ARRAY,
    HANDLE_MIPMAP,
    HANDLE_LEVEL, /* of a mipmapped array */
    HANDLE_PHYSICAL,
    HANDLE_MODULE,
    HANDLE_LIBRARY,
    HANDLE_FUNCTION,
};
CUresult handle_add(const void *handle, enum handle kind);
bool handle_is(const void *handle, enum handle kind);
bool handle_drop(const void *handle, enum handle kind);

/* cuda_context.c */
CUresult current(CUcontext *context);

/* cuda_addresses.c: stretches of the host's addresses, page by page, with memory at first touch. */
void *addresses_take(size_t bytes);
void addresses_give(void *start, size_t bytes);
/* The same stretch, with private memory again instead of what was mapped over it. */
void addresses_renew(void *start, size_t bytes);
size_t whole_pages(size_t bytes);

/* cuda_memory.c: the ranges. Under `memory_lock` where they are pointed to. */
extern pthread_mutex_t memory_lock __attribute__((visibility("hidden")));
struct range *find_range(uintptr_t at);
/* The first that has an address in common with the stretch. */
struct range *find_overlap(uintptr_t start, size_t bytes);
CUresult add_range(const struct range *range, void **start);
CUresult add_range_locked(const struct range *range, void **start);
void drop_range(struct range *range);
CUresult free_range(uintptr_t start, unsigned int kinds);
struct range *find_import(uint64_t export, CUcontext context);
void drop_ranges_of(CUcontext context);

/* cuda_pool.c, under memory_lock */
void pool_give_back(CUmemoryPool pool, size_t bytes);

/* cuda_stream.c. NULL and the two special values stand for the current context's own streams. */
CUresult context_of(CUstream stream, CUcontext *context);
/* The number of the last work in the context's queue that the stream has to wait for. */
int64_t last_work(CUstream stream, CUcontext context);
void set_last_work(CUstream stream, int64_t work);
CUresult wait_work(CUcontext context, int64_t work);
CUresult wait_context(CUcontext context);
void sleep_ns(uint64_t ns);
void drop_streams_of(CUcontext context);

/* cuda_array.c */
void drop_arrays_of(CUcontext context);

#endif
