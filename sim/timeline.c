/* Who runs on a card when. Nobody runs the timeline: whoever wants to know something works it out
 * up to now, so that queued work goes on while its submitter sleeps or is frozen. */
#include "line.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SHORTEST_SLEEP_NS 20000ull
#define HORIZON_NS 200000000ull /* how far ahead the end of work is looked for */
#define LOOK_FOR_DEAD_NS 20000000ull
#define BUFFER_WAIT_NS 1000000
#define ENDED_TRIES 500 /* of a millisecond */
#define CLAIM_BITS 20
#define FIRST_CLAIM UINT64_MAX /* of the buffer in force when nobody has written yet */

typedef void (*change)(struct line *line, void *argument);

/* One thread of a process at a time; a process that is frozen in it holds up but itself. */
static pthread_mutex_t update_lock = PTHREAD_MUTEX_INITIALIZER;
static struct line scratch;
static struct diary diary;
static uint64_t looked_for_dead_ns[SIM_CARDS];

static pthread_mutex_t submit_lock = PTHREAD_MUTEX_INITIALIZER;

static void pause_ns(long ns)
{
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}

void timeline_init(struct shared *fresh)
{
    for (int card = 0; card < SIM_CARDS; card++)
        fresh->cards[card].claims[0] = FIRST_CLAIM;
}

void timeline_child(void)
{
    pthread_mutex_init(&update_lock, NULL);
    pthread_mutex_init(&submit_lock, NULL);
}

/* The line in force, into `to`; its version. */
static uint64_t read_line(unsigned int card, struct line *to)
{
    struct shared_card *it = &sim_shared()->cards[card];
    uint64_t version;

    do {
        version = it->version;
        const struct line *line = &it->lines[version % LINE_BUFFERS];
        unsigned int members = __atomic_load_n(&line->members, __ATOMIC_RELAXED);

        if (members > LINE_MEMBERS) /* it is being written anew: the version will have changed */
            members = LINE_MEMBERS;
        memcpy(to, line, offsetof(struct line, member) + members * sizeof line->member[0]);
        to->members = members;
        atomic_thread_fence(memory_order_acquire);
    } while (it->version != version);
    return version;
}

static bool is_dead(uint64_t birth)
{
    pid_t pid;

    for (int slot = 0; slot < sim_shared()->slots_end; slot++)
        if (sim_shared()->slots[slot].born == birth)
            return !sim_slot_alive(slot, &pid);
    return true;
}

/* A buffer that nobody writes to nor reads from; -1: all are in use. A claim is the birth of who
 * makes it, and unlike any before: so that who frees a buffer cannot free a later claim to it. One
 * that bears this process's birth is left from an earlier update. */
static int claim_buffer(unsigned int card, uint64_t version, uint64_t birth)
{
    static uint64_t made;
    _Atomic uint64_t *claims = sim_shared()->cards[card].claims;
    uint64_t claim = birth << CLAIM_BITS | (++made & ((1u << CLAIM_BITS) - 1));
    int in_force = (int)(version % LINE_BUFFERS);

    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < LINE_BUFFERS; i++) {
            uint64_t seen = claims[i], whose = seen >> CLAIM_BITS;
            bool free = !seen || whose == birth;

            if (pass && !free && seen != FIRST_CLAIM)
                free = is_dead(whose);
            if (i != in_force && free && atomic_compare_exchange_strong(&claims[i], &seen, claim))
                return i;
        }
    return -1;
}

/* Make `scratch` the line in force, unless it is not `version` any more that is. */
static bool publish(unsigned int card, uint64_t version, uint64_t birth)
{
    struct shared_card *it = &sim_shared()->cards[card];
    _Atomic uint64_t *old = &it->claims[version % LINE_BUFFERS];
    uint64_t old_claim = *old;
    int buffer = claim_buffer(card, version, birth);

    if (buffer < 0) {
        pause_ns(BUFFER_WAIT_NS);
        return false;
    }
    memcpy(&it->lines[buffer], &scratch,
           offsetof(struct line, member) + scratch.members * sizeof scratch.member[0]);
    uint64_t next = (version / LINE_BUFFERS + 1) * LINE_BUFFERS + (uint64_t)buffer;
    if (!atomic_compare_exchange_strong(&it->version, &version, next))
        return false;
    atomic_compare_exchange_strong(old, &old_claim, 0);
    return true;
}

