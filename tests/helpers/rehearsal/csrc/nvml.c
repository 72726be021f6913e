// The driver's management library of a machine with H100s: as much of it as is asked before torch is imported.
#include <stdlib.h>
#include <string.h>

typedef void *nvmlDevice_t;

static unsigned count(void) {
  const char *devices = getenv("REHEARSED_DEVICES");
  return devices ? (unsigned)atoi(devices) : 0;
}

int nvmlInit_v2(void) { return 0; }
int nvmlInit(void) { return 0; }
int nvmlShutdown(void) { return 0; }

int nvmlDeviceGetCount_v2(unsigned *devices) {
  *devices = count();
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
  *device = (nvmlDevice_t)(size_t)(index + 1);
  return index < count() ? 0 : 2;
}

int nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
  *major = 9;
  *minor = 0;
  return 0;
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
  const char *driver = getenv("REHEARSED_DRIVER");
  strncpy(version, driver ? driver : "580.95.05", length);
  return 0;
}
