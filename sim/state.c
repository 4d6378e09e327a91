/* The state file: attaching, slots, faults. */
#include "shared.h"
#include "conf.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define REAP_EVERY_NS 20000000ull
#define SLOT_WAIT_MS 20
#define LOCK_FILES 16 /* the kernel walks all locks of a file for each question: keep them short */

const char *const sim_fault_names[SIM_FAULTS] = {"none", "lost", "unknown", "timeout", "hang"};

static pthread_mutex_t attach_lock = PTHREAD_MUTEX_INITIALIZER;
static struct shared *shared;
static struct sim_conf conf;
static int lock_fds[LOCK_FILES];
static int own_slot = -1;

uint64_t sim_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

const struct sim_conf *sim_conf(void)
{
    return &conf;
}

static int init_shared(int fd)
{
    pthread_mutexattr_t attributes;

    if (ftruncate(fd, 0) || ftruncate(fd, sizeof(struct shared)))
        return -errno;
    struct shared *fresh = mmap(NULL, sizeof *fresh, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fresh == MAP_FAILED)
        return -errno;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&fresh->mutex, &attributes);
    timeline_init(fresh);
    fresh->version = SHARED_VERSION;
    __atomic_store_n(&fresh->magic, SHARED_MAGIC, __ATOMIC_RELEASE);
    munmap(fresh, sizeof *fresh);
    return 0;
}

static int open_file(const char *name)
{
    char path[4096];

    snprintf(path, sizeof path, "%s/%s", sim_dir(), name);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        return -errno;
    fchmod(fd, 0666); /* whatever the umask: all users of the cards share it */
    return fd;
}

/* Whether the file is one that this library made, and made to its end. */
static bool is_ours(int fd)
{
    unsigned int head[2] = {0};
    struct stat facts;

    return !fstat(fd, &facts) && facts.st_size == (off_t)sizeof(struct shared) &&
           pread(fd, head, sizeof head, 0) == sizeof head && head[0] == SHARED_MAGIC &&
           head[1] == SHARED_VERSION;
}

/* The state, made and filled in by whoever comes first. */
static int map_state(void)
{
    int result = 0, fd = open_file("state");

    if (fd < 0)
        return fd;
    flock(fd, LOCK_EX);
    if (!is_ours(fd))
        result = init_shared(fd);
    flock(fd, LOCK_UN);
    void *at = result ? MAP_FAILED
                      : mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (!result && at == MAP_FAILED)
        result = -errno;
    if (!result)
        shared = at;
    close(fd); /* it has no fcntl locks: those are in the lock files */
    return result;
}

/* They stay open to the end: closing one would drop this process's lock in it. */
static int open_locks(void)
{
    char name[16];

    for (int i = 0; i < LOCK_FILES; i++) {
        snprintf(name, sizeof name, "locks.%d", i);
        lock_fds[i] = open_file(name);
        if (lock_fds[i] < 0)
            return lock_fds[i];
    }
    return 0;
}

/* A child of a fork has nothing of its parent's: it is another process to the simulation. */
static void in_child(void)
{
    own_slot = -1;
    pthread_mutex_init(&attach_lock, NULL);
    timeline_child();
}

int sim_attach(void)
{
    int result = 0;

    pthread_mutex_lock(&attach_lock);
    if (!shared) {
        mkdir(sim_dir(), 0755);
        result = sim_read_conf(&conf);
        if (!result)
            result = open_locks();
        if (!result)
            result = map_state();
        if (!result)
            pthread_atfork(NULL, NULL, in_child);
    }
    pthread_mutex_unlock(&attach_lock);
    return result;
}

/* What is under the mutex is written so that a death at any point leaves it in order. */
static struct shared *locked(int result)
{
    if (result == EOWNERDEAD)
        result = pthread_mutex_consistent(&shared->mutex);
    return result ? NULL : shared;
}

struct shared *sim_lock(void)
{
    return locked(pthread_mutex_lock(&shared->mutex));
}

struct shared *sim_lock_within_ms(unsigned int ms)
{
    struct timespec until;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += (long)ms * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return locked(pthread_mutex_timedlock(&shared->mutex, &until));
}

void sim_unlock(void)
{
    pthread_mutex_unlock(&shared->mutex);
}

struct shared *sim_shared(void)
{
    return shared;
}

/* fcntl() on the byte of the slot, in one of the lock files. */
static int lock_slot(int slot, int command, struct flock *lock)
{
    *lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET,
                           .l_start = slot / LOCK_FILES, .l_len = 1};
    return fcntl(lock_fds[slot % LOCK_FILES], command, lock);
}