/* Dead members' work must not go on, whoever keeps the mutex under which they are buried. */
static void forget_dead(unsigned int card, uint64_t now)
{
    if (now - looked_for_dead_ns[card] < LOOK_FOR_DEAD_NS)
        return;
    looked_for_dead_ns[card] = now;
    for (unsigned int i = scratch.members; i-- > 0;) {
        struct member *member = &scratch.member[i];
        pid_t pid;

        if (i >= scratch.members) /* taken out with another of its process */
            continue;
        if (sim_shared()->slots[member->slot].born != member->born ||
            !sim_slot_alive(member->slot, &pid))
            line_forget(&scratch, member->slot, member->born);
    }
}

static void write_diary(unsigned int card)
{
    for (size_t i = 0; i < diary.run_count; i++) {
        struct run *run = &diary.runs[i];

        samples_book(card, run->slot, run->born, run->start_ns, run->ns);
    }
    for (size_t i = 0; i < diary.end_count; i++) {
        struct end *end = &diary.ends[i];
        struct ended *to = &sim_shared()->contexts[end->context].ended[end->number % SIM_QUEUE];

        to->at_ns = end->at_ns;
        to->number = end->number;
    }
}

/* Only who has a slot can change a line. It is taken before the lock is, for burying the dead, as is
 * done then, needs the lock too. */
static void begin_update(void)
{
    sim_want_slot();
    pthread_mutex_lock(&update_lock);
}

static void end_update(void)
{
    pthread_mutex_unlock(&update_lock);
}

/* Follow the card up to now, with a change at its end, if any. The line is in `scratch` then. Without a
 * slot of its own a process sees the line, and leaves it as it is. */
static void update(unsigned int card, change alter, void *argument)
{
    uint64_t version, now, birth = sim_birth();

    do {
        version = read_line(card, &scratch);
        unsigned int members = scratch.members;

        diary_clear(&diary);
        now = sim_now_ns();
        forget_dead(card, now);
        line_follow(sim_shared(), &scratch, now, sim_conf()->preempt, no_goal, &diary);
        if (alter)
            alter(&scratch, argument);
        else if (!birth || (!diary.run_count && members == scratch.members))
            return; /* nothing new */
    } while (!publish(card, version, birth));
    write_diary(card);
}

void timeline_follow(unsigned int card)
{
    begin_update();
    update(card, NULL, NULL);
    end_update();
}

uint64_t timeline_busy_ns(unsigned int card, struct sim_use *uses, unsigned int count)
{
    static uint64_t busy_ns[SIM_SLOTS];

    begin_update();
    read_line(card, &scratch);
    memset(busy_ns, 0, sizeof busy_ns);
    for (unsigned int i = 0; i < scratch.members; i++) {
        const struct member *member = &scratch.member[i];

        if (sim_shared()->slots[member->slot].born == member->born)
            busy_ns[member->slot] += member->busy_ns;
    }
    for (unsigned int i = 0; i < count; i++)
        uses[i].busy_ns = busy_ns[uses[i].slot];
    uint64_t all_ns = scratch.busy_ns;
    end_update();
    return all_ns;
}

static void enter(struct line *line, void *argument)
{
    int *context = argument;
    struct context *it = &sim_shared()->contexts[*context];

    if (line->members == LINE_MEMBERS) {
        *context = -EAGAIN;
        return;
    }
    line->member[line->members++] =
        (struct member){.context = *context, .slot = it->slot, .born = it->born};
}

static void leave(struct line *line, void *context)
{
    struct member *member = line_member(line, *(int *)context);

    if (member)
        line_leave(line, member);
}

void timeline_drop(int context)
{
    struct context *it = &sim_shared()->contexts[context];

    begin_update();
    update(it->card, leave, &context);
    end_update();
    it->taken = false;
}

