/* The simulated NVML: what a card does. Load comes from the simulation's own timeline; what has
 * no counterpart there (clocks, power, temperature) follows from the load. */
#include "nvml_sim.h"

#include <string.h>
#include <time.h>
#include <unistd.h>

#define BAR1_BYTES (256ull << 20)
#define IDLE_CELSIUS 30u
#define CELSIUS_PER_PERCENT_LOAD 2u / 5u
#define SLOWDOWN_CELSIUS 87u
#define IDLE_CLOCK_MHZ 345u
#define MAX_SAMPLES 4096

static unsigned long long now_us(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (unsigned long long)now.tv_sec * 1000000u + (unsigned long long)now.tv_nsec / 1000u;
}

/* Percent of the last whole sample period in which a kernel ran. */
static unsigned int load(nvmlDevice_t device)
{
    struct sample last[3];
    unsigned int got = card_samples(device->card, now_us() - 2 * SAMPLE_PERIOD_US, last, 3);

    return got ? last[got - 1].percent : 0;
}

/* Percent of the card's memory that is allocated. */
static unsigned int fill(nvmlDevice_t device)
{
    unsigned long long total, reserved, used;

    card_memory(device->card, &total, &reserved, &used);
    return (unsigned int)(used * 100 / total);
}

static unsigned int power_mw(nvmlDevice_t device)
{
    unsigned int limit = device->model->power_limit_mw;

    return limit / 10 + limit / 100 * 9 / 10 * load(device);
}

static unsigned int celsius(nvmlDevice_t device)
{
    return IDLE_CELSIUS + load(device) * CELSIUS_PER_PERCENT_LOAD;
}

static unsigned int clock_mhz(nvmlDevice_t device, nvmlClockType_t type)
{
    if (type == NVML_CLOCK_MEM)
        return device->model->memory_clock_mhz;
    return load(device) ? device->model->sm_clock_mhz : IDLE_CLOCK_MHZ;
}

static unsigned int max_clock_mhz(nvmlDevice_t device, nvmlClockType_t type)
{
    return type == NVML_CLOCK_MEM ? device->model->memory_clock_mhz : device->model->sm_clock_mhz;
}

GETTER(nvmlDeviceGetPowerUsage, reachable, unsigned int, power_mw(device))
GETTER(nvmlDeviceGetEnforcedPowerLimit, reachable, unsigned int, device->model->power_limit_mw)
GETTER(nvmlDeviceGetPowerManagementLimit, reachable, unsigned int, device->model->power_limit_mw)
GETTER(nvmlDeviceGetPowerManagementDefaultLimit, reachable, unsigned int,
       device->model->power_limit_mw)
GETTER(nvmlDeviceGetPowerManagementMode, reachable, nvmlEnableState_t, NVML_FEATURE_ENABLED)
GETTER(nvmlDeviceGetPerformanceState, reachable, nvmlPstates_t, NVML_PSTATE_0)
GETTER(nvmlDeviceGetPowerState, reachable, nvmlPstates_t, NVML_PSTATE_0)
GETTER(nvmlDeviceGetCurrentClocksEventReasons, reachable, unsigned long long,
       load(device) ? nvmlClocksEventReasonNone : nvmlClocksEventReasonGpuIdle)
GETTER(nvmlDeviceGetCurrentClocksThrottleReasons, reachable, unsigned long long,
       load(device) ? nvmlClocksEventReasonNone : nvmlClocksEventReasonGpuIdle)
GETTER(nvmlDeviceGetSupportedClocksEventReasons, reachable, unsigned long long,
       nvmlClocksEventReasonGpuIdle)
GETTER(nvmlDeviceGetPcieReplayCounter, reachable, unsigned int, 0)
GETTER(nvmlDeviceGetRetiredPagesPendingStatus, reachable, nvmlEnableState_t, NVML_FEATURE_DISABLED)

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (memory->version != nvmlMemory_v2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    card_memory(device->card, &memory->total, &memory->reserved, &memory->used);
    memory->free = memory->total - memory->reserved - memory->used;
    return NVML_SUCCESS;
}

