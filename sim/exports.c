/* Memory shared between processes by IPC: who is charged for it. */
#include "shared.h"

#include <errno.h>

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

uint64_t exports_bytes(struct shared *shared, unsigned int card, int slot)
{
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
    export->owned = false;
    if (export->importers == 0)
        export->id = 0;
    else
        export->holder = export->importer[--export->importers];
}

/* One import less for `slot`; whether there was one. */
static bool leave(struct export *export, int slot)
{
    for (unsigned int i = 0; i < export->importers; i++)
        if (export->importer[i] == slot) {
            export->importer[i] = export->importer[--export->importers];
            return true;
        }
    if (export->owned || export->holder != slot)
        return false;
    pass_on(export);
    return true;
}

void exports_leave(struct shared *shared, int slot)
{
    for (int i = 0; i < SIM_EXPORTS; i++) {
        struct export *export = &shared->exports[i];

        if (!export->id)
            continue;
        while (leave(export, slot))
            ;
        if (export->id && export->holder == slot)
            pass_on(export);
    }
}

int sim_export(unsigned int card, uint64_t bytes, uint64_t *id)
{
    struct shared *shared = sim_lock();
    int slot = sim_own_slot_locked(), result = slot < 0 ? slot : -ENOSPC;

    for (int i = 0; slot >= 0 && result && i < SIM_EXPORTS; i++)
        if (!shared->exports[i].id) {
            struct export *export = &shared->exports[i];

            *id = ++shared->exported;
            export->card = card;
            export->bytes = bytes;
            export->holder = slot;
            export->owned = true;
            export->importers = 0;
            if (i >= shared->exports_end)
                shared->exports_end = i + 1;
            export->id = *id;
            shared->slots[slot].bytes[card] -= bytes; /* it counts in the export from now on */
            result = 0;
        }
    sim_unlock();
    return result;
}

int sim_import(uint64_t id, unsigned int *card, uint64_t *bytes)
{
    struct shared *shared = sim_lock();
    int slot = sim_own_slot_locked(), result = slot < 0 ? slot : 0;

    if (!result)
        sim_reap(shared);
    struct export *export = find(shared, id);
    if (!result && !export)
        result = -ENOENT;
    if (!result && export->importers == SIM_IMPORTERS)
        result = -ENOSPC;
    if (!result) {
        export->importer[export->importers++] = slot;
        *card = export->card;
        *bytes = export->bytes;
    }
    sim_unlock();
    return result;
}

void sim_unexport(uint64_t id)
{
    struct shared *shared = sim_lock();
    struct export *export = find(shared, id);

    if (export)
        pass_on(export);
    sim_unlock();
}

void sim_unimport(uint64_t id)
{
    struct shared *shared = sim_lock();
    struct export *export = find(shared, id);
    int slot = sim_own_slot_locked();

    if (export && slot >= 0)
        leave(export, slot);
    sim_unlock();
}
