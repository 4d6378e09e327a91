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

static void charge(struct shared *shared, struct export *export, int slot, bool on)
{
    uint64_t bytes = on ? export->bytes : -export->bytes;

    shared->slots[slot].bytes[export->card] += bytes;
    shared->cards[export->card].used_bytes += bytes;
}

/* The holder gives it up: an importer takes it over, or nobody is left. */
static void pass_on(struct shared *shared, struct export *export)
{
    charge(shared, export, export->holder, false);
    if (export->importers == 0) {
        export->id = 0;
        return;
    }
    export->holder = export->importer[--export->importers];
    export->owned = false;
    charge(shared, export, export->holder, true);
}

/* One import less for `slot`; whether there was one. */
static bool leave(struct shared *shared, struct export *export, int slot)
{
    for (unsigned int i = 0; i < export->importers; i++)
        if (export->importer[i] == slot) {
            export->importer[i] = export->importer[--export->importers];
            return true;
        }
    if (export->owned || export->holder != slot)
        return false;
    pass_on(shared, export);
    return true;
}

void exports_leave(struct shared *shared, int slot)
{
    for (int i = 0; i < SIM_EXPORTS; i++) {
        struct export *export = &shared->exports[i];

        if (!export->id)
            continue;
        while (leave(shared, export, slot))
            ;
        if (export->id && export->holder == slot)
            pass_on(shared, export);
    }
}

int sim_export(unsigned int card, uint64_t bytes, uint64_t *id)
{
    struct shared *shared = sim_lock();
    int slot = sim_own_slot(), result = slot < 0 ? slot : -ENOSPC;

    for (int i = 0; slot >= 0 && result && i < SIM_EXPORTS; i++)
        if (!shared->exports[i].id) {
            *id = ++shared->exported;
            shared->exports[i] = (struct export){
                .id = *id, .card = card, .bytes = bytes, .holder = slot, .owned = true};
            result = 0;
        }
    sim_unlock();
    return result;
}

int sim_import(uint64_t id, unsigned int *card, uint64_t *bytes)
{
    struct shared *shared = sim_lock();
    int slot = sim_own_slot(), result = slot < 0 ? slot : 0;

    if (!result)
        sim_reap();
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
        pass_on(shared, export);
    sim_unlock();
}

void sim_unimport(uint64_t id)
{
    struct shared *shared = sim_lock();
    struct export *export = find(shared, id);
    int slot = sim_own_slot();

    if (export && slot >= 0)
        leave(shared, export, slot);
    sim_unlock();
}
