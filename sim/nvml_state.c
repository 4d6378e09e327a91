/* The simulated NVML: the simulation's shared state, in this library's words. */
#include "nvml_sim.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

#define HANG_LOOK_NS 20000000L

nvmlReturn_t open_state(void)
{
    int result = sim_attach();

    if (result == -EACCES || result == -EPERM)
        return NVML_ERROR_NO_PERMISSION;
    return result < 0 ? NVML_ERROR_DRIVER_NOT_LOADED : NVML_SUCCESS;
}

unsigned int card_count(void)
{
    return sim_conf()->cards;
}

/* Where no node has been made yet the real library has one made, so that alone hides no card. */
bool card_may_be_seen(unsigned int card)
{
    int node = sim_open_node(card);

    if (node >= 0)
        close(node);
    return node >= 0 || node == -ENXIO || node == -ENOENT;
}

const char *driver_version(void)
{
    return sim_conf()->driver_version;
}

int cuda_version(void)
{
    return sim_conf()->cuda_version;
}

const char *card_name(unsigned int card)
{
    return sim_conf()->card[card].name;
}

const char *card_uuid(unsigned int card)
{
    return sim_conf()->card[card].uuid;
}

unsigned int card_minor(unsigned int card)
{
    return sim_conf()->card[card].minor;
}

unsigned int card_pci_bus(unsigned int card)
{
    return sim_conf()->card[card].pci_bus;
}

void card_capability(unsigned int card, int *major, int *minor)
{
    *major = sim_conf()->card[card].capability_major;
    *minor = sim_conf()->card[card].capability_minor;
}

/* A hang lasts until the fault is another, as that of a driver until the card is reset. */
nvmlReturn_t card_fault(unsigned int card)
{
    for (;;) {
        switch (sim_fault(card)) {
        case SIM_LOST: return NVML_ERROR_GPU_IS_LOST;
        case SIM_TIMEOUT: return NVML_ERROR_TIMEOUT;
        case SIM_UNKNOWN: return NVML_ERROR_UNKNOWN;
        case SIM_HANG: break;
        default: return NVML_SUCCESS;
        }
        nanosleep(&(struct timespec){.tv_nsec = HANG_LOOK_NS}, NULL);
    }
}

void card_memory(unsigned int card, unsigned long long *total, unsigned long long *reserved,
                 unsigned long long *used)
{
    struct sim_limit limit;

    *total = sim_conf()->card[card].memory_bytes;
    *reserved = sim_conf()->card[card].reserved_bytes;
    *used = sim_used(card);
    if (sim_own_limit(card, &limit)) {
        *total = limit.hard;
        *reserved = 0;
        *used = limit.used < limit.hard ? limit.used : limit.hard;
    }
}

static nvmlReturn_t limit_result(int result)
{
    switch (result) {
    case 0: return NVML_SUCCESS;
    case -ENODATA: return NVML_ERROR_NOT_FOUND;
    case -ENOSPC: return NVML_ERROR_INSUFFICIENT_RESOURCES;
    default: return NVML_ERROR_OPERATING_SYSTEM;
    }
}

bool has_limits(void)
{
    return sim_has_limits();
}

nvmlReturn_t set_limit(unsigned int card, const char *cgroup, unsigned long long soft,
                       unsigned long long hard)
{
    if (soft > hard || (hard != NVML_DEVICE_MEMORY_LIMIT_MAX &&
                        hard > sim_conf()->card[card].memory_bytes))
        return NVML_ERROR_INVALID_ARGUMENT;
    return limit_result(sim_set_limit(card, cgroup, soft, hard));
}

nvmlReturn_t get_limit(unsigned int card, const char *cgroup, unsigned long long *soft,
                       unsigned long long *hard, unsigned long long *used)
{
    struct sim_limit limit = {0};
    int result = sim_get_limit(card, cgroup, &limit);

    *soft = limit.soft;
    *hard = limit.hard;
    *used = limit.used;
    return limit_result(result);
}

/* A process outside the reader's PID namespace has no PID to show: it is left out. */
unsigned int card_processes(unsigned int card, struct process *to, unsigned int room)
{
    struct sim_use *uses = calloc(room, sizeof *uses);
    unsigned int count = 0;

    if (!uses)
        return 0;
    unsigned int found = sim_uses(card, uses, room);
    for (unsigned int i = 0; i < found && i < room; i++)
        if (uses[i].pid > 0)
            to[count++] = (struct process){(unsigned int)uses[i].pid, uses[i].bytes};
    free(uses);
    return count;
}

static unsigned int samples(unsigned int card, bool by_process, unsigned long long since_us,
                            struct sample *to, unsigned int room)
{
    struct sim_busy *busy = calloc(room, sizeof *busy);
    unsigned int count = 0;

    if (!busy)
        return 0;
    unsigned int found = sim_busy(card, by_process, (int64_t)since_us * 1000, busy, room);
    for (unsigned int i = 0; i < found; i++)
        if (!by_process || busy[i].pid > 0)
            to[count++] = (struct sample){
                .end_us = (unsigned long long)busy[i].end_ns / 1000,
                .pid = (unsigned int)busy[i].pid,
                .percent = (unsigned int)((busy[i].busy_ns * 100 + SIM_BUCKET_NS / 2) / SIM_BUCKET_NS),
            };
    free(busy);
    return count;
}

unsigned int card_samples(unsigned int card, unsigned long long since_us, struct sample *to,
                          unsigned int room)
{
    return samples(card, false, since_us, to, room);
}

unsigned int process_samples(unsigned int card, unsigned long long since_us, struct sample *to,
                             unsigned int room)
{
    return samples(card, true, since_us, to, room);
}
