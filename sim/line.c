/* How a card spends its time. Contexts with work take turns of SIM_SLICE_NS; a turn ends early when
 * the work does. Kernels of a context run one after the other, in the order of their launches. */
#include "line.h"

#include <stdlib.h>
#include <string.h>

const struct goal no_goal = {-1, 0};

/* The next work of a member that was launched by then; NULL: it has none. */
static const struct work *next_work(const struct shared *shared, const struct member *member)
{
    if (member->context < 0)
        return NULL;
    const struct context *context = &shared->contexts[member->context];
    if (member->done >= atomic_load_explicit(&context->submitted, memory_order_acquire))
        return NULL;
    return &context->work[(member->done + 1) % SIM_QUEUE];
}

/* The next member in turn that has work now, the present one last; -1: none. `*arrival`: when the
 * first of the others that were passed over gets some. */
static int next_in_turn(const struct shared *shared, const struct line *line, uint64_t *arrival)
{
    *arrival = UINT64_MAX;
    for (unsigned int i = 1; i <= line->members; i++) {
        unsigned int at = (line->turn + i) % line->members;
        const struct work *work = next_work(shared, &line->member[at]);

        if (work && work->at_ns <= line->now_ns)
            return (int)at;
        if (work && work->at_ns < *arrival)
            *arrival = work->at_ns;
    }
    return -1;
}

static void *room_for(void *list, size_t count, size_t *room, size_t size)
{
    if (count < *room)
        return list;
    size_t wanted = *room ? 2 * *room : 64;
    void *larger = realloc(list, wanted * size);
    if (larger)
        *room = wanted;
    return larger;
}

/* Without memory for it an entry is lost: it makes a sample too small, nothing else. */
static void note_run(struct diary *diary, const struct member *member, uint64_t start_ns, uint64_t ns)
{
    if (!diary || !ns)
        return;
    if (diary->run_count) {
        struct run *last = &diary->runs[diary->run_count - 1];

        if (last->born == member->born && last->start_ns + last->ns == start_ns) {
            last->ns += ns;
            return;
        }
    }
    void *runs = room_for(diary->runs, diary->run_count, &diary->run_room, sizeof *diary->runs);
    if (!runs)
        return;
    diary->runs = runs;
    diary->runs[diary->run_count++] = (struct run){member->slot, member->born, start_ns, ns};
}

static void note_end(struct diary *diary, const struct member *member, uint64_t at_ns)
{
    if (!diary)
        return;
    void *ends = room_for(diary->ends, diary->end_count, &diary->end_room, sizeof *diary->ends);
    if (!ends)
        return;
    diary->ends = ends;
    diary->ends[diary->end_count++] = (struct end){member->context, member->done, at_ns};
}

void diary_clear(struct diary *diary)
{
    diary->run_count = diary->end_count = 0;
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Give the turn to the next one with work, or let time pass until there is one. A member that is
 * alone gets as many slices at once as nobody else can want. */
static void pass_turn(const struct shared *shared, struct line *line, uint64_t until_ns)
{
    uint64_t arrival, alone;
    int next = next_in_turn(shared, line, &arrival);

    if (next < 0) {
        line->now_ns = least(arrival, until_ns);
        return;
    }
    line->slice_left_ns = SIM_SLICE_NS;
    if (next == (int)line->turn) {
        alone = least(arrival, until_ns) - line->now_ns;
        line->slice_left_ns = (alone + SIM_SLICE_NS - 1) / SIM_SLICE_NS * SIM_SLICE_NS;
    }
    line->turn = (unsigned int)next;
}

/* Run the member whose turn it is as long as nothing changes. */
static void run(struct line *line, struct member *member, const struct work *work,
                uint64_t until_ns, bool preempt, struct diary *diary)
{
    if (!member->left_ns)
        member->left_ns = work->need_ns;
    uint64_t ns = least(until_ns - line->now_ns, member->left_ns);
    if (preempt)
        ns = least(ns, line->slice_left_ns);
    note_run(diary, member, line->now_ns, ns);
    line->now_ns += ns;
    line->busy_ns += ns;
    line->slice_left_ns -= least(ns, line->slice_left_ns);
    member->busy_ns += ns;
    member->left_ns -= ns;
    if (!member->left_ns) {
        member->done++;
        note_end(diary, member, line->now_ns);
    }
}

void line_follow(const struct shared *shared, struct line *line, uint64_t until_ns, bool preempt,
                 struct goal goal, struct diary *diary)
{
    if (line->turn >= line->members)
        line->turn = 0;
    while (line->members && line->now_ns < until_ns) {
        struct member *member = &line->member[line->turn];
        const struct work *work = next_work(shared, member);
        bool begun = member->left_ns && !preempt; /* it goes on to its end */

        if (work && work->at_ns > line->now_ns)
            work = NULL;
        if (!work)
            line->slice_left_ns = 0;
        if (!work || (!line->slice_left_ns && !begun)) {
            pass_turn(shared, line, until_ns);
            continue;
        }
        run(line, member, work, until_ns, preempt, diary);
        if (member->context == goal.context && member->done >= goal.number)
            return;
    }
    if (line->now_ns < until_ns)
        line->now_ns = until_ns;
}

struct member *line_member(struct line *line, int context)
{
    for (unsigned int i = 0; i < line->members; i++)
        if (line->member[i].context == context)
            return &line->member[i];
    return NULL;
}

static void take_out(struct line *line, unsigned int at)
{
    line->members--;
    memmove(&line->member[at], &line->member[at + 1],
            (line->members - at) * sizeof line->member[0]);
    if (at == line->turn)
        line->slice_left_ns = 0;
    if (at <= line->turn) /* so that the one behind it is next */
        line->turn = line->turn ? line->turn - 1 : line->members ? line->members - 1 : 0;
}

void line_leave(struct line *line, struct member *member)
{
    for (unsigned int i = 0; i < line->members; i++) {
        struct member *past = &line->member[i];

        if (past->context < 0 && past->born == member->born) {
            past->busy_ns += member->busy_ns;
            take_out(line, (unsigned int)(member - line->member));
            return;
        }
    }
    if (member == &line->member[line->turn])
        line->slice_left_ns = 0;
    member->context = -1;
    member->left_ns = 0;
}

void line_forget(struct line *line, int slot, uint64_t born)
{
    for (unsigned int i = line->members; i-- > 0;)
        if (line->member[i].slot == slot && line->member[i].born == born)
            take_out(line, i);
}