/* F_OFD_GETLK sees also the lock that another library in this same process holds. */
bool sim_slot_alive(int slot, pid_t *pid)
{
    struct flock lock;

    if (slot == __atomic_load_n(&own_slot, __ATOMIC_ACQUIRE)) {
        *pid = getpid();
        return true;
    }
    if (lock_slot(slot, F_OFD_GETLK, &lock) && lock_slot(slot, F_GETLK, &lock))
        lock.l_pid = 0;
    *pid = lock.l_pid;
    return lock.l_type != F_UNLCK;
}

/* Take away what the slot's owner of that birth held. */
static void clear_slot(int slot, uint64_t born)
{
    for (int i = 0; i < shared->contexts_end; i++) {
        struct context *context = &shared->contexts[i];

        if (context->taken && context->slot == slot && context->born == born)
            timeline_drop(i);
    }
    exports_leave(slot);
    for (unsigned int card = 0; card < SIM_CARDS; card++) {
        shared->cards[card].bytes[slot] = 0;
        shared->slots[slot].contexts[card] = 0;
    }
    shared->slots[slot].changes = 0;
}

void sim_reap(struct shared *it)
{
    pid_t pid;

    if (sim_own_slot_locked() < 0)
        return;
    it->reaped_ns = sim_now_ns();
    for (int slot = 0; slot < it->slots_end; slot++) {
        uint64_t born = it->slots[slot].born;

        if (!born || sim_slot_alive(slot, &pid))
            continue;
        clear_slot(slot, born);
        it->slots[slot].born = 0;
    }
    while (it->slots_end && !it->slots[it->slots_end - 1].born)
        it->slots_end--;
}

static bool is_due(void)
{
    return sim_now_ns() - shared->reaped_ns >= REAP_EVERY_NS;
}

void sim_reap_when_due(void)
{
    if (!is_due() || !sim_lock_within_ms(0))
        return;
    sim_reap(shared);
    sim_unlock();
}

/* Have the slot, if its lock can be had: if it is free, or its owner dead. */
static bool take_slot(int slot)
{
    uint64_t before = shared->slots[slot].born;
    struct flock lock;

    if (lock_slot(slot, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK)
        return false;
    if (lock_slot(slot, F_SETLK, &lock))
        return false;
    shared->slots[slot].born = ++shared->births;
    if (slot >= shared->slots_end)
        shared->slots_end = slot + 1;
    __atomic_store_n(&own_slot, slot, __ATOMIC_RELEASE);
    clear_slot(slot, before);
    return true;
}

int sim_own_slot_locked(void)
{
    if (own_slot >= 0)
        return own_slot;
    for (int pass = 0; own_slot < 0 && pass < 2; pass++)
        for (int slot = 0; slot < SIM_SLOTS; slot++)
            if ((pass || !shared->slots[slot].born) && take_slot(slot))
                break;
    if (own_slot >= 0 && is_due()) /* when processes come and go, so that slots stay few */
        sim_reap(shared);
    return own_slot < 0 ? -EAGAIN : own_slot;
}

int sim_own_slot(void)
{
    int slot = __atomic_load_n(&own_slot, __ATOMIC_ACQUIRE);

    if (slot >= 0)
        return slot;
    if (!sim_lock())
        return -EAGAIN;
    slot = sim_own_slot_locked();
    sim_unlock();
    return slot;
}

void sim_want_slot(void)
{
    if (__atomic_load_n(&own_slot, __ATOMIC_ACQUIRE) >= 0 || !sim_lock_within_ms(SLOT_WAIT_MS))
        return;
    sim_own_slot_locked();
    sim_unlock();
}

uint64_t sim_birth(void)
{
    int slot = __atomic_load_n(&own_slot, __ATOMIC_ACQUIRE);

    return slot < 0 ? 0 : shared->slots[slot].born;
}

int sim_open_node(unsigned int card)
{
    static const char *const names[] = {"nvidia", "mgpu"};
    char path[4096];

    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s%u", conf.dev_root, names[i], conf.card[card].minor);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd >= 0)
            return fd;
        if (errno != ENOENT)
            return -errno;
    }
    return -ENOENT;
}

enum sim_fault sim_fault(unsigned int card)
{
    return (enum sim_fault)shared->cards[card].fault;
}

int sim_set_fault(unsigned int card, enum sim_fault fault)
{
    if (card >= conf.cards)
        return -EINVAL;
    shared->cards[card].fault = (int)fault;
    return 0;
}

void sim_reset(void)
{
    for (unsigned int card = 0; card < SIM_CARDS; card++)
        shared->cards[card].fault = SIM_WELL;
    sim_lock();
    sim_reap(shared);
    sim_unlock();
}
