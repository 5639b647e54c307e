/* A simulated NVML (libnvidia-ml.so.1): real pynvml loads it, and sees the GPUs that a state file describes.
 *
 * The file (environment: FAKE_NVML_STATE) is mapped into every process, and tests/fakes/gpus.py writes to it at any
 * time. The layout below is the one of its ctypes structures; the signatures and structs of the functions are those of
 * nvidia-ml-py 13. A function that is not here is answered by pynvml with "function not found", as an old driver's is.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, VERSION_MISMATCH = 25
};
enum { GPUS = 64, LINKS = 18, INSTANCES = 7, PROCESSES = 32, FAILURES = 64, EVENTS = 1024, EVENT_SETS = 64 };
#define MAGIC 0x4d475055u
#define TICK_NS 5000000

typedef struct { uint32_t pid, mps; uint64_t bytes; uint32_t sm_util, memory_util, instance, unused; } Process;
typedef struct { uint32_t active; int32_t remote; } Link; /* remote: a GPU's index; -1: a switch */
typedef struct {
    char uuid[96], name[96], bus_id[32], serial[32];
    uint32_t domain, bus, device, capability[2];
    uint64_t memory_total, memory_used, memory_reserved;
    uint32_t utilization, memory_utilization;
    int32_t temperature, memory_temperature;
    uint32_t power_mw, power_limit_mw;
    uint64_t energy_mj, energy_since_ns, energy_period_ns;
    uint32_t energy_runs, clocks_mhz[4], clocks_max_mhz[4];
    uint64_t throttle_reasons;
    uint32_t ecc_enabled;
    uint64_t ecc[2][2]; /* [corrected, uncorrected][since the driver was loaded, ever] */
    uint32_t remapped[4], recovery_action, compute_mode;
    uint32_t mig_mode, mig_count;
    char mig_uuids[INSTANCES][96];
    Link links[LINKS];
    uint32_t topology[GPUS];
    uint32_t pcie_generation, pcie_width, pcie_kib[2];
    uint64_t event_types;
    uint32_t lost, generation, hangs, delay_us;
    Process processes[PROCESSES];
} Gpu;
typedef struct { char function[64]; int32_t gpu, code; } Failure; /* gpu: -1 for all */
/* part: a MIG instance, counted from 1; 0: the event is of the whole GPU */
typedef struct { uint64_t number, type, data; uint32_t gpu, part; } Event;
typedef struct {
    uint32_t magic, size, count;
    int32_t cuda_version;
    char driver_version[80], nvml_version[80];
    Failure failures[FAILURES];
    uint64_t events_begun; /* events 1 … events_begun have happened */
    Event events[EVENTS];
    Gpu gpus[GPUS];
} State;

/* What nvmlDevice_t points to. */
typedef struct { int gpu, instance; } Handle; /* instance: of MIG; -1: the whole GPU */
typedef struct { int used; uint64_t seen, types[GPUS]; } EventSet;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static State *state;
static int users;
static Handle wholes[GPUS], parts[GPUS][INSTANCES];
static uint32_t generations[GPUS];
static int opened[GPUS]; /* descriptors of the files that stand for /dev/nvidiaN, locked while this process has it open */
static EventSet event_sets[EVENT_SETS];

unsigned fake_nvml_state_size(void) { return sizeof(State); }

static uint64_t monotonic_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void tick(void) {
    struct timespec t = {0, TICK_NS};
    nanosleep(&t, NULL);
}

static int planned(const char *function, int gpu) {
    for (int i = 0; i < FAILURES; i++) {
        const Failure *f = &state->failures[i];
        if (f->function[0] && (f->gpu < 0 || f->gpu == gpu) && !strcmp(f->function, function)) return f->code;
    }
    return OK;
}

/* What every function on a device begins with: is it there, does it answer, is this function scripted to fail? */
static int answer(const char *function, int gpu) {
    const volatile Gpu *g = &state->gpus[gpu];
    if (g->delay_us) usleep(g->delay_us);
    while (g->hangs) tick();
    if (g->lost || g->generation != generations[gpu]) return GPU_IS_LOST;
    return planned(function, gpu);
}

