/* Who used a card in each sixth of a second, as NVML samples it.
 *
 * A cell is one word, so that adding to it needs no lock: from the top the number of its bucket (18
 * bits), the slot (12), the low bits of the slot's birth (6), and the nanoseconds (28 bits hold more
 * than a bucket's). A cell of another bucket is free. */
#include "shared.h"

#include <time.h>

#define NS_BITS 28
#define NS_MASK ((1ull << NS_BITS) - 1)
#define NUMBERS (1ull << 18)

static uint64_t number_tag(uint64_t number)
{
    return number << 46; /* the 18 bits that fit */
}

static uint64_t tag(uint64_t number, int slot, uint64_t born)
{
    return number_tag(number) | (uint64_t)slot << 34 | (born & 63) << NS_BITS;
}

/* False: the cell is another process's. Who comes when the cell has long been of a later bucket (it
 * was frozen for as long) is too late to be booked. */
static bool add(_Atomic uint64_t *cell, uint64_t wanted, uint64_t ns)
{
    uint64_t seen = *cell;

    for (;;) {
        bool same = (seen & ~NS_MASK) == wanted;
        uint64_t age = ((wanted >> 46) - (seen >> 46)) % NUMBERS;

        if (!same && seen && age == 0)
            return false;
        if (seen && age > NUMBERS / 2)
            return true;
        if (atomic_compare_exchange_weak(cell, &seen, (same ? seen : wanted) + ns))
            return true;
    }
}

void samples_book(unsigned int card, int slot, uint64_t born, uint64_t start_ns, uint64_t ns)
{
    struct shared_card *it = &sim_shared()->cards[card];

    while (ns) {
        uint64_t number = start_ns / SIM_BUCKET_NS;
        uint64_t room = SIM_BUCKET_NS - start_ns % SIM_BUCKET_NS;
        uint64_t part = ns < room ? ns : room;
        _Atomic uint64_t *cells = it->cells[number % SIM_BUCKETS];
        unsigned int i = 0;

        add(&it->totals[number % SIM_BUCKETS], number_tag(number), part);
        while (i < SHARED_CELLS &&
               !add(&cells[((unsigned int)slot + i) % SHARED_CELLS], tag(number, slot, born), part))
            i++;
        start_ns += part;
        ns -= part;
    }
}

/* Nanoseconds in a cell of that bucket. */
static uint64_t busy_in(uint64_t cell, uint64_t number)
{
    return cell >> 46 == number_tag(number) >> 46 ? cell & NS_MASK : 0;
}

static bool of_living(uint64_t cell, struct sim_busy *to)
{
    int slot = (int)(cell >> 34 & (SIM_SLOTS - 1));
    uint64_t born = sim_shared()->slots[slot].born;

    to->slot = slot;
    return born && (born & 63) == (cell >> NS_BITS & 63) && sim_slot_alive(slot, &to->pid);
}

static unsigned int users(unsigned int card, uint64_t number, int64_t end_ns, struct sim_busy *to,
                          unsigned int room)
{
    unsigned int count = 0;

    for (unsigned int i = 0; i < SHARED_CELLS && count < room; i++) {
        uint64_t cell = sim_shared()->cards[card].cells[number % SIM_BUCKETS][i];

        to[count] = (struct sim_busy){.end_ns = end_ns, .busy_ns = busy_in(cell, number)};
        if (to[count].busy_ns && of_living(cell, &to[count]))
            count++;
    }
    return count;
}

unsigned int sim_busy(unsigned int card, bool by_process, int64_t since_ns, struct sim_busy *to,
                      unsigned int room)
{
    uint64_t now = sim_now_ns(), current = now / SIM_BUCKET_NS;
    unsigned int count = 0;
    struct timespec real;

    timeline_follow(card);
    clock_gettime(CLOCK_REALTIME, &real);
    int64_t offset = (int64_t)real.tv_sec * 1000000000 + real.tv_nsec - (int64_t)now;
    for (uint64_t n = current > SIM_BUCKETS - 1 ? current - (SIM_BUCKETS - 1) : 0; n < current; n++) {
        int64_t end_ns = (int64_t)((n + 1) * SIM_BUCKET_NS) + offset;

        if (end_ns <= since_ns)
            continue;
        if (by_process)
            count += users(card, n, end_ns, to + count, room - count);
        else if (count < room)
            to[count++] = (struct sim_busy){
                end_ns, -1, 0, busy_in(sim_shared()->cards[card].totals[n % SIM_BUCKETS], n)};
    }
    return count;
}
