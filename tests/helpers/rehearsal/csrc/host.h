// Tensors of the rehearsed device and their bytes, which are the host's.
#pragma once

#include <ATen/ATen.h>

namespace rehearsal {

// The number of rehearsed devices, and the one on which this thread works.
void set_device_count(int count);
int device_count();
int current_device();
void set_current_device(int index);

// Bytes that live on a device: now, the most since `reset_peak`, and all that were ever allocated.
struct Counters {
  int64_t now, most, total;
};
Counters counters(int device);
void reset_peak(int device);

// A CUDA tensor's bytes as a tensor of the CPU, which keeps them alive; other tensors as they are.
at::Tensor on_host(const at::Tensor& tensor);

// A tensor of the CPU as one of a device, which takes its bytes over.
at::Tensor on_device(const at::Tensor& tensor, int device);

}  // namespace rehearsal
