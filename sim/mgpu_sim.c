/* mgpu-sim: look at the simulated cards, and put faults into them. */
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_USES SIM_SLOTS

static const char usage[] =
    "usage: mgpu-sim status [--json]\n"
    "       mgpu-sim fault CARD none|lost|unknown|timeout|hang\n"
    "       mgpu-sim reset\n";

static void print_json(void)
{
    static struct sim_use uses[MAX_USES];
    const struct sim_conf *conf = sim_conf();

    printf("{\"driver_version\": \"%s\", \"cards\": [", conf->driver_version);
    for (unsigned int card = 0; card < conf->cards; card++) {
        const struct sim_card_conf *it = &conf->card[card];
        unsigned int count = sim_uses(card, uses, MAX_USES);

        printf("%s\n  {\"index\": %u, \"name\": \"%s\", \"uuid\": \"%s\", \"minor\": %u, "
               "\"total_bytes\": %llu, \"reserved_bytes\": %llu, \"used_bytes\": %llu, "
               "\"fault\": \"%s\", \"processes\": [",
               card ? "," : "", card, it->name, it->uuid, it->minor,
               (unsigned long long)it->memory_bytes, (unsigned long long)it->reserved_bytes,
               (unsigned long long)sim_used(card), sim_fault_names[sim_fault(card)]);
        for (unsigned int i = 0; i < count; i++)
            printf("%s\n    {\"pid\": %d, \"bytes\": %llu, \"contexts\": %u}", i ? "," : "",
                   uses[i].pid, (unsigned long long)uses[i].bytes, uses[i].contexts);
        printf("]}");
    }
    printf("]}\n");
}

static void print_table(void)
{
    static struct sim_use uses[MAX_USES];
    const struct sim_conf *conf = sim_conf();

    for (unsigned int card = 0; card < conf->cards; card++) {
        const struct sim_card_conf *it = &conf->card[card];
        unsigned int count = sim_uses(card, uses, MAX_USES);

        printf("card %u  %s  %llu of %llu MiB in use, fault %s\n", card, it->name,
               (unsigned long long)sim_used(card) >> 20, (unsigned long long)it->memory_bytes >> 20,
               sim_fault_names[sim_fault(card)]);
        for (unsigned int i = 0; i < count; i++)
            printf("    pid %-8d %8llu MiB  %u contexts\n", uses[i].pid,
                   (unsigned long long)uses[i].bytes >> 20, uses[i].contexts);
    }
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
        print_table();
    else if (argc == 3 && !strcmp(argv[1], "status") && !strcmp(argv[2], "--json"))
        print_json();
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