/* The driver opens a GPU for its first handle, and closes it with the last nvmlShutdown. */
static void open_gpu(int gpu) {
    char path[4096];
    pthread_mutex_lock(&lock);
    if (!opened[gpu]) {
        snprintf(path, sizeof path, "%s.gpu%d", getenv("FAKE_NVML_STATE"), gpu);
        opened[gpu] = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        flock(opened[gpu], LOCK_SH);
    }
    pthread_mutex_unlock(&lock);
}

static int is_handle(const Handle *h) {
    return (h >= wholes && h < wholes + GPUS) || (h >= &parts[0][0] && h < &parts[0][0] + GPUS * INSTANCES);
}

#define API __attribute__((visibility("default"))) int
#define DRIVER                                             \
    if (!users) return UNINITIALIZED;                      \
    { int code = planned(__func__, -1); if (code) return code; }
/* MIG instances know their identity, memory and processes only: WHOLE rejects them. */
#define DEVICE(pointer)                                                            \
    if (!users) return UNINITIALIZED;                                              \
    if (!is_handle(pointer)) return INVALID_ARGUMENT;                              \
    const Handle *h = (pointer);                                                   \
    Gpu *g = &state->gpus[h->gpu];                                                 \
    (void)g;                                                                       \
    { int code = answer(__func__, h->gpu); if (code) return code; }
#define WHOLE(pointer) DEVICE(pointer) if (h->instance >= 0) return NOT_SUPPORTED;
#define GET(function, type, value) \
    API function(Handle *device, type *out) { WHOLE(device) *out = (value); return OK; }

/* --- the library --------------------------------------------------------------------------------------------------- */

API nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    int code = OK;
    if (!state) {
        const char *path = getenv("FAKE_NVML_STATE");
        int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
        struct stat s;
        State *map = MAP_FAILED;
        if (fd >= 0 && !fstat(fd, &s) && s.st_size == sizeof(State))
            map = mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (fd >= 0) close(fd);
        if (map == MAP_FAILED || map->magic != MAGIC || map->size != sizeof(State)) {
            if (path) fprintf(stderr, "simulated NVML: %s is not a state file of this version of tests/fakes\n", path);
            code = DRIVER_NOT_LOADED;
        } else {
            state = map;
        }
    }
    if (!code) code = planned("nvmlInitWithFlags", -1);
    if (!code && !users++)
        for (int i = 0; i < GPUS; i++) {
            wholes[i] = (Handle){i, -1};
            generations[i] = state->gpus[i].generation;
            for (int j = 0; j < INSTANCES; j++) parts[i][j] = (Handle){i, j};
        }
    pthread_mutex_unlock(&lock);
    return code;
}

API nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

/* The mapping stays: a thread may be inside. */
API nvmlShutdown(void) {
    if (!users) return UNINITIALIZED;
    pthread_mutex_lock(&lock);
    if (!--users)
        for (int i = 0; i < GPUS; i++)
            if (opened[i]) { close(opened[i]); opened[i] = 0; }
    pthread_mutex_unlock(&lock);
    return OK;
}

