/* mgpu-sim: look at the simulated cards, and put faults into them. */
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: mgpu-sim status [--json]\n"
    "       mgpu-sim fault CARD none|lost|unknown|timeout|hang\n"
    "       mgpu-sim reset\n";

static struct sim_snapshot now;

static void print_text(const char *text)
{
    putchar('"');
    for (; *text; text++)
        if (*text == '"' || *text == '\\')
            printf("\\%c", *text);
        else if ((unsigned char)*text < ' ')
            printf("\\u%04x", (unsigned int)*text);
        else
            putchar(*text);
    putchar('"');
}

static void print_card(unsigned int card)
{
    const struct sim_card_conf *it = &sim_conf()->card[card];

    printf("%s\n  {\"index\": %u, \"name\": ", card ? "," : "", card);
    print_text(it->name);
    printf(", \"uuid\": ");
    print_text(it->uuid);
    printf(", \"minor\": %u, \"total_bytes\": %llu, \"reserved_bytes\": %llu, "
           "\"used_bytes\": %llu, \"busy_ns\": %llu, \"fault\": \"%s\", \"processes\": [",
           it->minor, (unsigned long long)it->memory_bytes, (unsigned long long)it->reserved_bytes,
           (unsigned long long)now.used_bytes[card], (unsigned long long)now.busy_ns[card],
           sim_fault_names[sim_fault(card)]);
    for (unsigned int i = 0; i < now.uses[card]; i++) {
        const struct sim_use *use = &now.use[card][i];

        printf("%s\n    {\"pid\": %d, \"bytes\": %llu, \"contexts\": %u, \"busy_ns\": %llu}",
               i ? "," : "", use->pid, (unsigned long long)use->bytes, use->contexts,
               (unsigned long long)use->busy_ns);
    }
    printf("]}");
}

static void print_json(void)
{
    printf("{\"driver_version\": ");
    print_text(sim_conf()->driver_version);
    printf(", \"settled\": %s, \"cards\": [", now.settled ? "true" : "false");
    for (unsigned int card = 0; card < sim_conf()->cards; card++)
        print_card(card);
    printf("]}\n");
}

static void print_table(void)
{
    for (unsigned int card = 0; card < sim_conf()->cards; card++) {
        const struct sim_card_conf *it = &sim_conf()->card[card];

        printf("card %u  %s  %llu of %llu MiB in use, fault %s\n", card, it->name,
               (unsigned long long)now.used_bytes[card] >> 20,
               (unsigned long long)it->memory_bytes >> 20, sim_fault_names[sim_fault(card)]);
        for (unsigned int i = 0; i < now.uses[card]; i++)
            printf("    pid %-8d %8llu MiB  %u contexts\n", now.use[card][i].pid,
                   (unsigned long long)now.use[card][i].bytes >> 20, now.use[card][i].contexts);
    }
}

static int print_status(bool json)
{
    sim_take_snapshot(&now);
    if (json)
        print_json();
    else
        print_table();
    return 0;
}

static int set_fault(const char *card, const char *name)
{
    char *end;
    unsigned long number = strtoul(card, &end, 10);

    for (int fault = 0; fault < SIM_FAULTS; fault++)
        if (!*end && !strcmp(name, sim_fault_names[fault]) && number < SIM_CARDS &&
            !sim_set_fault((unsigned int)number, (enum sim_fault)fault))
            return 0;
    fprintf(stderr, "mgpu-sim: no card %s, or no fault %s\n%s", card, name, usage);
    return 2;
}

int main(int argc, char **argv)
{
    int result = sim_attach();

    if (result < 0) {
        fprintf(stderr, "mgpu-sim: cannot attach to the simulation: %s\n", strerror(-result));
        return 1;
    }
    if (argc == 2 && !strcmp(argv[1], "status"))
        return print_status(false);
    else if (argc == 3 && !strcmp(argv[1], "status") && !strcmp(argv[2], "--json"))
        return print_status(true);
    else if (argc == 4 && !strcmp(argv[1], "fault"))
        return set_fault(argv[2], argv[3]);
    else if (argc == 2 && !strcmp(argv[1], "reset"))
        sim_reset();
    else {
        fputs(usage, stderr);
        return 2;
    }
    return 0;
}
