/* The simulated libcuda: which handles there are. A handle that was made up, is of another kind or
 * has been destroyed is told from a good one without a look at what it points to. */
#include "cuda_sim.h"

#include <search.h>
#include <stdlib.h>

struct known {
    const void *handle;
    enum handle kind;
};

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static void *tree;

static int compare(const void *a, const void *b)
{
    const struct known *one = a, *other = b;

    if (one->handle != other->handle)
        return (uintptr_t)one->handle < (uintptr_t)other->handle ? -1 : 1;
    return (int)one->kind - (int)other->kind;
}

CUresult handle_add(const void *handle, enum handle kind)
{
    struct known *known = malloc(sizeof *known);

    if (!known)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *known = (struct known){handle, kind};
    pthread_rwlock_wrlock(&lock);
    void *entered = tsearch(known, &tree, compare);
    pthread_rwlock_unlock(&lock);
    if (entered)
        return CUDA_SUCCESS;
    free(known);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

bool handle_is(const void *handle, enum handle kind)
{
    struct known wanted = {handle, kind};

    pthread_rwlock_rdlock(&lock);
    bool found = tfind(&wanted, &tree, compare);
    pthread_rwlock_unlock(&lock);
    return found;
}

bool handle_drop(const void *handle, enum handle kind)
{
    struct known wanted = {handle, kind}, **found;

    pthread_rwlock_wrlock(&lock);
    found = tfind(&wanted, &tree, compare);
    struct known *known = found ? *found : NULL;
    if (known)
        tdelete(known, &tree, compare);
    pthread_rwlock_unlock(&lock);
    free(known);
    return known;
}
