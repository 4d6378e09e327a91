/* The driver's own memory limits by cgroup, as drivers from R615 on have them (nvml.h,
 * nvmlDeviceSetMemoryLimits_v1). Here they hold in the unified hierarchy, for processes whose
 * /proc/PID/cgroup names the cgroup from the host's root: one in a cgroup namespace of its own
 * escapes them, which it would not with a real driver. */
#include "shared.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FIRST_DRIVER 615

bool sim_has_limits(void)
{
    unsigned int major = 0;

    return sscanf(sim_conf()->driver_version, "%u", &major) == 1 && major >= FIRST_DRIVER;
}

/* The part of a cgroup's folder below the mount of its hierarchy, "/" first. */
static int path_in_hierarchy(const char *folder, char *path)
{
    char line[4096], mount[SIM_CGROUP_BYTES];
    FILE *mounts = fopen("/proc/self/mountinfo", "re");
    int result = -ENOENT;

    while (mounts && fgets(line, sizeof line, mounts)) {
        size_t length;

        if (!strstr(line, " - cgroup2 ") || sscanf(line, "%*s %*s %*s %*s %255s", mount) != 1)
            continue;
        length = strlen(mount);
        if (strncmp(folder, mount, length) || (folder[length] && folder[length] != '/'))
            continue;
        snprintf(path, SIM_CGROUP_BYTES, "%s", folder[length] ? folder + length : "/");
        result = 0;
        break;
    }
    if (mounts)
        fclose(mounts);
    return result;
}

static bool path_of_process(pid_t pid, char *path)
{
    char name[64], line[4096];
    bool found = false;

    snprintf(name, sizeof name, "/proc/%d/cgroup", pid);
    FILE *groups = fopen(name, "re");
    while (groups && !found && fgets(line, sizeof line, groups))
        if (!strncmp(line, "0::", 3)) {
            line[strcspn(line, "\n")] = 0;
            snprintf(path, SIM_CGROUP_BYTES, "%.*s", SIM_CGROUP_BYTES - 1, line + 3);
            found = true;
        }
    if (groups)
        fclose(groups);
    return found;
}

static bool is_within(const char *path, const char *cgroup)
{
    size_t length = strlen(cgroup);

    return !strncmp(path, cgroup, length) && (!path[length] || path[length] == '/');
}

static struct limit *find(unsigned int card, const char *path, uint64_t inode)
{
    struct shared *shared = sim_shared();

    for (int i = 0; i < SIM_LIMITS; i++) {
        struct limit *limit = &shared->limits[i];

        if (limit->inode == inode && limit->card == card && !strcmp(limit->cgroup, path))
            return limit;
    }
    return NULL;
}

/* Removing a cgroup clears its limits: whoever wants room finds out. */
static struct limit *find_room(void)
{
    struct shared *shared = sim_shared();
    struct stat facts;

    for (int i = 0; i < SIM_LIMITS; i++) {
        struct limit *limit = &shared->limits[i];

        if (!limit->inode || stat(limit->folder, &facts) || facts.st_ino != limit->inode)
            return limit;
    }
    return NULL;
}

int sim_set_limit(unsigned int card, const char *folder, uint64_t soft, uint64_t hard)
{
    char path[SIM_CGROUP_BYTES];
    struct stat facts;
    int result = stat(folder, &facts) ? -errno : path_in_hierarchy(folder, path);

    if (result)
        return result;
    sim_lock();
    struct limit *limit = find(card, path, facts.st_ino);
    if (!limit && hard != UINT64_MAX)
        limit = find_room();
    if (!limit) {
        result = hard == UINT64_MAX ? 0 : -ENOSPC;
    } else {
        limit->inode = 0;
        limit->card = card;
        limit->soft = soft;
        limit->hard = hard;
        snprintf(limit->cgroup, sizeof limit->cgroup, "%s", path);
        snprintf(limit->folder, sizeof limit->folder, "%s", folder);
        if (hard != UINT64_MAX)
            limit->inode = facts.st_ino;
    }
    sim_unlock();
    return result;
}

static uint64_t used_within(unsigned int card, const char *cgroup)
{
    struct shared *shared = sim_shared();
    char path[SIM_CGROUP_BYTES];
    uint64_t sum = 0;
    pid_t pid;

    for (int slot = 0; slot < shared->slots_end; slot++) {
        uint64_t bytes = shared->cards[card].bytes[slot] + exports_bytes(card, slot);

        if (bytes && sim_slot_alive(slot, &pid) && path_of_process(pid, path) &&
            is_within(path, cgroup))
            sum += bytes;
    }
    return sum;
}

int sim_get_limit(unsigned int card, const char *folder, struct sim_limit *to)
{
    char path[SIM_CGROUP_BYTES];
    struct stat facts;
    int result = stat(folder, &facts) ? -errno : path_in_hierarchy(folder, path);
    struct limit *limit = result ? NULL : find(card, path, facts.st_ino);

    if (result)
        return result;
    if (!limit)
        return -ENODATA;
    *to = (struct sim_limit){limit->soft, limit->hard, used_within(card, path)};
    return 0;
}

bool sim_own_limit(unsigned int card, struct sim_limit *to)
{
    struct shared *shared = sim_shared();
    char path[SIM_CGROUP_BYTES] = "";
    uint64_t least = UINT64_MAX;

    for (int i = 0; i < SIM_LIMITS; i++) {
        struct limit *limit = &shared->limits[i];

        if (!limit->inode || limit->card != card || (!*path && !path_of_process(getpid(), path)) ||
            !is_within(path, limit->cgroup))
            continue;
        struct sim_limit found = {limit->soft, limit->hard, used_within(card, limit->cgroup)};
        uint64_t left = found.hard > found.used ? found.hard - found.used : 0;
        if (left < least) {
            least = left;
            *to = found;
        }
    }
    return least != UINT64_MAX;
}

/* With what this process has just added: whether it is too much for a cgroup that it is in. */
bool limits_exceeded(unsigned int card)
{
    struct sim_limit limit;

    return sim_own_limit(card, &limit) && limit.used > limit.hard;
}