__attribute__((visibility("default"))) const char *nvmlErrorString(int code) {
    switch (code) {
    case OK: return "The operation was successful";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case GPU_IS_LOST: return "GPU is lost";
    case 16: return "GPU requires reset";
    case 18: return "RM has detected an NVML/RM version mismatch.";
    case VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

static int text(char *out, unsigned length, const char *value) {
    if (strlen(value) >= length) return INSUFFICIENT_SIZE;
    strcpy(out, value);
    return OK;
}

API nvmlSystemGetDriverVersion(char *out, unsigned length) { DRIVER return text(out, length, state->driver_version); }
API nvmlSystemGetNVMLVersion(char *out, unsigned length) { DRIVER return text(out, length, state->nvml_version); }
API nvmlSystemGetCudaDriverVersion(int *out) { DRIVER *out = state->cuda_version; return OK; }
API nvmlSystemGetCudaDriverVersion_v2(int *out) { DRIVER *out = state->cuda_version; return OK; }
API nvmlDeviceGetCount_v2(unsigned *out) { DRIVER *out = state->count; return OK; }

API nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle **out) {
    DRIVER
    if (index >= state->count) return INVALID_ARGUMENT;
    open_gpu((int)index);
    int code = answer(__func__, (int)index);
    if (!code) *out = &wholes[index];
    return code;
}

API nvmlDeviceGetHandleByUUID(const char *uuid, Handle **out) {
    DRIVER
    for (unsigned i = 0; i < state->count; i++) {
        Gpu *g = &state->gpus[i];
        open_gpu((int)i); /* the search opens the GPUs before it, too */
        int code = answer(__func__, (int)i), whole = !strcmp(g->uuid, uuid);
        if (whole && code) return code;
        if (whole) { *out = &wholes[i]; return OK; }
        for (unsigned j = 0; !code && j < g->mig_count; j++)
            if (!strcmp(g->mig_uuids[j], uuid)) { *out = &parts[i][j]; return OK; }
    }
    return NOT_FOUND;
}

API nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, Handle **out) {
    DRIVER
    for (unsigned i = 0; i < state->count; i++)
        if (!strcasecmp(state->gpus[i].bus_id, bus_id)) {
            open_gpu((int)i);
            int code = answer(__func__, (int)i);
            if (!code) *out = &wholes[i];
            return code;
        }
    return NOT_FOUND;
}

/* --- identity ------------------------------------------------------------------------------------------------------ */

API nvmlDeviceGetName(Handle *device, char *out, unsigned length) {
    DEVICE(device)
    char name[128];
    snprintf(name, sizeof name, "%s%s", g->name, h->instance < 0 ? "" : " MIG 1g.18gb");
    return text(out, length, name);
}
API nvmlDeviceGetSerial(Handle *device, char *out, unsigned length) { WHOLE(device) return text(out, length, g->serial); }
API nvmlDeviceGetUUID(Handle *device, char *out, unsigned length) {
    DEVICE(device)
    return text(out, length, h->instance < 0 ? g->uuid : g->mig_uuids[h->instance]);
}
API nvmlDeviceGetIndex(Handle *device, unsigned *out) { /* of an instance: its number within the GPU */
    DEVICE(device)
    *out = (unsigned)(h->instance < 0 ? h->gpu : h->instance);
    return OK;
}
GET(nvmlDeviceGetMinorNumber, unsigned, (unsigned)h->gpu)
GET(nvmlDeviceGetPersistenceMode, unsigned, 1)
GET(nvmlDeviceGetComputeMode, unsigned, g->compute_mode)
API nvmlDeviceSetComputeMode(Handle *device, unsigned mode) { WHOLE(device) g->compute_mode = mode; return OK; }
API nvmlDeviceGetCudaComputeCapability(Handle *device, int *major, int *minor) {
    DEVICE(device)
    *major = (int)g->capability[0];
    *minor = (int)g->capability[1];
    return OK;
}

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} PciInfo;

static void fill_pci(const Gpu *g, PciInfo *out) {
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04X:%02X:%02X.0", g->domain & 0xffff, g->bus & 0xff,
             g->device & 0xff);
    strcpy(out->bus_id, g->bus_id);
    out->domain = g->domain;
    out->bus = g->bus;
    out->device = g->device;
    out->device_id = 0x233510de;
}

API nvmlDeviceGetPciInfo_v3(Handle *device, PciInfo *out) { WHOLE(device) fill_pci(g, out); return OK; }

API nvmlDeviceGetCpuAffinity(Handle *device, unsigned words, unsigned long *out) {
    WHOLE(device)
    memset(out, 0, words * sizeof *out);
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    for (long i = 0; i < cpus && i < (long)words * 64; i++) out[i / 64] |= 1ul << (i % 64);
    return OK;
}

/* --- MIG ----------------------------------------------------------------------------------------------------------- */

