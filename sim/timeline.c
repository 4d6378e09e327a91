/* Who runs on a card when. Nobody runs the timeline: whoever wants to know something works it out
 * up to now, so that queued work goes on while its submitter sleeps or is frozen.
 *
 * Contexts with work take turns, a slice each; a slice ends early when the work does. */
#include "shared.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#define REAP_EVERY_NS 20000000ull
#define SHORTEST_SLEEP_NS 20000ull
#define LOCK_WITHIN_MS 20

static struct bucket *bucket_at(struct shared_card *card, uint64_t ns)
{
    uint64_t number = ns / SIM_BUCKET_NS;
    struct bucket *bucket = &card->buckets[number % SIM_BUCKETS];

    if (bucket->number != number) {
        bucket->number = number;
        bucket->busy_ns = 0;
        bucket->users = 0;
    }
    return bucket;
}

/* Book `ns` of card time from `start_ns` on for a process, in the buckets that it touches. */
static void book(struct shared_card *card, int slot, uint64_t born, uint64_t start_ns, uint64_t ns)
{
    while (ns) {
        uint64_t room = SIM_BUCKET_NS - start_ns % SIM_BUCKET_NS;
        uint64_t part = ns < room ? ns : room;
        struct bucket *bucket = bucket_at(card, start_ns);
        unsigned int i = 0;

        bucket->busy_ns += part;
        while (i < bucket->users && bucket->user[i].born != born)
            i++;
        if (i == bucket->users && i < SIM_BUCKET_USERS) {
            bucket->user[i].slot = slot;
            bucket->user[i].born = born;
            bucket->user[i].busy_ns = 0;
            bucket->users++;
        }
        if (i < SIM_BUCKET_USERS)
            bucket->user[i].busy_ns += part;
        start_ns += part;
        ns -= part;
    }
}

static void leave_queue(struct shared_card *card, int context)
{
    for (unsigned int i = 0; i < card->waiting; i++)
        if (card->queue[i] == context) {
            card->waiting--;
            memmove(&card->queue[i], &card->queue[i + 1], (card->waiting - i) * sizeof(int));
            if (i == 0)
                card->slice_left_ns = SIM_SLICE_NS;
            return;
        }
}

static void next_turn(struct shared_card *card)
{
    int first = card->queue[0];

    memmove(&card->queue[0], &card->queue[1], (card->waiting - 1) * sizeof(int));
    card->queue[card->waiting - 1] = first;
    card->slice_left_ns = SIM_SLICE_NS;
}

void timeline_advance(struct shared *shared, unsigned int number, uint64_t until_ns)
{
    struct shared_card *card = &shared->cards[number];

    while (card->waiting && card->now_ns < until_ns) {
        struct context *context = &shared->contexts[card->queue[0]];
        uint64_t *left = &context->left_ns[(context->done + 1) % SIM_QUEUE];
        uint64_t run = until_ns - card->now_ns;

        if (card->waiting > 1 && run > card->slice_left_ns)
            run = card->slice_left_ns;
        if (run > *left)
            run = *left;
        book(card, context->slot, shared->slots[context->slot].born, card->now_ns, run);
        card->now_ns += run;
        *left -= run;
        card->slice_left_ns -= card->waiting > 1 ? run : 0;
        if (*left == 0)
            context->ended_ns[++context->done % SIM_QUEUE] = card->now_ns;
        if (context->done == context->submitted)
            leave_queue(card, card->queue[0]);
        else if (card->slice_left_ns == 0)
            next_turn(card);
    }
    if (card->now_ns < until_ns)
        card->now_ns = until_ns;
}

void timeline_drop(struct shared *shared, int number)
{
    struct context *context = &shared->contexts[number];

    timeline_advance(shared, context->card, sim_now_ns());
    leave_queue(&shared->cards[context->card], number);
    if (shared->slots[context->slot].contexts[context->card])
        shared->slots[context->slot].contexts[context->card]--;
    memset(context, 0, offsetof(struct context, left_ns));
}

void timeline_rebuild(struct shared *shared)
{
    for (unsigned int card = 0; card < SIM_CARDS; card++) {
        shared->cards[card].waiting = 0;
        shared->cards[card].slice_left_ns = SIM_SLICE_NS;
    }
    for (int i = 0; i < SIM_CONTEXTS; i++) {
        struct context *context = &shared->contexts[i];
        struct shared_card *card = &shared->cards[context->card];

        if (context->taken && context->submitted > context->done)
            card->queue[card->waiting++] = i;
    }
}

