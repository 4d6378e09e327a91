/* The simulated libcuda: start, and the devices. */
#include "cuda_sim.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic CUresult state = CUDA_ERROR_NOT_INITIALIZED;
static bool forked;
static struct device devices[SIM_CARDS];
static int device_count;

CUresult from_errno(int result)
{
    switch (-result) {
    case 0: return CUDA_SUCCESS;
    case ENOMEM: return CUDA_ERROR_OUT_OF_MEMORY;
    case EACCES:
    case EPERM: return CUDA_ERROR_NOT_PERMITTED;
    case ENOENT: return CUDA_ERROR_INVALID_HANDLE;
    default: return CUDA_ERROR_OPERATING_SYSTEM;
    }
}

CUresult ready(void)
{
    return state;
}

/* As with the real driver, a child of a process that uses CUDA cannot use it. */
static void in_child(void)
{
    pthread_mutex_init(&init_lock, NULL);
    forked = state == CUDA_SUCCESS;
    state = CUDA_ERROR_NOT_INITIALIZED;
}

/* The control node: where there is one, it must let this process in. */
static bool control_open(void)
{
    static int control = -1;
    char path[4096];

    if (control >= 0)
        return true;
    snprintf(path, sizeof path, "%s/nvidiactl", sim_conf()->dev_root);
    control = open(path, O_RDWR | O_CLOEXEC);
    return control >= 0 || errno == ENOENT || errno == ENXIO;
}

static void add_device(unsigned int card)
{
    for (int i = 0; i < device_count; i++)
        if (devices[i].card == card)
            return;
    devices[device_count++].card = card;
}

/* One word of CUDA_VISIBLE_DEVICES: an index or the beginning of a UUID. */
static bool add_named(const char *word, const unsigned int *open_cards, unsigned int count)
{
    char *end;
    unsigned long index = strtoul(word, &end, 10);

    if (end != word && !*end) {
        if (index < count)
            add_device(open_cards[index]);
        return index < count;
    }
    for (unsigned int i = 0; i < count; i++)
        if (*word && !strncasecmp(sim_conf()->card[open_cards[i]].uuid, word, strlen(word))) {
            add_device(open_cards[i]);
            return true;
        }
    return false;
}

/* The cards whose node lets this process in (their descriptors stay open, as with a real driver),
 * chosen and ordered by CUDA_VISIBLE_DEVICES: a word that names none ends the list. */
static void look_for_devices(void)
{
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    unsigned int open_cards[SIM_CARDS], count = 0;
    char words[4096], *rest = words, *word;

    device_count = 0;
    if (!control_open())
        return;
    for (unsigned int card = 0; card < sim_conf()->cards; card++) {
        int node = sim_open_node(card);

        if (node >= 0 || node == -ENXIO)
            open_cards[count++] = card;
    }
    if (!wanted) {
        for (unsigned int i = 0; i < count; i++)
            add_device(open_cards[i]);
        return;
    }
    snprintf(words, sizeof words, "%s", wanted);
    while ((word = strsep(&rest, ",")) && add_named(word, open_cards, count))
        ;
}

static CUresult start(void)
{
    static bool once;

    if (forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (state == CUDA_SUCCESS)
        return CUDA_SUCCESS;
    TRY(from_errno(sim_attach()));
    if (!once)
        pthread_atfork(NULL, NULL, in_child);
    once = true;
    look_for_devices();
    if (!device_count)
        return CUDA_ERROR_NO_DEVICE;
    state = CUDA_SUCCESS;
    return CUDA_SUCCESS;
}

CUresult impl_cuInit(unsigned int flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&init_lock);
    CUresult result = start();
    pthread_mutex_unlock(&init_lock);
    return result;
}

CUresult impl_cuDriverGetVersion(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(from_errno(sim_attach()));
    *version = sim_conf()->cuda_version;
    return CUDA_SUCCESS;
}

struct device *device_at(CUdevice ordinal)
{
    return &devices[ordinal];
}

CUdevice device_with_card(unsigned int card)
{
    for (int i = 0; i < device_count; i++)
        if (devices[i].card == card)
            return i;
    return -1;
}

CUresult device_of(CUdevice ordinal, struct device **device)
{
    TRY(ready());
    if (ordinal < 0 || ordinal >= device_count)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = &devices[ordinal];
    return CUDA_SUCCESS;
}

