/* The state file: attaching, slots, memory, faults. */
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

#define LOCK_FILES 16 /* the kernel walks all locks of a file for each question: keep them short */

const char *const sim_fault_names[SIM_FAULTS] = {"none", "lost", "unknown", "timeout", "hang"};

static pthread_mutex_t attach_lock = PTHREAD_MUTEX_INITIALIZER;
static struct shared *shared;
static struct sim_conf conf;
static int lock_fds[LOCK_FILES];
static int own_slot = -1;
static pid_t own_slot_pid;

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

/* The state, made and filled in by whoever comes first. */
static int map_state(void)
{
    struct stat facts;
    int result = 0, fd = open_file("state");

    if (fd < 0)
        return fd;
    flock(fd, LOCK_EX);
    if (fstat(fd, &facts) || facts.st_size != (off_t)sizeof(struct shared))
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
    }
    pthread_mutex_unlock(&attach_lock);
    return result;
}

static struct shared *locked(int result)
{
    if (result == EOWNERDEAD) { /* its owner died in the middle of a change */
        timeline_rebuild(shared);
        pthread_mutex_consistent(&shared->mutex);
        result = 0;
    }
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

bool sim_slot_alive(int slot, pid_t *pid)
{
    struct flock lock;

    *pid = getpid();
    if (slot == own_slot && own_slot_pid == *pid)
        return true;
    if (lock_slot(slot, F_GETLK, &lock))
        return true;
    *pid = lock.l_pid;
    return lock.l_type != F_UNLCK;
}

static void clear_slot(int slot)
{
    for (int i = 0; i < SIM_CONTEXTS; i++)
        if (shared->contexts[i].taken && shared->contexts[i].slot == slot)
            timeline_drop(shared, i);
    exports_leave(shared, slot);
    memset(shared->slots[slot].bytes, 0, sizeof shared->slots[slot].bytes);
    memset(shared->slots[slot].contexts, 0, sizeof shared->slots[slot].contexts);
    shared->slots[slot].born = 0;
}

void sim_reap(struct shared *it)
{
    pid_t pid;

    for (int slot = 0; slot < it->slots_end; slot++)
        if (it->slots[slot].born && !sim_slot_alive(slot, &pid))
            clear_slot(slot);
    it->reaped_ns = sim_now_ns();
}

int sim_own_slot_locked(void)
{
    if (own_slot >= 0 && own_slot_pid == getpid())
        return own_slot;
    sim_reap(shared);
    for (int slot = 0; slot < SIM_SLOTS; slot++) {
        struct flock lock;

        if (shared->slots[slot].born || lock_slot(slot, F_SETLK, &lock))
            continue;
        if (slot >= shared->slots_end)
            shared->slots_end = slot + 1;
        shared->slots[slot].born = ++shared->births;
        own_slot_pid = getpid();
        __atomic_store_n(&own_slot, slot, __ATOMIC_RELEASE);
        return slot;
    }
    return -EAGAIN;
}

int sim_own_slot(void)
{
    int slot = __atomic_load_n(&own_slot, __ATOMIC_ACQUIRE);

    if (slot >= 0 && own_slot_pid == getpid())
        return slot;
    sim_lock();
    slot = sim_own_slot_locked();
    sim_unlock();
    return slot;
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

/* All bytes in slots, of dead processes too that nobody has reaped yet. */
static uint64_t booked(unsigned int card)
{
    uint64_t sum = exports_bytes(shared, card, -1);

    for (int slot = 0; slot < shared->slots_end; slot++)
        sum += shared->slots[slot].bytes[card];
    return sum;
}

uint64_t sim_used(unsigned int card)
{
    uint64_t sum = exports_bytes(shared, card, -1);
    pid_t pid;

    for (int slot = 0; slot < shared->slots_end; slot++)
        if (shared->slots[slot].bytes[card] && sim_slot_alive(slot, &pid))
            sum += shared->slots[slot].bytes[card];
    return sum;
}

/* Add, look, take back when it was too much: two that race may both be refused, never both served.
 */
int sim_charge(unsigned int card, uint64_t bytes)
{
    uint64_t room = conf.card[card].memory_bytes - conf.card[card].reserved_bytes;
    int slot = sim_own_slot();

    if (slot < 0)
        return slot;
    if (bytes > room)
        return -ENOMEM;
    shared->slots[slot].bytes[card] += bytes;
    if (booked(card) <= room || sim_used(card) <= room)
        return 0;
    shared->slots[slot].bytes[card] -= bytes;
    return -ENOMEM;
}

void sim_uncharge(unsigned int card, uint64_t bytes)
{
    int slot = sim_own_slot();

    if (slot >= 0)
        shared->slots[slot].bytes[card] -= bytes;
}

unsigned int sim_uses(unsigned int card, struct sim_use *to, unsigned int room)
{
    unsigned int count = 0;
    pid_t pid;

    for (int slot = 0; slot < shared->slots_end; slot++) {
        struct slot *it = &shared->slots[slot];
        uint64_t bytes = it->bytes[card] + exports_bytes(shared, card, slot);

        if (!it->born || (!bytes && !it->contexts[card]) || !sim_slot_alive(slot, &pid))
            continue;
        if (count < room)
            to[count] = (struct sim_use){slot, pid, bytes, it->contexts[card]};
        count++;
    }
    return count;
}
