/* What each process holds of each card. Written by the process alone, so without a lock. */
#include "shared.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#define ONE_MADE (1ull << 32)
#define SNAPSHOT_TRIES 2000

static struct shared_card *card_at(unsigned int card)
{
    return &sim_shared()->cards[card];
}

void memory_begin(int slot)
{
    sim_shared()->slots[slot].changes++;
}

void memory_end(int slot)
{
    sim_shared()->slots[slot].changes += ONE_MADE - 1;
}

/* All that is booked, by dead processes too that nobody has buried yet. */
static uint64_t booked(unsigned int card)
{
    uint64_t sum = exports_bytes(card, -1);

    for (int slot = 0, end = sim_shared()->slots_end; slot < end; slot++)
        sum += atomic_load_explicit(&card_at(card)->bytes[slot], memory_order_relaxed);
    return sum;
}

uint64_t sim_used(unsigned int card)
{
    uint64_t sum = exports_bytes(card, -1);
    pid_t pid;

    for (int slot = 0; slot < sim_shared()->slots_end; slot++) {
        uint64_t bytes = card_at(card)->bytes[slot];

        if (bytes && sim_slot_alive(slot, &pid))
            sum += bytes;
    }
    return sum;
}

/* Add, look, take back when it was too much: two that race may both be refused, never both served. */
int sim_charge(unsigned int card, uint64_t bytes)
{
    const struct sim_card_conf *conf = &sim_conf()->card[card];
    uint64_t room = conf->memory_bytes - conf->reserved_bytes;
    int slot = sim_own_slot(), result = 0;

    if (slot < 0)
        return slot;
    if (bytes > room)
        return -ENOMEM;
    memory_begin(slot);
    card_at(card)->bytes[slot] += bytes;
    if ((booked(card) > room && sim_used(card) > room) || limits_exceeded(card)) {
        card_at(card)->bytes[slot] -= bytes;
        result = -ENOMEM;
    }
    memory_end(slot);
    return result;
}

void sim_uncharge(unsigned int card, uint64_t bytes)
{
    int slot = sim_own_slot();

    if (slot < 0)
        return;
    memory_begin(slot);
    card_at(card)->bytes[slot] -= bytes;
    memory_end(slot);
}

unsigned int sim_uses(unsigned int card, struct sim_use *to, unsigned int room)
{
    unsigned int count = 0;
    pid_t pid;

    for (int slot = 0; slot < sim_shared()->slots_end; slot++) {
        struct slot *it = &sim_shared()->slots[slot];
        uint64_t bytes = card_at(card)->bytes[slot] + exports_bytes(card, slot);

        if (!it->born || (!bytes && !it->contexts[card]) || !sim_slot_alive(slot, &pid))
            continue;
        if (count < room)
            to[count] = (struct sim_use){slot, pid, bytes, it->contexts[card], 0};
        count++;
    }
    return count;
}

static void note_changes(uint64_t *to)
{
    for (int slot = 0; slot < SIM_SLOTS; slot++)
        to[slot] = slot < sim_shared()->slots_end ? sim_shared()->slots[slot].changes : 0;
    to[SIM_SLOTS] = sim_shared()->export_changes;
}

static bool is_still(const uint64_t *changes)
{
    for (int slot = 0; slot < SIM_SLOTS; slot++)
        if (changes[slot] % ONE_MADE)
            return false;
    return changes[SIM_SLOTS] % 2 == 0;
}

/* When nothing changed from before the first figure was read until after the last, they are all of
 * one moment. */
void sim_take_snapshot(struct sim_snapshot *to)
{
    static uint64_t before[SIM_SLOTS + 1], after[SIM_SLOTS + 1];

    for (unsigned int card = 0; card < sim_conf()->cards; card++)
        timeline_follow(card);
    to->settled = false;
    for (int i = 0; i < SNAPSHOT_TRIES && !to->settled; i++) {
        if (i)
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        note_changes(before);
        for (unsigned int card = 0; card < sim_conf()->cards; card++) {
            to->used_bytes[card] = sim_used(card);
            to->uses[card] = sim_uses(card, to->use[card], SIM_SLOTS);
            to->busy_ns[card] = timeline_busy_ns(card, to->use[card], to->uses[card]);
        }
        note_changes(after);
        to->settled = is_still(before) && !memcmp(before, after, sizeof before);
    }
}
