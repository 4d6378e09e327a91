/* What the parts of the simulated NVML share. Not an interface to anybody else. */
#ifndef MGPU_NVML_SIM_H
#define MGPU_NVML_SIM_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS 1
#pragma GCC visibility push(default) /* of what nvml.h declares */
#include <nvml.h>
#pragma GCC visibility pop
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NO_MIG_INSTANCE 0xFFFFFFFFu
#define SAMPLE_PERIOD_US 166667u /* 1/6 s, the period of NVML's utilisation samples */

/* Fixed facts of a model of card; what changes comes from the simulation's state. */
struct model {
    const char *name_part;
    nvmlBrandType_t brand;
    nvmlDeviceArchitecture_t architecture;
    unsigned int pci_device_id; /* device in the upper 16 bits, vendor 10de in the lower */
    unsigned int cores;
    unsigned int bus_width_bits;
    unsigned int power_limit_mw;
    unsigned int sm_clock_mhz;
    unsigned int memory_clock_mhz;
};

/* A card that this process may see. The address of its entry is its NVML handle. */
struct nvmlDevice_st {
    unsigned int card;  /* its number in the simulation */
    unsigned int index; /* its number among those seen here */
    const struct model *model;
};

/* One process on one card. */
struct process {
    unsigned int pid;       /* in the PID namespace of the reader; 0 when it has none there */
    unsigned long long bytes;
};

/* Part of a sample period during which a process (or, with pid 0, anybody) ran on a card. */
struct sample {
    unsigned long long end_us; /* CLOCK_REALTIME at the end of the period */
    unsigned int pid;
    unsigned int percent;
};

/* nvml.c: the library and its handles. */
nvmlReturn_t unsupported(void);
nvmlReturn_t initialised(void);
unsigned int seen_count(void);
nvmlDevice_t seen(unsigned int index);
/* NVML is initialised and the handle is one of ours: enough for what a card is. */
nvmlReturn_t known(nvmlDevice_t device);
/* The card answers too, as its fault decides: needed for what a card does. */
nvmlReturn_t reachable(nvmlDevice_t device);
nvmlReturn_t put_text(char *to, unsigned int length, const char *from);

/* nvml_state.c: the simulation's state, in the words of this library. */
nvmlReturn_t open_state(void);
unsigned int card_count(void);
bool card_may_be_seen(unsigned int card);
const char *driver_version(void);
int cuda_version(void);
const char *card_name(unsigned int card);
const char *card_uuid(unsigned int card);
unsigned int card_minor(unsigned int card);
unsigned int card_pci_bus(unsigned int card);
void card_capability(unsigned int card, int *major, int *minor);
nvmlReturn_t card_fault(unsigned int card);
/* All in bytes; used is without reserved. */
void card_memory(unsigned int card, unsigned long long *total, unsigned long long *reserved,
                 unsigned long long *used);
/* The driver's own limits, of the cgroup with that folder. */
bool has_limits(void);
nvmlReturn_t set_limit(unsigned int card, const char *cgroup, unsigned long long soft,
                       unsigned long long hard);
nvmlReturn_t get_limit(unsigned int card, const char *cgroup, unsigned long long *soft,
                       unsigned long long *hard, unsigned long long *used);
/* Live processes with memory or a context on the card: how many; at most `room` are written. */
unsigned int card_processes(unsigned int card, struct process *to, unsigned int room);
/* Samples that ended after `since_us`, oldest first: of the card as a whole, or by process. */
unsigned int card_samples(unsigned int card, unsigned long long since_us, struct sample *to,
                          unsigned int room);
unsigned int process_samples(unsigned int card, unsigned long long since_us, struct sample *to,
                             unsigned int room);

/* A getter of one value: `check` is known() or reachable(), `expression` may use `device`. */
#define GETTER(name, check, type, expression)                \
    nvmlReturn_t name(nvmlDevice_t device, type *value)      \
    {                                                        \
        nvmlReturn_t result = check(device);                 \
                                                             \
        if (result != NVML_SUCCESS)                          \
            return result;                                   \
        if (!value)                                          \
            return NVML_ERROR_INVALID_ARGUMENT;              \
        *value = (expression);                               \
        return NVML_SUCCESS;                                 \
    }

/* A getter of a text. */
#define TEXT_GETTER(name, check, expression)                                    \
    nvmlReturn_t name(nvmlDevice_t device, char *text, unsigned int length)     \
    {                                                                           \
        nvmlReturn_t result = check(device);                                    \
                                                                                \
        return result == NVML_SUCCESS ? put_text(text, length, (expression)) : result; \
    }

#endif
