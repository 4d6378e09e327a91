/* The simulated NVML: what a card is. A faulty card still says so; only its figures fail. */
#include "nvml_sim.h"

#include <stdio.h>
#include <string.h>

#define PCIE_GENERATION 4u
#define PCIE_WIDTH 16u

TEXT_GETTER(nvmlDeviceGetName, known, card_name(device->card))
TEXT_GETTER(nvmlDeviceGetUUID, known, card_uuid(device->card))
TEXT_GETTER(nvmlDeviceGetVbiosVersion, known, "00.00.00.00.00")
TEXT_GETTER(nvmlDeviceGetBoardPartNumber, known, "SIMULATED")
GETTER(nvmlDeviceGetIndex, known, unsigned int, device->index)
GETTER(nvmlDeviceGetMinorNumber, known, unsigned int, card_minor(device->card))
GETTER(nvmlDeviceGetBrand, known, nvmlBrandType_t, device->model->brand)
GETTER(nvmlDeviceGetArchitecture, known, nvmlDeviceArchitecture_t, device->model->architecture)
GETTER(nvmlDeviceGetNumGpuCores, known, unsigned int, device->model->cores)
GETTER(nvmlDeviceGetMemoryBusWidth, known, unsigned int, device->model->bus_width_bits)
GETTER(nvmlDeviceGetBoardId, known, unsigned int, card_pci_bus(device->card) << 8)
GETTER(nvmlDeviceGetModuleId, known, unsigned int, device->card)
GETTER(nvmlDeviceGetMultiGpuBoard, known, unsigned int, 0)
GETTER(nvmlDeviceGetBusType, known, nvmlBusType_t, NVML_BUS_TYPE_PCIE)
GETTER(nvmlDeviceGetMaxPcieLinkGeneration, known, unsigned int, PCIE_GENERATION)
GETTER(nvmlDeviceGetGpuMaxPcieLinkGeneration, known, unsigned int, PCIE_GENERATION)
GETTER(nvmlDeviceGetCurrPcieLinkGeneration, known, unsigned int, PCIE_GENERATION)
GETTER(nvmlDeviceGetMaxPcieLinkWidth, known, unsigned int, PCIE_WIDTH)
GETTER(nvmlDeviceGetCurrPcieLinkWidth, known, unsigned int, PCIE_WIDTH)
GETTER(nvmlDeviceGetPersistenceMode, known, nvmlEnableState_t, NVML_FEATURE_ENABLED)
GETTER(nvmlDeviceGetDisplayMode, known, nvmlEnableState_t, NVML_FEATURE_DISABLED)
GETTER(nvmlDeviceGetDisplayActive, known, nvmlEnableState_t, NVML_FEATURE_DISABLED)
GETTER(nvmlDeviceGetComputeMode, known, nvmlComputeMode_t, NVML_COMPUTEMODE_DEFAULT)
GETTER(nvmlDeviceGetDefaultEccMode, known, nvmlEnableState_t, NVML_FEATURE_ENABLED)
GETTER(nvmlDeviceGetAccountingMode, known, nvmlEnableState_t, NVML_FEATURE_DISABLED)
GETTER(nvmlDeviceGetVirtualizationMode, known, nvmlGpuVirtualizationMode_t,
       NVML_GPU_VIRTUALIZATION_MODE_NONE)
GETTER(nvmlDeviceIsMigDeviceHandle, known, unsigned int, 0)
GETTER(nvmlDeviceGetMaxMigDeviceCount, known, unsigned int, 0)

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
    char text[NVML_DEVICE_SERIAL_BUFFER_SIZE];
    nvmlReturn_t result = known(device);

    if (result != NVML_SUCCESS)
        return result;
    snprintf(text, sizeof text, "%013u", device->card + 1);
    return put_text(serial, length, text);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    nvmlReturn_t result = known(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!pci)
        return NVML_ERROR_INVALID_ARGUMENT;
    memset(pci, 0, sizeof *pci);
    pci->bus = card_pci_bus(device->card);
    pci->pciDeviceId = device->model->pci_device_id;
    pci->pciSubSystemId = device->model->pci_device_id;
    snprintf(pci->busId, sizeof pci->busId, NVML_DEVICE_PCI_BUS_ID_FMT,
             NVML_DEVICE_PCI_BUS_ID_FMT_ARGS(pci));
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, NVML_DEVICE_PCI_BUS_ID_LEGACY_FMT,
             NVML_DEVICE_PCI_BUS_ID_FMT_ARGS(pci));
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    return nvmlDeviceGetPciInfo_v3(device, pci);
}

nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    return nvmlDeviceGetPciInfo_v3(device, pci);
}

nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *ext)
{
    nvmlPciInfo_t pci;
    nvmlReturn_t result = nvmlDeviceGetPciInfo_v3(device, &pci);

    if (result != NVML_SUCCESS)
        return result;
    if (!ext)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (ext->version != nvmlPciInfoExt_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    *ext = (nvmlPciInfoExt_t){
        .version = nvmlPciInfoExt_v1,
        .domain = pci.domain,
        .bus = pci.bus,
        .device = pci.device,
        .pciDeviceId = pci.pciDeviceId,
        .pciSubSystemId = pci.pciSubSystemId,
        .baseClass = 3, /* display controller ... */
        .subClass = 2,  /* ... for 3D */
    };
    memcpy(ext->busId, pci.busId, sizeof ext->busId);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    nvmlReturn_t result = known(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!major || !minor)
        return NVML_ERROR_INVALID_ARGUMENT;
    card_capability(device->card, major, minor);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current,
                                  nvmlEnableState_t *pending)
{
    nvmlReturn_t result = known(device);

    if (result != NVML_SUCCESS)
        return result;
    if (!current || !pending)
        return NVML_ERROR_INVALID_ARGUMENT;
    *current = *pending = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t one, nvmlDevice_t other, int *same)
{
    nvmlReturn_t result = known(one);

    if (result == NVML_SUCCESS)
        result = known(other);
    if (result != NVML_SUCCESS)
        return result;
    if (!same)
        return NVML_ERROR_INVALID_ARGUMENT;
    *same = one == other;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other,
                                                 nvmlGpuTopologyLevel_t *level)
{
    nvmlReturn_t result = known(one);

    if (result == NVML_SUCCESS)
        result = known(other);
    if (result != NVML_SUCCESS)
        return result;
    if (!level)
        return NVML_ERROR_INVALID_ARGUMENT;
    *level = one == other ? NVML_TOPOLOGY_INTERNAL : NVML_TOPOLOGY_NODE;
    return NVML_SUCCESS;
}
