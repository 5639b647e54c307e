/* A simulated libamd_smi.so: the functions that the worker calls, on the GPUs of the file FAKE_AMDSMI_STATE (amd.py has
 * the same structures). All others that the Python package binds come from a generated file: they are not supported.
 * Signatures and structures are those of AMD SMI 7.0. */

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, NOT_SUPPORTED = 2, NOT_FOUND = 31, NOT_INIT = 32, DRIVER_NOT_LOADED = 34 };
enum { GPUS = 8, PROCESSES = 8, RESOLUTION_UJ = 15 };

typedef struct { uint32_t pid, unused; uint64_t bytes; } Process;
typedef struct {
    char uuid[64], name[64];
    uint32_t bus, target;
    uint64_t memory_total, memory_used;
    uint32_t gfx, umc;
    int32_t temperature, lost;
    uint32_t power_w, limit_w;
    uint64_t energy_uj, energy_since_ns;
    uint32_t clock_mhz, memory_clock_mhz;
    uint64_t corrected, uncorrected;
    uint32_t pcie_width, pcie_speed;
    uint8_t throttled[5]; /* prochot, power, socket, voltage regulator, memory */
    uint8_t padding[3];
    uint8_t links[GPUS]; /* hops over XGMI; 0: over PCIe */
    Process processes[PROCESSES];
} Gpu;
typedef struct { uint32_t magic, count, loaded, unused; char driver_version[64]; Gpu gpus[GPUS]; } State;

static State *state;
static int users;
static char handles[GPUS], host; /* a handle is the address of its entry */

uint32_t fake_amdsmi_state_size(void) { return sizeof(State); }

static int index_of(void *handle) { return (char *)handle >= handles && (char *)handle < handles + GPUS ? (char *)handle - handles : -1; }

#define DEVICE                                             \
    if (!users) return NOT_INIT;                           \
    if (index_of(handle) < 0) return INVALID;              \
    Gpu *g = &state->gpus[index_of(handle)];               \
    if (g->lost) return NOT_FOUND;

int amdsmi_init(uint64_t flags) {
    (void)flags;
    if (!state) {
        int file = open(getenv("FAKE_AMDSMI_STATE"), O_RDWR | O_CLOEXEC);
        if (file < 0) return DRIVER_NOT_LOADED;
        state = mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
    }
    if (!state->loaded) return DRIVER_NOT_LOADED;
    users++;
    return OK;
}

int amdsmi_shut_down(void) {
    if (!users) return NOT_INIT;
    users--;
    return OK;
}

int amdsmi_get_socket_handles(uint32_t *count, void **sockets) {
    if (!users) return NOT_INIT;
    *count = 1;
    if (sockets) sockets[0] = &host;
    return OK;
}

int amdsmi_get_processor_handles(void *socket, uint32_t *count, void **out) {
    if (!users) return NOT_INIT;
    if (socket != &host) return INVALID;
    *count = state->count;
    if (out) for (uint32_t i = 0; i < state->count; i++) out[i] = handles + i;
    return OK;
}

int amdsmi_get_processor_handle_from_bdf(uint64_t bdf, void **out) {
    if (!users) return NOT_INIT;
    for (uint32_t i = 0; i < state->count; i++)
        if (bdf >> 8 == state->gpus[i].bus && !state->gpus[i].lost) { *out = handles + i; return OK; }
    return NOT_FOUND;
}

int amdsmi_get_gpu_device_bdf(void *handle, uint64_t *bdf) { DEVICE *bdf = (uint64_t)g->bus << 8; return OK; }

typedef struct { uint32_t drm_render, drm_card, hsa_id, hip_id; char hip_uuid[256]; } Enumeration;
int amdsmi_get_gpu_enumeration_info(void *handle, Enumeration *out) {
    DEVICE
    memset(out, 0, sizeof *out);
    strcpy(out->hip_uuid, g->uuid);
    out->hip_id = state->count - 1 - index_of(handle); /* HIP counts otherwise */
    return OK;
}

typedef struct {
    char market_name[256]; uint32_t vendor_id; char vendor_name[256]; uint32_t subvendor_id; uint64_t device_id;
    uint32_t rev_id; char asic_serial[256]; uint32_t oam_id, compute_units; uint64_t target; uint32_t subsystem_id, reserved[21];
} __attribute__((aligned(8))) Asic;
int amdsmi_get_gpu_asic_info(void *handle, Asic *out) {
    DEVICE
    memset(out, 0, sizeof *out);
    strcpy(out->market_name, g->name);
    strcpy(out->vendor_name, "Advanced Micro Devices, Inc.");
    out->target = g->target;
    return OK;
}

typedef struct { char version[256], date[256], name[256]; } Driver;
int amdsmi_get_gpu_driver_info(void *handle, Driver *out) {
    DEVICE
    (void)g;
    memset(out, 0, sizeof *out);
    strcpy(out->version, state->driver_version);
    strcpy(out->name, "amdgpu");
    return OK;
}