static CUresult conf_of(CUdevice ordinal, const void *target, const struct sim_card_conf **conf)
{
    struct device *device;

    TRY(device_of(ordinal, &device));
    if (!target)
        return CUDA_ERROR_INVALID_VALUE;
    *conf = &sim_conf()->card[device->card];
    return CUDA_SUCCESS;
}

CUresult impl_cuDeviceGetCount(int *count)
{
    TRY(ready());
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = device_count;
    return CUDA_SUCCESS;
}

CUresult impl_cuDeviceGet(CUdevice *device, int ordinal)
{
    TRY(ready());
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    if (ordinal < 0 || ordinal >= device_count)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult impl_cuDeviceGetName(char *name, int length, CUdevice device)
{
    const struct sim_card_conf *conf;

    TRY(conf_of(device, name, &conf));
    if (length <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(name, (size_t)length, "%s", conf->name);
    return CUDA_SUCCESS;
}

CUresult impl_cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    const struct sim_card_conf *conf;

    TRY(conf_of(device, bytes, &conf));
    *bytes = conf->memory_bytes - conf->reserved_bytes;
    return CUDA_SUCCESS;
}

CUresult impl_cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    const struct sim_card_conf *conf;
    unsigned int byte;
    int filled = 0;

    TRY(conf_of(device, uuid, &conf));
    memset(uuid, 0, sizeof *uuid);
    for (const char *at = conf->uuid + 4; filled < 16 && *at; at++) {
        if (*at == '-')
            continue;
        if (sscanf(at, "%2x", &byte) != 1)
            break;
        uuid->bytes[filled++] = (char)byte;
        at++;
    }
    return CUDA_SUCCESS;
}

CUresult impl_cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    return impl_cuDeviceGetUuid_v2(uuid, device);
}

CUresult impl_cuDeviceGetPCIBusId(char *id, int length, CUdevice device)
{
    const struct sim_card_conf *conf;

    TRY(conf_of(device, id, &conf));
    if (length < 13)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(id, (size_t)length, "0000:%02X:00.0", conf->pci_bus);
    return CUDA_SUCCESS;
}

CUresult impl_cuDeviceGetByPCIBusId(CUdevice *device, const char *id)
{
    char own[16];

    TRY(ready());
    if (!device || !id)
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < device_count; i++) {
        TRY(impl_cuDeviceGetPCIBusId(own, sizeof own, i));
        if (!strcasecmp(own, id) || !strcasecmp(own + 5, id)) {
            *device = i;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult impl_cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute which, CUdevice device,
                                      CUdevice peer)
{
    const struct sim_card_conf *conf;

    (void)which;
    TRY(conf_of(device, value, &conf));
    TRY(conf_of(peer, value, &conf));
    if (device == peer)
        return CUDA_ERROR_INVALID_DEVICE;
    *value = 0;
    return CUDA_SUCCESS;
}

CUresult impl_cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
    const struct sim_card_conf *conf;

    TRY(conf_of(device, major && minor ? major : NULL, &conf));
    *major = conf->capability_major;
    *minor = conf->capability_minor;
    return CUDA_SUCCESS;
}

CUresult impl_cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    const struct sim_card_conf *conf;

    TRY(conf_of(device, can, &conf));
    TRY(conf_of(peer, can, &conf));
    *can = 0;
    return CUDA_SUCCESS;
}

static int attribute(const struct sim_card_conf *conf, CUdevice_attribute which)
{
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 100 << 10;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 64 << 10;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return conf->capability_major >= 9 ? 132 : 72;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return conf->capability_major >= 9 ? 1980000 : 1695000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return conf->capability_major >= 9 ? 3201000 : 6251000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return conf->capability_major >= 9 ? 6144 : 384;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return conf->capability_major >= 9 ? 60 << 20 : 6 << 20;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
    case CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT: return 512;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT: return 32;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return (int)conf->pci_bus;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return conf->capability_major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return conf->capability_minor;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return 1;
    default: return 0;
    }
}

CUresult impl_cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device)
{
    const struct sim_card_conf *conf;

    TRY(conf_of(device, value, &conf));
    if (which <= 0 || which >= CU_DEVICE_ATTRIBUTE_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    *value = attribute(conf, which);
    return CUDA_SUCCESS;
}