API nvmlDeviceGetMigMode(Handle *device, unsigned *current, unsigned *pending) {
    WHOLE(device)
    *current = *pending = g->mig_mode;
    return OK;
}
GET(nvmlDeviceGetMaxMigDeviceCount, unsigned, INSTANCES)
API nvmlDeviceGetMigDeviceHandleByIndex(Handle *device, unsigned index, Handle **out) {
    WHOLE(device)
    if (!g->mig_mode || index >= g->mig_count) return index < INSTANCES ? NOT_FOUND : INVALID_ARGUMENT;
    *out = &parts[h->gpu][index];
    return OK;
}
API nvmlDeviceIsMigDeviceHandle(Handle *device, unsigned *out) { DEVICE(device) *out = h->instance >= 0; return OK; }
API nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Handle *device, Handle **out) {
    DEVICE(device)
    *out = &wholes[h->gpu];
    return OK;
}
API nvmlDeviceGetGpuInstanceId(Handle *device, unsigned *out) {
    DEVICE(device)
    *out = (unsigned)h->instance + 1;
    return h->instance < 0 ? NOT_SUPPORTED : OK;
}
API nvmlDeviceGetComputeInstanceId(Handle *device, unsigned *out) {
    DEVICE(device)
    *out = 0;
    return h->instance < 0 ? NOT_SUPPORTED : OK;
}

/* --- how it is doing ----------------------------------------------------------------------------------------------- */

static int alive(const Process *p) { return p->pid && (!kill((pid_t)p->pid, 0) || errno == EPERM); }

static uint64_t memory_used(const Gpu *g) {
    uint64_t used = g->memory_used;
    for (int i = 0; i < PROCESSES; i++)
        if (alive(&g->processes[i])) used += g->processes[i].bytes;
    return used < g->memory_total - g->memory_reserved ? used : g->memory_total - g->memory_reserved;
}

static uint64_t energy_mj(const Gpu *g) {
    if (!g->energy_runs) return g->energy_mj;
    uint64_t past_ns = monotonic_ns() - g->energy_since_ns;
    if (g->energy_period_ns) past_ns -= past_ns % g->energy_period_ns;
    return g->energy_mj + (uint64_t)((double)past_ns / 1e9 * g->power_mw);
}

API nvmlDeviceGetMemoryInfo(Handle *device, uint64_t out[3]) {
    DEVICE(device)
    uint64_t parts_of_it = h->instance < 0 ? 1 : g->mig_count;
    uint64_t used = memory_used(g) + g->memory_reserved; /* without a version, what is reserved counts as used */
    out[0] = g->memory_total / parts_of_it;
    out[2] = used / parts_of_it;
    out[1] = out[0] - out[2];
    return OK;
}

typedef struct { unsigned version; uint64_t total, reserved, free, used; } MemoryV2;
API nvmlDeviceGetMemoryInfo_v2(Handle *device, MemoryV2 *out) {
    DEVICE(device)
    if (out->version != (sizeof *out | 2u << 24)) return VERSION_MISMATCH;
    uint64_t parts_of_it = h->instance < 0 ? 1 : g->mig_count;
    out->total = g->memory_total / parts_of_it;
    out->reserved = g->memory_reserved / parts_of_it;
    out->used = memory_used(g) / parts_of_it;
    out->free = out->total - out->reserved - out->used;
    return OK;
}

API nvmlDeviceGetUtilizationRates(Handle *device, unsigned out[2]) {
    WHOLE(device)
    if (g->mig_mode) return NOT_SUPPORTED;
    out[0] = g->utilization;
    out[1] = g->memory_utilization;
    return OK;
}