int amdsmi_get_gpu_memory_total(void *handle, uint32_t type, uint64_t *out) { DEVICE if (type) return NOT_SUPPORTED; *out = g->memory_total; return OK; }
int amdsmi_get_gpu_memory_usage(void *handle, uint32_t type, uint64_t *out) { DEVICE if (type) return NOT_SUPPORTED; *out = g->memory_used; return OK; }

typedef struct { uint32_t gfx, umc, mm, reserved[13]; } Activity;
int amdsmi_get_gpu_activity(void *handle, Activity *out) { DEVICE *out = (Activity){.gfx = g->gfx, .umc = g->umc, .mm = 0xFFFF}; return OK; }

int amdsmi_get_temp_metric(void *handle, uint32_t sensor, uint32_t metric, int64_t *out) {
    DEVICE
    if (sensor != 1 || metric) return NOT_SUPPORTED; /* as MI300: the hot spot only */
    *out = g->temperature;
    return OK;
}

typedef struct { uint64_t socket; uint32_t current, average; uint64_t voltages[3]; uint32_t limit, padding; uint64_t reserved[18]; } Power;
int amdsmi_get_power_info(void *handle, Power *out) { DEVICE *out = (Power){.socket = g->power_w, .current = g->power_w, .average = 0xFFFF}; return OK; }

typedef struct { uint64_t cap, standard, dpm, least, most, reserved[3]; } Cap;
int amdsmi_get_power_cap_info(void *handle, uint32_t sensor, Cap *out) { DEVICE (void)sensor; *out = (Cap){.cap = g->limit_w * 1000000ull}; return OK; }

int amdsmi_get_energy_count(void *handle, uint64_t *count, float *resolution, uint64_t *timestamp) {
    DEVICE
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    *timestamp = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    *resolution = RESOLUTION_UJ;
    *count = (g->energy_uj + (*timestamp - g->energy_since_ns) / 1000 * g->power_w) / RESOLUTION_UJ;
    return OK;
}

typedef struct { uint32_t now, least, most; uint8_t locked, asleep, padding[2]; uint32_t reserved[4]; } Clock;
int amdsmi_get_clock_info(void *handle, uint32_t type, Clock *out) {
    DEVICE
    if (type != 0 && type != 4) return NOT_SUPPORTED;
    *out = (Clock){.now = type ? g->memory_clock_mhz : g->clock_mhz};
    return OK;
}

typedef struct { uint64_t corrected, uncorrected, deferred, reserved[5]; } Errors;
int amdsmi_get_gpu_total_ecc_count(void *handle, Errors *out) { DEVICE *out = (Errors){.corrected = g->corrected, .uncorrected = g->uncorrected}; return OK; }

typedef struct {
    struct { uint16_t width; uint32_t speed, version, slot, most_version; uint64_t reserved[9]; } fixed;
    struct { uint16_t width; uint32_t speed, bandwidth; uint64_t counts[5]; uint32_t recoveries; uint64_t reserved[12]; } now;
    uint64_t reserved[32];
} Pcie;
int amdsmi_get_pcie_info(void *handle, Pcie *out) {
    DEVICE
    memset(out, 0, sizeof *out);
    out->now.width = g->pcie_width;
    out->now.speed = g->pcie_speed;
    return OK;
}

typedef struct { uint64_t counts[15]; uint8_t active[5]; } Violations; /* the first part of the structure */
int amdsmi_get_violation_status(void *handle, Violations *out) { DEVICE memcpy(out->active, g->throttled, sizeof g->throttled); return OK; }

typedef struct {
    char name[256]; uint32_t pid; uint64_t memory;
    struct { uint64_t gfx, enc; uint32_t reserved[12]; } engines;
    struct { uint64_t gtt, cpu, vram; uint32_t reserved[10]; } memories;
    char container[256]; uint32_t occupancy, reserved[11];
} Listed;
int amdsmi_get_gpu_process_list(void *handle, uint32_t *count, Listed *out) {
    DEVICE
    uint32_t n = 0;
    for (int i = 0; i < PROCESSES && n < *count; i++) {
        if (!g->processes[i].pid) continue;
        memset(out + n, 0, sizeof *out);
        strcpy(out[n].name, "python3");
        out[n].pid = g->processes[i].pid;
        out[n++].memories.vram = g->processes[i].bytes;
    }
    *count = n;
    return OK;
}

int amdsmi_topo_get_link_type(void *handle, void *other, uint64_t *hops, uint32_t *type) {
    DEVICE
    if (index_of(other) < 0) return INVALID;
    uint8_t linked = g->links[index_of(other)];
    *hops = linked ? linked : 2;
    *type = linked ? 2 : 1;
    return OK;
}