/* The first form has no word for what the driver reserves: it counts as used. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    unsigned long long reserved;
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    card_memory(device->card, &memory->total, &reserved, &memory->used);
    memory->used += reserved;
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, nvmlSetMemoryLimits_v1_t *limits)
{
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!has_limits())
        return NVML_ERROR_NOT_SUPPORTED;
    if (!limits || !limits->nameSpace)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (geteuid() != 0)
        return NVML_ERROR_NO_PERMISSION;
    return set_limit(device->card, limits->nameSpace, limits->softLimit, limits->hardLimit);
}

nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, nvmlGetMemoryLimits_v1_t *limits)
{
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!has_limits())
        return NVML_ERROR_NOT_SUPPORTED;
    if (!limits || !limits->nameSpace)
        return NVML_ERROR_INVALID_ARGUMENT;
    return get_limit(device->card, limits->nameSpace, &limits->softLimit, &limits->hardLimit,
                     &limits->currentUsed);
}

nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *bar1)
{
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!bar1)
        return NVML_ERROR_INVALID_ARGUMENT;
    *bar1 = (nvmlBAR1Memory_t){.bar1Total = BAR1_BYTES, .bar1Free = BAR1_BYTES, .bar1Used = 0};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!utilization)
        return NVML_ERROR_INVALID_ARGUMENT;
    utilization->gpu = load(device);
    utilization->memory = utilization->gpu ? fill(device) : 0;
    return NVML_SUCCESS;
}

/* The simulated card has encoders and decoders, and nothing to do for them. */
static nvmlReturn_t idle_engine(nvmlDevice_t device, unsigned int *percent, unsigned int *period_us)
{
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!percent || !period_us)
        return NVML_ERROR_INVALID_ARGUMENT;
    *percent = 0;
    *period_us = SAMPLE_PERIOD_US;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned int *percent,
                                             unsigned int *period_us)
{
    return idle_engine(device, percent, period_us);
}

nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned int *percent,
                                             unsigned int *period_us)
{
    return idle_engine(device, percent, period_us);
}

nvmlReturn_t nvmlDeviceGetJpgUtilization(nvmlDevice_t device, unsigned int *percent,
                                         unsigned int *period_us)
{
    return idle_engine(device, percent, period_us);
}

nvmlReturn_t nvmlDeviceGetOfaUtilization(nvmlDevice_t device, unsigned int *percent,
                                         unsigned int *period_us)
{
    return idle_engine(device, percent, period_us);
}

static nvmlReturn_t get_clock(unsigned int (*read)(nvmlDevice_t, nvmlClockType_t),
                              nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!mhz || type >= NVML_CLOCK_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    *mhz = read(device, type);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
    return get_clock(clock_mhz, device, type, mhz);
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
    return get_clock(max_clock_mhz, device, type, mhz);
}

nvmlReturn_t nvmlDeviceGetMaxCustomerBoostClock(nvmlDevice_t device, nvmlClockType_t type,
                                                unsigned int *mhz)
{
    return get_clock(max_clock_mhz, device, type, mhz);
}

nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, nvmlClockType_t type,
                                            unsigned int *mhz)
{
    return get_clock(max_clock_mhz, device, type, mhz);
}

nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(nvmlDevice_t device, nvmlClockType_t type,
                                                   unsigned int *mhz)
{
    return get_clock(max_clock_mhz, device, type, mhz);
}

nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, nvmlClockType_t type, nvmlClockId_t id,
                                unsigned int *mhz)
{
    if (id >= NVML_CLOCK_ID_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    return get_clock(id == NVML_CLOCK_ID_CURRENT ? clock_mhz : max_clock_mhz, device, type, mhz);
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!temperature || temperature->sensorType != NVML_TEMPERATURE_GPU)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (temperature->version != nvmlTemperature_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    temperature->temperature = (int)celsius(device);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor,
                                      unsigned int *temperature)
{
    nvmlTemperature_t now = {.version = nvmlTemperature_v1, .sensorType = sensor};
    nvmlReturn_t result = nvmlDeviceGetTemperatureV(device, &now);

    if (result != NVML_SUCCESS)
        return result;
    if (!temperature)
        return NVML_ERROR_INVALID_ARGUMENT;
    *temperature = (unsigned int)now.temperature;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device,
                                               nvmlTemperatureThresholds_t threshold,
                                               unsigned int *temperature)
{
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!temperature || threshold >= NVML_TEMPERATURE_THRESHOLD_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (threshold > NVML_TEMPERATURE_THRESHOLD_GPU_MAX)
        return NVML_ERROR_NOT_SUPPORTED;
    *temperature = SLOWDOWN_CELSIUS + (threshold == NVML_TEMPERATURE_THRESHOLD_SHUTDOWN ? 5 : 0);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned int *min,
                                                          unsigned int *max)
{
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!min || !max)
        return NVML_ERROR_INVALID_ARGUMENT;
    *min = device->model->power_limit_mw / 4;
    *max = device->model->power_limit_mw;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter,
                                         unsigned int *kib_per_s)
{
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!kib_per_s || counter >= NVML_PCIE_UTIL_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    *kib_per_s = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                         nvmlEccCounterType_t counter, unsigned long long *errors)
{
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!errors || type >= NVML_MEMORY_ERROR_TYPE_COUNT || counter >= NVML_ECC_COUNTER_TYPE_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    *errors = 0;
    return NVML_SUCCESS;
}

/* Samples of the whole card: load or power. Those that fit; the count tells how many. */
nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, nvmlSamplingType_t type,
                                  unsigned long long since_us, nvmlValueType_t *value_type,
                                  unsigned int *count, nvmlSample_t *samples)
{
    static _Thread_local struct sample own[MAX_SAMPLES];
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!count || !value_type || (samples && *count == 0))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (type != NVML_GPU_UTILIZATION_SAMPLES && type != NVML_TOTAL_POWER_SAMPLES)
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned int got = card_samples(device->card, since_us, own, MAX_SAMPLES);
    if (!got)
        return NVML_ERROR_NOT_FOUND;
    *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
    if (samples) {
        got = got < *count ? got : *count;
        for (unsigned int i = 0; i < got; i++) {
            memset(&samples[i], 0, sizeof samples[i]);
            samples[i].timeStamp = own[i].end_us;
            samples[i].sampleValue.uiVal =
                type == NVML_GPU_UTILIZATION_SAMPLES ? own[i].percent : power_mw(device);
        }
    }
    *count = got;
    return NVML_SUCCESS;
}

static nvmlReturn_t field(nvmlDevice_t device, nvmlFieldValue_t *value)
{
    value->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    switch (value->fieldId) {
    case NVML_FI_DEV_ECC_CURRENT:
    case NVML_FI_DEV_ECC_PENDING:
        value->value.uiVal = NVML_FEATURE_ENABLED;
        return NVML_SUCCESS;
    case NVML_FI_DEV_NVLINK_LINK_COUNT:
        value->value.uiVal = 0;
        return NVML_SUCCESS;
    case NVML_FI_DEV_POWER_AVERAGE:
    case NVML_FI_DEV_POWER_INSTANT:
        value->value.uiVal = power_mw(device);
        return NVML_SUCCESS;
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    nvmlReturn_t result = reachable(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!values || count <= 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < count; i++) {
        values[i].timestamp = (long long)now_us();
        values[i].latencyUsec = 0;
        memset(&values[i].value, 0, sizeof values[i].value);
        values[i].nvmlReturn = field(device, &values[i]);
    }
    return NVML_SUCCESS;
}
