/* sim.conf: what cards there are. */
#include "conf.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB (1ull << 20)
#define MOST_MIB (1ull << 24) /* 16 TiB */
#define MOST_MINOR 254
#define DEFAULT_DIR "/run/mgpu-sim"

const char *sim_dir(void)
{
    const char *dir = getenv("MGPU_SIM_DIR");

    return dir && *dir ? dir : DEFAULT_DIR;
}

static void set_text(char *to, size_t size, const char *from)
{
    snprintf(to, size, "%s", from);
}

static void default_card(struct sim_card_conf *card, unsigned int number)
{
    bool a10 = number == 1;

    set_text(card->name, sizeof card->name, a10 ? "NVIDIA A10 (simulated)" : "NVIDIA H200 (simulated)");
    snprintf(card->uuid, sizeof card->uuid, "GPU-51300000-0000-4000-8000-%012x", number);
    card->memory_bytes = (a10 ? 23028 : 143771) * MIB;
    card->reserved_bytes = 0;
    card->minor = number;
    card->pci_bus = 0x10 + number;
    card->capability_major = a10 ? 8 : 9;
    card->capability_minor = a10 ? 6 : 0;
}

/* A whole number from `text`, up to `most`. */
static bool read_number(const char *text, uint64_t most, uint64_t *number)
{
    char *end;

    errno = 0;
    *number = strtoull(text, &end, 10);
    return isdigit((unsigned char)*text) && !*end && !errno && *number <= most;
}

static int set_bytes(uint64_t *bytes, const char *mib)
{
    if (!read_number(mib, MOST_MIB, bytes))
        return -EINVAL;
    *bytes *= MIB;
    return 0;
}

/* As "13.0" or "13". */
static int set_cuda_version(int *version, const char *text)
{
    unsigned int major, minor = 0;
    int used = 0;

    if (sscanf(text, "%2u%n.%1u%n", &major, &used, &minor, &used) < 1 || text[used])
        return -EINVAL;
    *version = (int)(major * 1000 + minor * 10);
    return 0;
}

static int set_choice(bool *choice, const char *value)
{
    *choice = !strcmp(value, "yes");
    return *choice || !strcmp(value, "no") ? 0 : -EINVAL;
}

static int set_sim(struct sim_conf *conf, const char *key, const char *value)
{
    if (!strcmp(key, "driver_version"))
        set_text(conf->driver_version, sizeof conf->driver_version, value);
    else if (!strcmp(key, "cuda_version"))
        return set_cuda_version(&conf->cuda_version, value);
    else if (!strcmp(key, "context_mib"))
        return set_bytes(&conf->context_bytes, value);
    else if (!strcmp(key, "dev_root"))
        set_text(conf->dev_root, sizeof conf->dev_root, value);
    else if (!strcmp(key, "preempt"))
        return set_choice(&conf->preempt, value);
    else
        return -EINVAL;
    return 0;
}

static int set_card(struct sim_card_conf *card, const char *key, const char *value)
{
    uint64_t minor;

    if (!strcmp(key, "name"))
        set_text(card->name, sizeof card->name, value);
    else if (!strcmp(key, "uuid"))
        set_text(card->uuid, sizeof card->uuid, value);
    else if (!strcmp(key, "memory_mib"))
        return set_bytes(&card->memory_bytes, value);
    else if (!strcmp(key, "reserved_mib"))
        return set_bytes(&card->reserved_bytes, value);
    else if (!strcmp(key, "minor") && read_number(value, MOST_MINOR, &minor))
        card->minor = (unsigned int)minor;
    else
        return -EINVAL;
    return 0;
}

static char *strip(char *text)
{
    while (isspace((unsigned char)*text))
        text++;
    for (char *end = text + strlen(text); end > text && isspace((unsigned char)end[-1]);)
        *--end = '\0';
    return text;
}

/* One line; `section` is -1 for [sim], the card's number for [cardN]. */
static int read_line(struct sim_conf *conf, int *section, char *line)
{
    unsigned int number;
    int used = 0;
    char *value;

    line = strip(line);
    if (!*line || *line == '#' || *line == ';')
        return 0;
    if (!strcmp(line, "[sim]")) {
        *section = -1;
        return 0;
    }
    if (sscanf(line, "[card%u]%n", &number, &used) == 1 && used && !line[used]) {
        if (number >= SIM_CARDS || number > conf->cards)
            return -EINVAL;
        if (number == conf->cards)
            default_card(&conf->card[conf->cards++], number);
        *section = (int)number;
        return 0;
    }
    value = strchr(line, '=');
    if (!value)
        return -EINVAL;
    *value++ = '\0';
    if (*section < 0)
        return set_sim(conf, strip(line), strip(value));
    return set_card(&conf->card[*section], strip(line), strip(value));
}

/* Whatever a card is called, it says that it is simulated. */
static void mark_simulated(struct sim_card_conf *card)
{
    size_t room = sizeof card->name - sizeof " (simulated)";

    if (strstr(card->name, "(simulated)"))
        return;
    if (strlen(card->name) > room)
        card->name[room] = '\0';
    strcat(card->name, " (simulated)");
}

int sim_read_conf(struct sim_conf *conf)
{
    char path[4096], line[512];
    int section = -1, result = 0;

    memset(conf, 0, sizeof *conf);
    set_text(conf->driver_version, sizeof conf->driver_version, "580.95.05");
    conf->cuda_version = 13000;
    conf->context_bytes = 256 * MIB;
    set_text(conf->dev_root, sizeof conf->dev_root, "/dev");
    snprintf(path, sizeof path, "%s/sim.conf", sim_dir());
    FILE *file = fopen(path, "re");
    if (!file && errno != ENOENT)
        return -errno;
    for (int number = 1; file && !result && fgets(line, sizeof line, file); number++) {
        result = read_line(conf, &section, line);
        if (result)
            fprintf(stderr, "mgpu-sim: %s line %d: not a section, key or value known here\n", path, number);
    }
    if (file)
        fclose(file);
    if (conf->cards == 0)
        for (; conf->cards < 2; conf->cards++)
            default_card(&conf->card[conf->cards], conf->cards);
    for (unsigned int card = 0; card < conf->cards; card++) {
        mark_simulated(&conf->card[card]);
        if (!result && conf->card[card].reserved_bytes > conf->card[card].memory_bytes) {
            fprintf(stderr, "mgpu-sim: %s: card %u has less memory than it reserves\n", path, card);
            result = -EINVAL;
        }
    }
    return result;
}
