/* The simulated libcuda: addresses of device memory. A card's memory is only counted; what a client
 * writes into it lands in pages of the host that the kernel gives at first touch.
 *
 * The addresses come from one large stretch reserved at the first need, in blocks of powers of two,
 * so that an allocation costs no system call and a free one cheap one. */
#include "cuda_sim.h"

#include <stdlib.h>
#include <sys/mman.h>

#define PAGE 4096u
#define FIRST_CLASS 12 /* 2^12: a page */
#define CLASSES 36
#define MOST_RESERVED (1ull << 44)
#define LEAST_RESERVED (1ull << 32)
#define ALIGNMENT (2ull << 20)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t reserve, fresh, reserve_end;
static bool looked_for;
static struct {
    uintptr_t *starts;
    size_t count, room;
} given_back[CLASSES];

size_t whole_pages(size_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static void *map(void *at, size_t bytes, int flags)
{
    return mmap(at, bytes, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

/* As much as the process may have: its limit of address space can be lower. */
static void make_reserve(void)
{
    void *at = MAP_FAILED;
    uint64_t bytes = MOST_RESERVED;

    looked_for = true;
    while (bytes >= LEAST_RESERVED && (at = map(NULL, bytes, 0)) == MAP_FAILED)
        bytes /= 4;
    if (at == MAP_FAILED)
        return;
    madvise(at, bytes, MADV_NOHUGEPAGE); /* a byte written must not cost 2 MiB */
    madvise(at, bytes, MADV_DONTDUMP);
    reserve = (uintptr_t)at;
    fresh = (reserve + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    reserve_end = reserve + bytes;
}

static int class_of(size_t bytes)
{
    int class = 0;

    while (class < CLASSES && 1ull << (FIRST_CLASS + class) < bytes)
        class++;
    return class;
}

void *addresses_take(size_t bytes)
{
    int class = class_of(bytes);
    uintptr_t start = 0;

    pthread_mutex_lock(&lock);
    if (!looked_for)
        make_reserve();
    if (class < CLASSES && given_back[class].count)
        start = given_back[class].starts[--given_back[class].count];
    else if (class < CLASSES) {
        uint64_t size = 1ull << (FIRST_CLASS + class);
        uint64_t align = size < ALIGNMENT ? size : ALIGNMENT;
        uintptr_t at = (fresh + align - 1) / align * align;

        if (at < reserve_end && size <= reserve_end - at) {
            start = at;
            fresh = at + size;
        }
    }
    pthread_mutex_unlock(&lock);
    if (start)
        return (void *)start;
    void *pages = map(NULL, whole_pages(bytes), 0);
    return pages == MAP_FAILED ? NULL : pages;
}

static void remember(int class, uintptr_t start)
{
    if (given_back[class].count == given_back[class].room) {
        size_t room = given_back[class].room ? 2 * given_back[class].room : 64;
        void *larger = realloc(given_back[class].starts, room * sizeof(uintptr_t));

        if (!larger)
            return; /* these addresses are lost; there are many */
        given_back[class].starts = larger;
        given_back[class].room = room;
    }
    given_back[class].starts[given_back[class].count++] = start;
}

void addresses_give(void *start, size_t bytes)
{
    uintptr_t at = (uintptr_t)start;

    if (at < reserve || at >= reserve_end) {
        munmap(start, whole_pages(bytes));
        return;
    }
    madvise(start, whole_pages(bytes), MADV_DONTNEED);
    pthread_mutex_lock(&lock);
    remember(class_of(bytes), at);
    pthread_mutex_unlock(&lock);
}

void addresses_renew(void *start, size_t bytes)
{
    map(start, whole_pages(bytes), MAP_FIXED);
    madvise(start, whole_pages(bytes), MADV_NOHUGEPAGE);
}
