/* A GPU's driver and runtime for torch's host code: one device that keeps memory and computes nothing.

Put before the CUDA runtime (LD_PRELOAD) it lets a CUDA build of torch choose its ops as it does on that device, for
fake tensors, on a machine without a GPU. Which device: STAND_IN_CAPABILITY, "9.0" if not set. A kernel that is launched
ends the process.

What belongs to cuDNN: a handle, without which torch does not get as far as choosing its op for a recurrent layer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cuda.h>
#include <cuda_runtime_api.h>
#undef cudaGetDeviceProperties

#define MEMORY_BYTES (80UL << 30)
#define ADDRESSES (1UL << 42)
#define PAGE (2UL << 20)
#define VERSION CUDART_VERSION
#define OK(name, ...) \
    cudaError_t name(__VA_ARGS__) { return cudaSuccess; }

static void capability(int *major, int *minor) {
    const char *given = getenv("STAND_IN_CAPABILITY");
    if (sscanf(given ? given : "9.0", "%d.%d", major, minor) != 2) {
        fprintf(stderr, "STAND_IN_CAPABILITY is to be like 9.0\n");
        abort();
    }
}

/* Device. */

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = VERSION; return cudaSuccess; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, "stand-in");
    capability(&found->major, &found->minor);
    found->totalGlobalMem = MEMORY_BYTES;
    found->multiProcessorCount = 132;
    found->warpSize = 32;
    found->sharedMemPerBlock = 48 << 10;
    found->sharedMemPerBlockOptin = found->major >= 9 ? 227 << 10 : 163 << 10;
    found->sharedMemPerMultiprocessor = found->sharedMemPerBlockOptin + (1 << 10);
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsPerMultiProcessor = 2048;
    found->regsPerBlock = 65536;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->l2CacheSize = 50 << 20;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    int major, minor;
    capability(&major, &minor);
    *value = attribute == cudaDevAttrComputeCapabilityMajor   ? major
             : attribute == cudaDevAttrComputeCapabilityMinor ? minor
             : attribute == cudaDevAttrMultiProcessorCount    ? 132
                                                              : 0;
    return cudaSuccess;
}

OK(cudaGetLastError, void)
OK(cudaPeekAtLastError, void)
OK(cudaDeviceSynchronize, void)
OK(cudaThreadExchangeStreamCaptureMode, enum cudaStreamCaptureMode *mode)

/* Memory. */

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = *total_bytes = MEMORY_BYTES;
    return cudaSuccess;
}

/* Addresses ascend, and none comes twice. Only what is written takes memory. */
static char *place(size_t bytes) {
    static char *next, *end;
    if (!next) {
        next = mmap(NULL, ADDRESSES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (next == MAP_FAILED) {
            fprintf(stderr, "no addresses\n");
            abort();
        }
        next = (char *)(((size_t)next + PAGE - 1) & ~(PAGE - 1));
        end = next + ADDRESSES - PAGE;
    }
    char *found = next;
    next += (bytes + PAGE - 1) & ~(PAGE - 1);
    return next < end ? found : NULL;
}

cudaError_t cudaMalloc(void **made, size_t bytes) {
    *made = place(bytes);
    return *made ? cudaSuccess : cudaErrorMemoryAllocation;
}

OK(cudaFree, void *memory)

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    memcpy(to, from, bytes);
    return cudaSuccess;
}

/* Streams and events: all is done at once. With STAND_IN_CAPTURES in the environment a CUDA graph is being captured. */

static enum cudaStreamCaptureStatus capturing(void) {
    return getenv("STAND_IN_CAPTURES") ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

static void *handle(void) {
    static long last = 4096;
    return (void *)(last += 64);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
    *made = handle();
    return cudaSuccess;
}
OK(cudaStreamSynchronize, cudaStream_t stream)
OK(cudaStreamQuery, cudaStream_t stream)
OK(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags)

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = capturing();
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **from, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    *status = capturing();
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) { *made = handle(); return cudaSuccess; }
OK(cudaEventRecord, cudaEvent_t event, cudaStream_t stream)
OK(cudaEventRecordWithFlags, cudaEvent_t event, cudaStream_t stream, unsigned flags)
OK(cudaEventQuery, cudaEvent_t event)
OK(cudaEventSynchronize, cudaEvent_t event)
OK(cudaEventDestroy, cudaEvent_t event)

/* Kernels. */

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) {
    fprintf(stderr, "a kernel was launched: something was not a fake tensor\n");
    abort();
}

/* Driver. */

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)4096; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

static CUresult nothing(void) { return CUDA_SUCCESS; }

static CUresult reserve(CUdeviceptr *made, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    *made = (CUdeviceptr)place(bytes);
    return *made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    *found = !strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)cuDevicePrimaryCtxGetState
             : !strcmp(name, "cuMemAddressReserve")      ? (void *)reserve
                                                         : (void *)nothing;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* cuDNN. */

int cudnnCreate(void **made) { *made = handle(); return 0; }
int cudnnDestroy(void *made) { return 0; }
int cudnnSetStream(void *made, void *stream) { return 0; }