API nvmlDeviceGetTemperature(Handle *device, unsigned sensor, unsigned *out) {
    WHOLE(device)
    if (sensor) return INVALID_ARGUMENT;
    *out = (unsigned)g->temperature;
    return OK;
}
typedef struct { unsigned version, sensor; int temperature; } TemperatureV1;
API nvmlDeviceGetTemperatureV(Handle *device, TemperatureV1 *out) {
    WHOLE(device)
    if (out->version != (sizeof *out | 1u << 24)) return VERSION_MISMATCH;
    if (out->sensor) return INVALID_ARGUMENT;
    out->temperature = g->temperature;
    return OK;
}
API nvmlDeviceGetTemperatureThreshold(Handle *device, unsigned threshold, unsigned *out) {
    static const unsigned celsius[] = {92, 89, 95, 87};
    WHOLE(device)
    if (threshold > 3) return NOT_SUPPORTED;
    *out = celsius[threshold];
    return OK;
}
GET(nvmlDeviceGetPowerUsage, unsigned, g->power_mw)
GET(nvmlDeviceGetEnforcedPowerLimit, unsigned, g->power_limit_mw)
GET(nvmlDeviceGetPowerManagementLimit, unsigned, g->power_limit_mw)
GET(nvmlDeviceGetTotalEnergyConsumption, uint64_t, energy_mj(g))
GET(nvmlDeviceGetCurrentClocksEventReasons, uint64_t, g->throttle_reasons)
GET(nvmlDeviceGetCurrentClocksThrottleReasons, uint64_t, g->throttle_reasons)
GET(nvmlDeviceGetSupportedClocksEventReasons, uint64_t, 0x1ff)
API nvmlDeviceGetClockInfo(Handle *device, unsigned clock, unsigned *out) {
    WHOLE(device)
    if (clock > 3) return INVALID_ARGUMENT;
    *out = g->clocks_mhz[clock];
    return OK;
}
API nvmlDeviceGetMaxClockInfo(Handle *device, unsigned clock, unsigned *out) {
    WHOLE(device)
    if (clock > 3) return INVALID_ARGUMENT;
    *out = g->clocks_max_mhz[clock];
    return OK;
}
GET(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, g->pcie_generation)
GET(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, 5)
GET(nvmlDeviceGetCurrPcieLinkWidth, unsigned, g->pcie_width)
GET(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
API nvmlDeviceGetPcieThroughput(Handle *device, unsigned counter, unsigned *out) {
    WHOLE(device)
    if (counter > 1) return INVALID_ARGUMENT;
    *out = g->pcie_kib[counter];
    return OK;
}

/* --- errors of its memory ------------------------------------------------------------------------------------------ */

API nvmlDeviceGetEccMode(Handle *device, unsigned *current, unsigned *pending) {
    WHOLE(device)
    *current = *pending = g->ecc_enabled;
    return OK;
}
API nvmlDeviceGetTotalEccErrors(Handle *device, unsigned type, unsigned counter, uint64_t *out) {
    WHOLE(device)
    if (!g->ecc_enabled) return NOT_SUPPORTED;
    if (type > 1 || counter > 1) return INVALID_ARGUMENT;
    *out = g->ecc[type][counter];
    return OK;
}
/* All errors are of the device's memory (location 2), none of its caches. */
API nvmlDeviceGetMemoryErrorCounter(Handle *device, unsigned type, unsigned counter, unsigned location, uint64_t *out) {
    WHOLE(device)
    if (!g->ecc_enabled) return NOT_SUPPORTED;
    if (type > 1 || counter > 1) return INVALID_ARGUMENT;
    *out = location == 2 ? g->ecc[type][counter] : 0;
    return OK;
}
API nvmlDeviceGetRemappedRows(Handle *device, unsigned *correctable, unsigned *uncorrectable, unsigned *pending,
                              unsigned *failed) {
    WHOLE(device)
    *correctable = g->remapped[0];
    *uncorrectable = g->remapped[1];
    *pending = g->remapped[2];
    *failed = g->remapped[3];
    return OK;
}

/* --- ways to other devices ----------------------------------------------------------------------------------------- */

API nvmlDeviceGetNvLinkState(Handle *device, unsigned link, unsigned *out) {
    WHOLE(device)
    if (link >= LINKS) return INVALID_ARGUMENT;
    *out = g->links[link].active;
    return OK;
}
API nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle *device, unsigned link, PciInfo *out) {
    WHOLE(device)
    if (link >= LINKS) return INVALID_ARGUMENT;
    if (!g->links[link].active) return NOT_SUPPORTED;
    static const Gpu nvswitch = {.bus_id = "00000000:C5:00.0", .bus = 0xc5};
    int remote = g->links[link].remote;
    fill_pci(remote < 0 ? &nvswitch : &state->gpus[remote], out);
    return OK;
}
API nvmlDeviceGetNvLinkRemoteDeviceType(Handle *device, unsigned link, unsigned *out) {
    WHOLE(device)
    if (link >= LINKS) return INVALID_ARGUMENT;
    if (!g->links[link].active) return NOT_SUPPORTED;
    *out = g->links[link].remote < 0 ? 2 : 0;
    return OK;
}
API nvmlDeviceGetTopologyCommonAncestor(Handle *device, Handle *other, unsigned *out) {
    WHOLE(device)
    if (!is_handle(other)) return INVALID_ARGUMENT;
    *out = g->topology[other->gpu];
    return OK;
}
API nvmlDeviceGetP2PStatus(Handle *device, Handle *other, unsigned index, unsigned *out) {
    WHOLE(device)
    if (!is_handle(other)) return INVALID_ARGUMENT;
    if (index == 2) { /* by NVLink */
        *out = 5;
        for (int i = 0; i < LINKS; i++)
            if (g->links[i].active && (g->links[i].remote == other->gpu || g->links[i].remote < 0)) *out = 0;
    } else {
        *out = g->topology[other->gpu] <= 30 ? 0 : 1;
    }
    return OK;
}
typedef struct {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique;
    unsigned char state;
    unsigned health_mask;
    unsigned char health_summary; /* from version 3 on */
} FabricInfo;
API nvmlDeviceGetGpuFabricInfoV(Handle *device, FabricInfo *out) {
    WHOLE(device)
    if (out->version >> 24 != 2 && out->version >> 24 != 3) return VERSION_MISMATCH;
    memset(out->cluster, 0, sizeof out->cluster);
    out->status = out->clique = out->health_mask = 0;
    out->state = 0; /* a fabric is not supported */
    return OK;
}

