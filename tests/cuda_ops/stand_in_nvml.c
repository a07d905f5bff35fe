/* What torch asks of the management library before it maps memory into an expandable segment: there is no fabric. */

int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13020; return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { *device = (void *)4096; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *kind) { return 3; /* not supported */ }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return 3; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *infos) { *count = 0; return 0; }
