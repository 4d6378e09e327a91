/* How a card spends its time: pure, on a copy of its line. */
#ifndef MGPU_SIM_LINE_H
#define MGPU_SIM_LINE_H

#include "shared.h"

struct run {
    int slot;
    uint64_t born, start_ns, ns;
};

struct end {
    int context;
    uint64_t number, at_ns;
};

/* What happened while a line was followed. */
struct diary {
    struct run *runs;
    struct end *ends;
    size_t run_count, run_room, end_count, end_room;
};

/* Follow the line up to `until_ns`. With a goal (context >= 0) it stops where that work is done.
 * `diary` may be NULL. */
struct goal {
    int context;
    uint64_t number;
};
extern const struct goal no_goal;
void line_follow(const struct shared *shared, struct line *line, uint64_t until_ns, bool preempt,
                 struct goal goal, struct diary *diary);
struct member *line_member(struct line *line, int context);
/* Take a context out; its process keeps what it used. */
void line_leave(struct line *line, struct member *member);
void line_forget(struct line *line, int slot, uint64_t born);
void diary_clear(struct diary *diary);

#endif