/* --- processes ----------------------------------------------------------------------------------------------------- */

typedef struct { unsigned pid; uint64_t bytes; unsigned instance, compute_instance; } ProcessInfo;

static int list_processes(const Gpu *g, const Handle *h, int mps, unsigned *count, ProcessInfo *out) {
    unsigned room = *count, n = 0;
    for (int i = 0; i < PROCESSES; i++) {
        const Process *p = &g->processes[i];
        if (!alive(p) || (int)p->mps != mps || (h->instance >= 0 && p->instance != (uint32_t)h->instance)) continue;
        if (out && n < room) out[n] = (ProcessInfo){p->pid, p->bytes, ~0u, ~0u};
        n++;
    }
    *count = n;
    return n > room ? INSUFFICIENT_SIZE : OK;
}

API nvmlDeviceGetComputeRunningProcesses_v3(Handle *device, unsigned *count, ProcessInfo *out) {
    DEVICE(device)
    return list_processes(g, h, 0, count, out);
}
API nvmlDeviceGetMPSComputeRunningProcesses_v3(Handle *device, unsigned *count, ProcessInfo *out) {
    DEVICE(device)
    return list_processes(g, h, 1, count, out);
}
API nvmlDeviceGetGraphicsRunningProcesses_v3(Handle *device, unsigned *count, ProcessInfo *out) {
    WHOLE(device)
    (void)out;
    *count = 0;
    return OK;
}
typedef struct { unsigned pid; uint64_t time_us; unsigned sm, memory, encoder, decoder; } ProcessSample;
API nvmlDeviceGetProcessUtilization(Handle *device, ProcessSample *out, unsigned *count, uint64_t since_us) {
    WHOLE(device)
    if (g->mig_mode) return NOT_SUPPORTED;
    (void)since_us;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    unsigned room = *count, n = 0;
    for (int i = 0; i < PROCESSES; i++) {
        const Process *p = &g->processes[i];
        if (!alive(p)) continue;
        if (out && n < room)
            out[n] = (ProcessSample){p->pid, (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000, p->sm_util,
                                     p->memory_util, 0, 0};
        n++;
    }
    *count = n;
    if (!n) return NOT_FOUND;
    return n > room ? INSUFFICIENT_SIZE : OK;
}

/* --- fields -------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint32_t field, scope;
    int64_t timestamp_us, latency_us;
    unsigned type;
    int code;
    union { double d; unsigned u; uint64_t ull; } value;
} FieldValue;

static int field(const Gpu *g, FieldValue *v) {
    unsigned links = 0;
    for (int i = 0; i < LINKS; i++) links += g->links[i].active != 0;
    v->value.ull = 0;
    v->type = 1; /* unsigned int */
    switch (v->field) {
    case 1: case 2: v->value.u = g->ecc_enabled; return OK;
    case 3: case 4: case 5: case 6:
        v->type = 3; /* unsigned long long */
        v->value.ull = g->ecc[(v->field - 3) % 2][(v->field - 3) / 2];
        return g->ecc_enabled ? OK : NOT_SUPPORTED;
    case 82: v->value.u = (unsigned)g->memory_temperature; return OK;
    case 83: v->type = 3; v->value.ull = energy_mj(g); return OK;
    case 91: v->value.u = links ? LINKS : 0; return OK;
    case 142: case 143: case 144: case 145: v->value.u = g->remapped[v->field - 142]; return OK;
    case 185: case 186: v->value.u = g->power_mw; return OK;
    case 190: v->value.u = g->power_limit_mw; return OK;
    case 230: v->value.u = g->recovery_action; return OK;
    default: return NOT_SUPPORTED;
    }
}

