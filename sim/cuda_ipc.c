/* The simulated libcuda: memory shared between processes. It is charged to its owner. Its content is
 * in a file of the simulation's folder from the first export on; where none can be made, each side
 * keeps pages of its own. */
#include "cuda_sim.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE 4096u
#define PAGES_AT_ONCE 4096u

/* Copy the pages that have been written to, and only those: the rest would all come into being. */
static bool copy_content(int file, const char *from, size_t bytes)
{
    static unsigned char there[PAGES_AT_ONCE]; /* under memory_lock */

    for (size_t at = 0; at < bytes; at += (size_t)PAGES_AT_ONCE * PAGE) {
        size_t left = bytes - at, pages = left / PAGE < PAGES_AT_ONCE ? left / PAGE : PAGES_AT_ONCE;

        if (mincore((void *)(from + at), pages * PAGE, there))
            return false;
        for (size_t i = 0; i < pages; i++)
            if (there[i] & 1 && pwrite(file, from + at + i * PAGE, PAGE, (off_t)(at + i * PAGE)) != PAGE)
                return false;
    }
    return true;
}

static void map_over(int file, void *start, size_t bytes)
{
    mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, 0);
}

static void share_content(const struct range *range)
{
    size_t bytes = whole_pages(range->bytes);
    char path[4096];

    sim_export_path(range->export, path, sizeof path);
    int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0)
        return;
    fchmod(file, 0666); /* whatever the umask */
    if (!ftruncate(file, (off_t)bytes) && copy_content(file, (void *)range->start, bytes))
        map_over(file, (void *)range->start, bytes);
    else
        unlink(path);
    close(file);
}

static void see_content(uint64_t export, void *start, size_t bytes)
{
    char path[4096];

    sim_export_path(export, path, sizeof path);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return;
    map_over(file, start, whole_pages(bytes));
    close(file);
}

/* In a handle is the number of the export. */
CUresult impl_cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr at)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;

    TRY(ready());
    if (!handle)
        return result;
    memset(handle, 0, sizeof *handle);
    pthread_mutex_lock(&memory_lock);
    struct range *range = find_range(at);
    if (range && range->kind == KIND_DEVICE) {
        bool first = !range->export;

        result = CUDA_SUCCESS;
        if (first)
            result = from_errno(sim_export(device_at(range->device)->card, range->bytes,
                                           &range->export));
        if (first && result == CUDA_SUCCESS)
            share_content(range);
        memcpy(handle, &range->export, sizeof range->export);
    }
    pthread_mutex_unlock(&memory_lock);
    return result;
}

/* Opened once more in the same context it is at the same address. Under memory_lock. */
static CUresult open_import(uint64_t export, CUcontext context, void **start)
{
    struct range *there = find_import(export, context);
    unsigned int card;
    uint64_t bytes;

    if (there) {
        there->opened++;
        *start = (void *)there->start;
        return CUDA_SUCCESS;
    }
    int failed = sim_import(export, &card, &bytes);
    if (failed)
        return failed == -EBUSY ? CUDA_ERROR_INVALID_CONTEXT : from_errno(failed);
    CUdevice device = device_with_card(card);
    CUresult result = add_range_locked(
        &(struct range){.bytes = bytes, .kind = KIND_IMPORT, .context = context, .export = export,
                        .device = device < 0 ? context->device : device, .opened = 1}, start);
    if (result != CUDA_SUCCESS)
        sim_unimport(export);
    else
        see_content(export, *start, bytes);
    return result;
}

CUresult impl_cuIpcOpenMemHandle_v2(CUdeviceptr *at, CUipcMemHandle handle, unsigned int flags)
{
    CUcontext context;
    uint64_t export;
    void *start;

    TRY(current(&context));
    if (!at || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(&export, &handle, sizeof export);
    pthread_mutex_lock(&memory_lock);
    CUresult result = open_import(export, context, &start);
    pthread_mutex_unlock(&memory_lock);
    if (result == CUDA_SUCCESS)
        *at = (CUdeviceptr)start;
    return result;
}

CUresult impl_cuIpcOpenMemHandle(CUdeviceptr *at, CUipcMemHandle handle, unsigned int flags)
{
    return impl_cuIpcOpenMemHandle_v2(at, handle, flags);
}

CUresult impl_cuIpcCloseMemHandle(CUdeviceptr at)
{
    TRY(ready());
    return free_range(at, 1u << KIND_IMPORT);
}
