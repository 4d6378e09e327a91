/* Memory shared between processes by IPC: who is charged for it. */
#include "shared.h"
#include "conf.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

/* Under the mutex: `export_changes` is odd while an export is changed. It may be so already, left by
 * one who died over it. */
static struct shared *begin(void)
{
    struct shared *shared = sim_lock();

    shared->export_changes |= 1;
    return shared;
}

static void end(struct shared *shared)
{
    shared->export_changes = (shared->export_changes | 1) + 1;
    sim_unlock();
}

void sim_export_path(uint64_t id, char *path, size_t size)
{
    snprintf(path, size, "%s/mem.%llu", sim_dir(), (unsigned long long)id);
}

static struct export *find(struct shared *shared, uint64_t id)
{
    for (int i = 0; i < SIM_EXPORTS; i++)
        if (id && shared->exports[i].id == id)
            return &shared->exports[i];
    return NULL;
}

/* The slot that the export counts for: the holder, or the first living importer after its death. */
static int counts_for(struct export *export)
{
    unsigned int importers = export->importers;
    pid_t pid;

    if (sim_slot_alive(export->holder, &pid))
        return export->holder;
    for (unsigned int i = 0; i < importers && i < SIM_IMPORTERS; i++)
        if (sim_slot_alive(export->importer[i], &pid))
            return export->importer[i];
    return -1;
}

uint64_t exports_bytes(unsigned int card, int slot)
{
    struct shared *shared = sim_shared();
    uint64_t sum = 0;

    for (int i = 0; i < shared->exports_end; i++) {
        struct export *export = &shared->exports[i];

        if (!export->id || export->card != card)
            continue;
        int whose = counts_for(export);
        if (whose >= 0 && (slot < 0 || whose == slot))
            sum += export->bytes;
    }
    return sum;
}

/* The holder gives it up: an importer takes it over, or nobody is left. */
static void pass_on(struct export *export)
{
    char path[4096];

    export->owned = false;
    if (export->importers) {
        export->holder = export->importer[export->importers - 1];
        export->importers--;
        return;
    }
    sim_export_path(export->id, path, sizeof path);
    unlink(path);
    export->id = 0;
}

/* One import less for `slot`; whether there was one. */
static bool leave(struct export *export, int slot)
{
    for (unsigned int i = 0; i < export->importers; i++)
        if (export->importer[i] == slot) {
            export->importer[i] = export->importer[export->importers - 1];
            export->importers--;
            return true;
        }
    if (export->owned || export->holder != slot)
        return false;
    pass_on(export);
    return true;
}

void exports_leave(int slot)
{
    struct shared *shared = sim_shared();

    shared->export_changes |= 1;
    for (int i = 0; i < shared->exports_end; i++) {
        struct export *export = &shared->exports[i];

        while (export->id && leave(export, slot))
            ;
        if (export->id && export->holder == slot)
            pass_on(export);
    }
    while (shared->exports_end && !shared->exports[shared->exports_end - 1].id)
        shared->exports_end--;
    shared->export_changes = (shared->export_changes | 1) + 1;
}

static struct export *free_export(struct shared *shared)
{
    for (int i = 0; i < SIM_EXPORTS; i++)
        if (!shared->exports[i].id) {
            if (i >= shared->exports_end)
                shared->exports_end = i + 1;
            return &shared->exports[i];
        }
    return NULL;
}

int sim_export(unsigned int card, uint64_t bytes, uint64_t *id)
{
    struct shared *shared = begin();
    int slot = sim_own_slot_locked();
    struct export *export = slot < 0 ? NULL : free_export(shared);

    if (export) {
        memory_begin(slot);
        *id = ++shared->exported;
        export->card = card;
        export->bytes = bytes;
        export->holder = slot;
        export->owned = true;
        export->importers = 0;
        export->id = *id;
        shared->cards[card].bytes[slot] -= bytes; /* it counts in the export from now on */
        memory_end(slot);
    }
    end(shared);
    return slot < 0 ? slot : export ? 0 : -ENOSPC;
}

int sim_import(uint64_t id, unsigned int *card, uint64_t *bytes)
{
    struct shared *shared = begin();
    int slot = sim_own_slot_locked(), result = slot < 0 ? slot : 0;

    struct export *export = find(shared, id);
    if (!result && (!export || counts_for(export) < 0))
        result = -ENOENT;
    if (!result && export->owned && export->holder == slot)
        result = -EBUSY;
    if (!result && export->importers == SIM_IMPORTERS)
        result = -ENOSPC;
    if (!result) {
        export->importer[export->importers] = slot;
        export->importers++;
        *card = export->card;
        *bytes = export->bytes;
    }
    end(shared);
    return result;
}

void sim_unexport(uint64_t id)
{
    struct shared *shared = begin();
    struct export *export = find(shared, id);

    if (export)
        pass_on(export);
    end(shared);
}

void sim_unimport(uint64_t id)
{
    struct shared *shared = begin();
    struct export *export = find(shared, id);
    int slot = sim_own_slot_locked();

    if (export && slot >= 0)
        leave(export, slot);
    end(shared);
}