API nvmlDeviceGetFieldValues(Handle *device, int count, FieldValue *out) {
    WHOLE(device)
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    for (int i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "field %u", out[i].field);
        out[i].timestamp_us = (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
        out[i].latency_us = 0;
        int code = planned(name, h->gpu);
        out[i].code = code ? code : field(g, &out[i]);
    }
    return OK;
}

/* --- events -------------------------------------------------------------------------------------------------------- */

typedef struct { Handle *device; uint64_t type, data; unsigned instance, compute_instance; } EventData;

API nvmlEventSetCreate(EventSet **out) {
    DRIVER
    pthread_mutex_lock(&lock);
    EventSet *set = NULL;
    for (int i = 0; i < EVENT_SETS && !set; i++)
        if (!event_sets[i].used) set = &event_sets[i];
    if (set) {
        memset(set, 0, sizeof *set);
        set->used = 1;
        set->seen = __atomic_load_n(&state->events_begun, __ATOMIC_ACQUIRE);
    }
    pthread_mutex_unlock(&lock);
    *out = set;
    return set ? OK : 23; /* insufficient resources */
}
GET(nvmlDeviceGetSupportedEventTypes, uint64_t, g->event_types)
API nvmlDeviceRegisterEvents(Handle *device, uint64_t types, EventSet *set) {
    WHOLE(device)
    if (!set || !set->used) return INVALID_ARGUMENT;
    if (types & ~g->event_types) return NOT_SUPPORTED;
    set->types[h->gpu] |= types;
    return OK;
}
/* What has happened is told first, and only then that a device is lost. */
API nvmlEventSetWait_v2(EventSet *set, EventData *out, unsigned timeout_ms) {
    DRIVER
    if (!set || !set->used) return INVALID_ARGUMENT;
    uint64_t end_ns = monotonic_ns() + (uint64_t)timeout_ms * 1000000u;
    for (;;) {
        uint64_t begun = __atomic_load_n(&state->events_begun, __ATOMIC_ACQUIRE);
        if (begun > EVENTS && set->seen < begun - EVENTS) set->seen = begun - EVENTS;
        while (set->seen < begun) {
            const Event *e = &state->events[set->seen++ % EVENTS];
            if (e->gpu < GPUS && set->types[e->gpu] & e->type) {
                *out = (EventData){&wholes[e->gpu], e->type, e->data, e->part ? e->part : ~0u, e->part ? 0 : ~0u};
                return OK;
            }
        }
        for (unsigned i = 0; i < state->count; i++)
            if (set->types[i] && (state->gpus[i].lost || state->gpus[i].generation != generations[i]))
                return GPU_IS_LOST;
        if (monotonic_ns() >= end_ns) return TIMEOUT;
        tick();
    }
}
API nvmlEventSetFree(EventSet *set) {
    DRIVER
    if (!set || !set->used) return INVALID_ARGUMENT;
    set->used = 0;
    return OK;
}