int sim_context_open(unsigned int card)
{
    struct shared *shared = sim_lock();
    int slot = sim_own_slot_locked(), found = slot < 0 ? slot : -EAGAIN;

    for (int i = 0; slot >= 0 && i < SIM_CONTEXTS && found < 0; i++)
        if (!shared->contexts[i].taken) {
            memset(&shared->contexts[i], 0, offsetof(struct context, left_ns));
            shared->contexts[i].taken = true;
            shared->contexts[i].slot = slot;
            shared->contexts[i].card = card;
            shared->slots[slot].contexts[card]++;
            found = i;
        }
    sim_unlock();
    return found;
}

void sim_context_close(int context)
{
    struct shared *shared = sim_lock();

    timeline_drop(shared, context);
    sim_unlock();
}

int64_t sim_submit(int number, uint64_t work_ns)
{
    struct shared *shared = sim_lock();
    struct context *context = &shared->contexts[number];
    struct shared_card *card = &shared->cards[context->card];
    int64_t result = -EAGAIN;

    timeline_advance(shared, context->card, sim_now_ns());
    if (context->submitted - context->done < SIM_QUEUE) {
        bool idle = context->submitted == context->done;

        result = (int64_t)++context->submitted;
        context->left_ns[context->submitted % SIM_QUEUE] = work_ns ? work_ns : 1;
        if (idle) {
            if (card->waiting == 0)
                card->slice_left_ns = SIM_SLICE_NS;
            card->queue[card->waiting++] = number;
        }
    }
    sim_unlock();
    return result;
}

uint64_t sim_pending_ns(int number, uint64_t work)
{
    struct shared *shared = sim_lock();
    struct context *context = &shared->contexts[number];
    uint64_t now = sim_now_ns(), left = 0;

    if (now - shared->reaped_ns > REAP_EVERY_NS)
        sim_reap(shared);
    timeline_advance(shared, context->card, now);
    for (uint64_t n = context->done + 1; n <= work && n <= context->submitted; n++)
        left += context->left_ns[n % SIM_QUEUE];
    sim_unlock();
    return left && left < SHORTEST_SLEEP_NS ? SHORTEST_SLEEP_NS : left;
}

uint64_t sim_oldest_ns(int number)
{
    struct shared *shared = sim_lock();
    uint64_t oldest = shared->contexts[number].done + 1;

    sim_unlock();
    return sim_pending_ns(number, oldest);
}

uint64_t sim_submitted(int number)
{
    struct shared *shared = sim_lock();
    uint64_t submitted = shared->contexts[number].submitted;

    sim_unlock();
    return submitted;
}

uint64_t sim_ended_ns(int number, uint64_t work)
{
    struct shared *shared = sim_lock();
    struct context *context = &shared->contexts[number];
    bool kept = work && work <= context->done && context->done - work < SIM_QUEUE;
    uint64_t ended = kept ? context->ended_ns[work % SIM_QUEUE] : 0;

    sim_unlock();
    return ended;
}

/* Without the mutex (its owner may be frozen) the figures are as far as they were worked out. */
unsigned int sim_busy(unsigned int number, bool by_process, int64_t since_ns, struct sim_busy *to,
                      unsigned int room)
{
    struct shared *locked = sim_lock_within_ms(LOCK_WITHIN_MS), *shared = sim_shared();
    struct shared_card *card = &shared->cards[number];
    uint64_t now = sim_now_ns(), current = now / SIM_BUCKET_NS;
    unsigned int count = 0;
    struct timespec real;

    if (locked)
        timeline_advance(shared, number, now);
    clock_gettime(CLOCK_REALTIME, &real);
    int64_t offset = (int64_t)real.tv_sec * 1000000000 + real.tv_nsec - (int64_t)now;
    for (uint64_t n = current > SIM_BUCKETS - 1 ? current - (SIM_BUCKETS - 1) : 0; n < current; n++) {
        const struct bucket *bucket = &card->buckets[n % SIM_BUCKETS];
        int64_t end_ns = (int64_t)((n + 1) * SIM_BUCKET_NS) + offset;
        bool kept = bucket->number == n;

        if (end_ns <= since_ns)
            continue;
        if (!by_process && count < room)
            to[count++] = (struct sim_busy){end_ns, -1, 0, kept ? bucket->busy_ns : 0};
        for (unsigned int i = 0; by_process && kept && i < bucket->users && count < room; i++) {
            int slot = bucket->user[i].slot;
            pid_t pid;

            if (shared->slots[slot].born == bucket->user[i].born && sim_slot_alive(slot, &pid))
                to[count++] = (struct sim_busy){end_ns, slot, pid, bucket->user[i].busy_ns};
        }
    }
    if (locked)
        sim_unlock();
    return count;
}
