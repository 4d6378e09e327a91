/* The simulated NVML: event sets. A card that becomes faulty raises an Xid, as a real one does. */
#include "nvml_sim.h"

#include <stdlib.h>
#include <time.h>

#define SUPPORTED_EVENTS ((unsigned long long)nvmlEventTypeXidCriticalError)
#define XID_FALLEN_OFF_THE_BUS 79u
#define XID_UNKNOWN 999u
#define LOOK_EVERY_MS 20u
#define MAX_WATCHED 64

struct nvmlEventSet_st {
    unsigned int count;
    struct {
        nvmlDevice_t device;
        nvmlReturn_t fault; /* as of the last look */
    } watched[MAX_WATCHED];
};

GETTER(nvmlDeviceGetSupportedEventTypes, known, unsigned long long, SUPPORTED_EVENTS)

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    nvmlReturn_t result = initialised();

    if (result != NVML_SUCCESS)
        return result;
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    *set = calloc(1, sizeof **set);
    return *set ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    nvmlReturn_t result = initialised();

    if (result == NVML_SUCCESS)
        free(set);
    return result;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types,
                                      nvmlEventSet_t set)
{
    nvmlReturn_t result = known(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!set || types == 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (types & ~SUPPORTED_EVENTS)
        return NVML_ERROR_NOT_SUPPORTED;
    if (set->count == MAX_WATCHED)
        return NVML_ERROR_INSUFFICIENT_RESOURCES;
    set->watched[set->count].device = device;
    set->watched[set->count].fault = card_fault(device->card);
    set->count++;
    return NVML_SUCCESS;
}

/* The first card in the set whose fault is another than at the last look, and not none. */
static bool look(nvmlEventSet_t set, nvmlEventData_t *data)
{
    for (unsigned int i = 0; i < set->count; i++) {
        nvmlReturn_t fault = card_fault(set->watched[i].device->card);

        if (fault == set->watched[i].fault)
            continue;
        set->watched[i].fault = fault;
        if (fault == NVML_SUCCESS)
            continue;
        *data = (nvmlEventData_t){
            .device = set->watched[i].device,
            .eventType = nvmlEventTypeXidCriticalError,
            .eventData = fault == NVML_ERROR_GPU_IS_LOST ? XID_FALLEN_OFF_THE_BUS : XID_UNKNOWN,
            .gpuInstanceId = NO_MIG_INSTANCE,
            .computeInstanceId = NO_MIG_INSTANCE,
        };
        return true;
    }
    return false;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    nvmlReturn_t result = initialised();

    if (result != NVML_SUCCESS)
        return result;
    if (!set || !data)
        return NVML_ERROR_INVALID_ARGUMENT;
    while (!look(set, data)) {
        unsigned int step = timeout_ms < LOOK_EVERY_MS ? timeout_ms : LOOK_EVERY_MS;

        if (timeout_ms == 0)
            return NVML_ERROR_TIMEOUT;
        nanosleep(&(struct timespec){.tv_nsec = step * 1000000L}, NULL);
        timeout_ms -= step;
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    return nvmlEventSetWait_v2(set, data, timeout_ms);
}
