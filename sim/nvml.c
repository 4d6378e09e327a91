/* The simulated NVML: start, stop, errors, versions, and how a card is found. */
#include "nvml_sim.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define MAX_SEEN 64

static const struct model models[] = {
    {"H200", NVML_BRAND_NVIDIA, NVML_DEVICE_ARCH_HOPPER, 0x233510de, 16896, 6144, 700000, 1980, 3201},
    {"A10", NVML_BRAND_NVIDIA, NVML_DEVICE_ARCH_AMPERE, 0x223610de, 9216, 384, 150000, 1695, 6251},
    {"", NVML_BRAND_NVIDIA, NVML_DEVICE_ARCH_AMPERE, 0x20b010de, 6912, 5120, 300000, 1410, 1593},
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned int references;
static struct nvmlDevice_st cards[MAX_SEEN];
static unsigned int cards_seen;

static const struct model *model_of(const char *name)
{
    const struct model *model = models;

    while (!strstr(name, model->name_part))
        model++;
    return model;
}

/* As the real library, list only cards whose device node this process can open. */
static void look_for_cards(void)
{
    cards_seen = 0;
    for (unsigned int card = 0; card < card_count() && cards_seen < MAX_SEEN; card++) {
        if (!card_may_be_seen(card))
            continue;
        cards[cards_seen] = (struct nvmlDevice_st){card, cards_seen, model_of(card_name(card))};
        cards_seen++;
    }
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    nvmlReturn_t result = NVML_SUCCESS;

    if (flags & ~(unsigned int)(NVML_INIT_FLAG_NO_GPUS | NVML_INIT_FLAG_NO_ATTACH))
        return NVML_ERROR_INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    if (references == 0) {
        result = open_state();
        if (result == NVML_SUCCESS)
            look_for_cards();
    }
    if (result == NVML_SUCCESS)
        references++;
    pthread_mutex_unlock(&lock);
    return result;
}

nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

nvmlReturn_t nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

nvmlReturn_t nvmlShutdown(void)
{
    nvmlReturn_t result = NVML_ERROR_UNINITIALIZED;

    pthread_mutex_lock(&lock);
    if (references > 0) {
        references--;
        result = NVML_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

nvmlReturn_t initialised(void)
{
    pthread_mutex_lock(&lock);
    nvmlReturn_t result = references > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    pthread_mutex_unlock(&lock);
    return result;
}

nvmlReturn_t unsupported(void)
{
    nvmlReturn_t result = initialised();

    return result == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : result;
}

unsigned int seen_count(void)
{
    return cards_seen;
}

nvmlDevice_t seen(unsigned int index)
{
    return &cards[index];
}

nvmlReturn_t known(nvmlDevice_t device)
{
    nvmlReturn_t result = initialised();

    if (result != NVML_SUCCESS)
        return result;
    for (unsigned int i = 0; i < cards_seen; i++)
        if (device == &cards[i])
            return NVML_SUCCESS;
    return NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t reachable(nvmlDevice_t device)
{
    nvmlReturn_t result = known(device);

    return result == NVML_SUCCESS ? card_fault(device->card) : result;
}

nvmlReturn_t put_text(char *to, unsigned int length, const char *from)
{
    if (!to)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(from) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, from);
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    switch (result) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_ERROR_ALREADY_INITIALIZED: return "Already Initialized";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    case NVML_ERROR_INSUFFICIENT_POWER: return "Insufficient External Power";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT: return "Timeout";
    case NVML_ERROR_IRQ_ISSUE: return "Interrupt Request Issue";
    case NVML_ERROR_LIBRARY_NOT_FOUND: return "NVML Shared Library Not Found";
    case NVML_ERROR_FUNCTION_NOT_FOUND: return "Function Not Found";
    case NVML_ERROR_CORRUPTED_INFOROM: return "Corrupted infoROM";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    case NVML_ERROR_RESET_REQUIRED: return "GPU requires reset";
    case NVML_ERROR_OPERATING_SYSTEM: return "Operating System Error";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    case NVML_ERROR_IN_USE: return "In use by another client";
    case NVML_ERROR_MEMORY: return "Insufficient Memory";
    case NVML_ERROR_NO_DATA: return "No data";
    case NVML_ERROR_INSUFFICIENT_RESOURCES: return "Insufficient Resources";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    case NVML_ERROR_DEPRECATED: return "Deprecated";
    case NVML_ERROR_NOT_READY: return "System is not ready";
    case NVML_ERROR_GPU_NOT_FOUND: return "No GPUs were found";
    case NVML_ERROR_INVALID_STATE: return "Invalid State";
    default: return "Unknown Error";
    }
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    nvmlReturn_t result = initialised();

    return result == NVML_SUCCESS ? put_text(version, length, driver_version()) : result;
}

/* "13.580.95.05": the API's version, then the driver's. */
nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    char text[NVML_SYSTEM_NVML_VERSION_BUFFER_SIZE];
    nvmlReturn_t result = initialised();

    if (result != NVML_SUCCESS)
        return result;
    snprintf(text, sizeof text, "%s.%s", NVML_API_VERSION_STR, driver_version());
    return put_text(version, length, text);
}

nvmlReturn_t nvmlSystemGetDriverBranch(nvmlSystemDriverBranchInfo_t *info, unsigned int length)
{
    char branch[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE];
    nvmlReturn_t result = initialised();

    if (result != NVML_SUCCESS)
        return result;
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (info->version != nvmlSystemDriverBranchInfo_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    snprintf(branch, sizeof branch, "r%d_00", atoi(driver_version()));
    return put_text(info->branch, length < sizeof info->branch ? length : sizeof info->branch, branch);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    nvmlReturn_t result = initialised();

    if (result != NVML_SUCCESS)
        return result;
    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = cuda_version();
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
    char path[64];
    nvmlReturn_t result = initialised();

    if (result != NVML_SUCCESS)
        return result;
    if (!name || length == 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *cmdline = fopen(path, "re");
    if (!cmdline)
        return NVML_ERROR_NOT_FOUND;
    size_t got = fread(name, 1, length - 1, cmdline);
    fclose(cmdline);
    name[got] = '\0';
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlUnitGetCount(unsigned int *count)
{
    nvmlReturn_t result = initialised();

    if (result != NVML_SUCCESS)
        return result;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    nvmlReturn_t result = initialised();

    if (result != NVML_SUCCESS)
        return result;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = cards_seen;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *count)
{
    return nvmlDeviceGetCount_v2(count);
}

/* A lost card has no handle any more; one with another fault has, as on a real driver. */
static nvmlReturn_t hand_out(nvmlDevice_t found, nvmlDevice_t *device)
{
    if (!found)
        return NVML_ERROR_NOT_FOUND;
    if (card_fault(found->card) == NVML_ERROR_GPU_IS_LOST)
        return NVML_ERROR_GPU_IS_LOST;
    *device = found;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    nvmlReturn_t result = initialised();

    if (result != NVML_SUCCESS)
        return result;
    if (!device || index >= cards_seen)
        return NVML_ERROR_INVALID_ARGUMENT;
    return hand_out(seen(index), device);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

/* Find a card by a text that one of NVML's own getters writes of it. */
static nvmlReturn_t find(nvmlReturn_t (*get)(nvmlDevice_t, char *, unsigned int), const char *text,
                         nvmlDevice_t *device)
{
    char own[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    nvmlReturn_t result = initialised();

    if (result != NVML_SUCCESS)
        return result;
    if (!text || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned int i = 0; i < cards_seen; i++)
        if (get(seen(i), own, sizeof own) == NVML_SUCCESS && !strcasecmp(own, text))
            return hand_out(seen(i), device);
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    return find(nvmlDeviceGetUUID, uuid, device);
}

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    return find(nvmlDeviceGetSerial, serial, device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device)
{
    char text[NVML_DEVICE_UUID_V2_BUFFER_SIZE] = "GPU-";
    char *end = text + strlen(text);

    if (!uuid)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (uuid->version != nvmlUUID_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (uuid->type == NVML_UUID_TYPE_ASCII)
        return nvmlDeviceGetHandleByUUID(uuid->value.str, device);
    if (uuid->type != NVML_UUID_TYPE_BINARY)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < NVML_DEVICE_UUID_BINARY_LEN; i++) {
        bool dash = i == 4 || i == 6 || i == 8 || i == 10;
        end += sprintf(end, dash ? "-%02x" : "%02x", uuid->value.bytes[i]);
    }
    return nvmlDeviceGetHandleByUUID(text, device);
}

static nvmlReturn_t get_bus_id(nvmlDevice_t device, char *to, unsigned int length)
{
    nvmlPciInfo_t pci;
    nvmlReturn_t result = nvmlDeviceGetPciInfo_v3(device, &pci);

    return result == NVML_SUCCESS ? put_text(to, length, pci.busId) : result;
}

static nvmlReturn_t get_legacy_bus_id(nvmlDevice_t device, char *to, unsigned int length)
{
    nvmlPciInfo_t pci;
    nvmlReturn_t result = nvmlDeviceGetPciInfo_v3(device, &pci);

    return result == NVML_SUCCESS ? put_text(to, length, pci.busIdLegacy) : result;
}

/* Both spellings of the domain, with 4 and with 8 digits, are taken. */
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    nvmlReturn_t result = find(get_bus_id, bus_id, device);

    return result == NVML_ERROR_NOT_FOUND ? find(get_legacy_bus_id, bus_id, device) : result;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}
