/* The simulated NVML: which processes hold or use a card.
 *
 * Every simulated process is a compute process. Lists are sized by negotiation: too small an array
 * gives NVML_ERROR_INSUFFICIENT_SIZE and the number needed. */
#include "nvml_sim.h"

#include <stdlib.h>

#define MAX_PROCESSES 4096
#define MAX_SAMPLES 16384

/* All processes of the card in `*list` (to be freed), or an error. */
static nvmlReturn_t list_processes(nvmlDevice_t device, struct process **list, unsigned int *count)
{
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    *list = calloc(MAX_PROCESSES, sizeof **list);
    if (!*list)
        return NVML_ERROR_MEMORY;
    *count = card_processes(device->card, *list, MAX_PROCESSES);
    return NVML_SUCCESS;
}

/* Whether `count` entries fit into the caller's array; `*room` becomes the number needed. */
static nvmlReturn_t negotiate(unsigned int count, unsigned int *room, const void *array)
{
    unsigned int given = *room;

    *room = count;
    if (count == 0)
        return NVML_SUCCESS;
    return given < count || !array ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#define RUNNING_PROCESSES(name, type, ...)                                                \
    nvmlReturn_t name(nvmlDevice_t device, unsigned int *room, type *infos)               \
    {                                                                                     \
        struct process *list;                                                             \
        unsigned int count;                                                               \
                                                                                          \
        if (!room)                                                                        \
            return NVML_ERROR_INVALID_ARGUMENT;                                           \
        nvmlReturn_t result = list_processes(device, &list, &count);                      \
        if (result != NVML_SUCCESS)                                                       \
            return result;                                                                \
        result = negotiate(count, room, infos);                                           \
        for (unsigned int i = 0; result == NVML_SUCCESS && i < count; i++)                \
            infos[i] = (type){.pid = list[i].pid, .usedGpuMemory = list[i].bytes, __VA_ARGS__}; \
        free(list);                                                                       \
        return result;                                                                    \
    }

#define NO_MIG .gpuInstanceId = NO_MIG_INSTANCE, .computeInstanceId = NO_MIG_INSTANCE

RUNNING_PROCESSES(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, )
RUNNING_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, NO_MIG)
RUNNING_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, NO_MIG)

#define NO_PROCESSES(name, type)                                              \
    nvmlReturn_t name(nvmlDevice_t device, unsigned int *room, type *infos)   \
    {                                                                         \
        nvmlReturn_t result = reachable(device);                              \
                                                                              \
        if (result != NVML_SUCCESS)                                           \
            return result;                                                    \
        return room ? negotiate(0, room, infos) : NVML_ERROR_INVALID_ARGUMENT; \
    }

NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)

nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device,
                                                   nvmlProcessDetailList_t *details)
{
    struct process *list;
    unsigned int count;

    if (!details || details->mode >= NVML_PROCESS_MODE_MAX)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (details->version != nvmlProcessDetailList_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    nvmlReturn_t result = list_processes(device, &list, &count);
    if (result != NVML_SUCCESS)
        return result;
    if (details->mode != NVML_PROCESS_MODE_COMPUTE && details->mode != NVML_PROCESS_MODE_ALL)
        count = 0;
    result = negotiate(count, &details->numProcArrayEntries, details->procArray);
    for (unsigned int i = 0; result == NVML_SUCCESS && i < count; i++)
        details->procArray[i] = (nvmlProcessDetail_v1_t){
            .pid = list[i].pid, .usedGpuMemory = list[i].bytes, NO_MIG};
    free(list);
    return result;
}

/* Samples by process since `since_us` in `*list` (to be freed). */
static nvmlReturn_t list_samples(nvmlDevice_t device, unsigned long long since_us,
                                 struct sample **list, unsigned int *count)
{
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    *list = calloc(MAX_SAMPLES, sizeof **list);
    if (!*list)
        return NVML_ERROR_MEMORY;
    *count = process_samples(device->card, since_us, *list, MAX_SAMPLES);
    if (*count == 0) {
        free(*list);
        return NVML_ERROR_NOT_FOUND;
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device,
                                             nvmlProcessUtilizationSample_t *to,
                                             unsigned int *room, unsigned long long since_us)
{
    struct sample *list;
    unsigned int count;

    if (!room)
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = list_samples(device, since_us, &list, &count);
    if (result != NVML_SUCCESS)
        return result;
    result = negotiate(count, room, to);
    for (unsigned int i = 0; result == NVML_SUCCESS && i < count; i++)
        to[i] = (nvmlProcessUtilizationSample_t){
            .pid = list[i].pid, .timeStamp = list[i].end_us, .smUtil = list[i].percent};
    free(list);
    return result;
}

nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device,
                                                   nvmlProcessesUtilizationInfo_t *info)
{
    struct sample *list;
    unsigned int count;

    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (info->version != nvmlProcessesUtilizationInfo_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    nvmlReturn_t result = list_samples(device, info->lastSeenTimeStamp, &list, &count);
    if (result != NVML_SUCCESS)
        return result;
    result = negotiate(count, &info->processSamplesCount, info->procUtilArray);
    for (unsigned int i = 0; result == NVML_SUCCESS && i < count; i++)
        info->procUtilArray[i] = (nvmlProcessUtilizationInfo_v1_t){
            .timeStamp = list[i].end_us, .pid = list[i].pid, .smUtil = list[i].percent};
    free(list);
    return result;
}
