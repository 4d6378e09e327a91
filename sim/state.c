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

#define SLOT_LOCKS (1ll << 40) /* where the slots' bytes are locked: far beyond the data */

const char *const sim_fault_names[SIM_FAULTS] = {"none", "lost", "unknown", "timeout", "hang"};

static pthread_mutex_t attach_lock = PTHREAD_MUTEX_INITIALIZER;
static struct shared *shared;
static struct sim_conf conf;
static int state_fd = -1;
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

/* Open the file, made and filled in by whoever comes first. flock() locks do not mix with fcntl's. */
static int open_state(void)
{
    char path[4096];
    struct stat facts;
    int result = 0;

    mkdir(sim_dir(), 0755);
    snprintf(path, sizeof path, "%s/state", sim_dir());
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        return -errno;
    flock(fd, LOCK_EX);
    if (fstat(fd, &facts) || facts.st_size != (off_t)sizeof(struct shared)) {
        result = init_shared(fd);
        fchmod(fd, 0666); /* whatever the umask: all users of the cards share it */
    }
    flock(fd, LOCK_UN);
    return result ? result : fd;
}

int sim_attach(void)
{
    int result = 0;

    pthread_mutex_lock(&attach_lock);
    if (!shared) {
        result = sim_read_conf(&conf);
        if (!result)
            state_fd = result = open_state();
        if (result >= 0) {
            void *at = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, state_fd, 0);
            result = at == MAP_FAILED ? -errno : 0;
            if (!result)
                shared = at;
        }
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

static struct flock slot_byte(int slot)
{
    return (struct flock){
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = SLOT_LOCKS + slot, .l_len = 1};
}

bool sim_slot_alive(int slot, pid_t *pid)
{
    struct flock lock = slot_byte(slot);

    *pid = getpid();
    if (slot == own_slot && own_slot_pid == *pid)
        return true;
    if (fcntl(state_fd, F_GETLK, &lock))
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
        struct flock lock = slot_byte(slot);

        if (shared->slots[slot].born || fcntl(state_fd, F_SETLK, &lock))
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