/* Under the mutex. */
static int take_context(struct shared *shared, int slot, unsigned int card)
{
    for (int i = 0; i < SIM_CONTEXTS; i++) {
        struct context *it = &shared->contexts[i];

        if (it->taken)
            continue;
        it->slot = slot;
        it->born = shared->slots[slot].born;
        it->card = card;
        if (it->submitted)
            memset((void *)it->ended, 0, sizeof it->ended);
        it->submitted = 0;
        if (i >= shared->contexts_end)
            shared->contexts_end = i + 1;
        it->taken = true;
        return i;
    }
    return -EAGAIN;
}

int sim_context_open(unsigned int card)
{
    struct shared *shared = sim_lock();
    int slot = sim_own_slot_locked();
    int made = slot < 0 ? slot : take_context(shared, slot, card), context = made;

    sim_unlock();
    if (made < 0)
        return made;
    begin_update();
    update(card, enter, &context);
    end_update();
    if (context < 0)
        shared->contexts[made].taken = false;
    else
        shared->slots[slot].contexts[card]++;
    return context;
}

void sim_context_close(int context)
{
    struct context *it = &sim_shared()->contexts[context];

    sim_shared()->slots[it->slot].contexts[it->card]--;
    timeline_drop(context);
}

/* How much of the context's work is done, as far as the card has been followed. */
static uint64_t done_so_far(int context, bool follow)
{
    unsigned int card = sim_shared()->contexts[context].card;

    begin_update();
    if (follow)
        update(card, NULL, NULL);
    else
        read_line(card, &scratch);
    const struct member *member = line_member(&scratch, context);
    uint64_t done = member ? member->done : 0;
    end_update();
    return done;
}

int64_t sim_submit(int number, uint64_t work_ns)
{
    static uint64_t known_done[SIM_CONTEXTS]; /* saves looking at the line at each launch */
    struct context *context = &sim_shared()->contexts[number];
    int64_t result = -EAGAIN;

    pthread_mutex_lock(&submit_lock);
    uint64_t next = context->submitted + 1;
    if (next == 1)
        known_done[number] = 0;
    if (next - known_done[number] > SIM_QUEUE)
        known_done[number] = done_so_far(number, true);
    if (next - known_done[number] <= SIM_QUEUE) {
        context->work[next % SIM_QUEUE] = (struct work){sim_now_ns(), work_ns ? work_ns : 1};
        atomic_store_explicit(&context->submitted, next, memory_order_release);
        result = (int64_t)next;
    }
    pthread_mutex_unlock(&submit_lock);
    return result;
}

uint64_t sim_pending_ns(int number, uint64_t work)
{
    struct shared *shared = sim_shared();
    unsigned int card = shared->contexts[number].card;
    uint64_t left = 0;

    if (work > sim_submitted(number))
        work = sim_submitted(number);
    if (!work || done_so_far(number, false) >= work)
        return 0;
    sim_reap_when_due();
    begin_update();
    update(card, NULL, NULL);
    const struct member *member = line_member(&scratch, number);
    if (member && member->done < work) {
        uint64_t now = scratch.now_ns;

        line_follow(shared, &scratch, now + HORIZON_NS, sim_conf()->preempt,
                    (struct goal){number, work}, NULL);
        left = scratch.now_ns - now;
    }
    end_update();
    return left && left < SHORTEST_SLEEP_NS ? SHORTEST_SLEEP_NS : left;
}

uint64_t sim_oldest_ns(int number)
{
    return sim_pending_ns(number, done_so_far(number, false) + 1);
}

uint64_t sim_submitted(int number)
{
    return sim_shared()->contexts[number].submitted;
}

/* Who finds that work is done notes when, just after. */
uint64_t sim_ended_ns(int number, uint64_t work)
{
    struct ended *ended = &sim_shared()->contexts[number].ended[work % SIM_QUEUE];

    for (int i = 0; work && i < ENDED_TRIES && ended->number < work; i++)
        pause_ns(1000000);
    uint64_t at_ns = ended->at_ns;
    return work && ended->number == work ? at_ns : 0;
}
