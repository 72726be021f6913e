// CUDA devices whose memory is the host's and whose kernels are the CPU's.
//
// A tensor on a rehearsed device is a CUDA tensor for all of PyTorch: its dispatch keys, its storage's device, the
// threads in which its gradients are computed. One boxed kernel stands at every operator's CUDA entry; it hands the
// tensors' bytes to the operator's CPU kernel, refuses tensors of both devices as CUDA's kernels do, and gives back
// tensors of the device. Work is done when the call returns.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>

#include "host.h"

namespace rehearsal {

namespace {

constexpr int kMostDevices = 16;
int devices = 1;
thread_local int here = 0;
thread_local int64_t streams[kMostDevices] = {};

struct Used {
  std::atomic<int64_t> now{0}, most{0}, total{0};
};
Used used[kMostDevices];

void count(int device, int64_t bytes) {
  auto& mine = used[device];
  const int64_t now = mine.now += bytes;
  if (bytes > 0) mine.total += bytes;
  int64_t most = mine.most;
  while (now > most && !mine.most.compare_exchange_weak(most, now)) {
  }
}

// What a device's storage holds: bytes that the CPU's allocator gave.
struct Block {
  c10::DataPtr bytes;
  size_t size;
  int device;
};

void free_block(void* block) {
  auto* mine = static_cast<Block*>(block);
  count(mine->device, -static_cast<int64_t>(mine->size));
  delete mine;
}

c10::DataPtr device_pointer(c10::DataPtr bytes, size_t size, int device) {
  count(device, static_cast<int64_t>(size));
  void* data = bytes.get();
  auto* block = new Block{std::move(bytes), size, device};
  return {data, block, &free_block, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device))};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    return device_pointer(c10::GetCPUAllocator()->allocate(size), size, here);
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
DeviceAllocator device_allocator;

char recorded[1];  // all that an event is: work is done when it is recorded

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, static_cast<c10::DeviceIndex>(here)}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { here = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    static std::atomic<int64_t> last{0};
    return c10::Stream(c10::Stream::UNSAFE, device, ++last);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = recorded;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(devices); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
};

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;

void unpin(void* bytes) {
  {
    const std::lock_guard lock(pinned_mutex);
    pinned.erase(static_cast<char*>(bytes));
  }
  c10::GetCPUAllocator()->raw_deallocate(bytes);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* bytes = c10::GetCPUAllocator()->raw_allocate(size + 1);
    const std::lock_guard lock(pinned_mutex);
    pinned[static_cast<char*>(bytes)] = size + 1;
    return {bytes, bytes, &unpin, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* bytes) {
  const std::lock_guard lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(bytes));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(bytes) < after->first + after->second;
}

}  // namespace

void set_device_count(int count) { devices = count; }
int device_count() { return devices; }
int current_device() { return here; }

void set_current_device(int index) {
  TORCH_CHECK(index >= 0 && index < devices, "CUDA error: invalid device ordinal ", index, " of ", devices);
  here = index;
}

Counters counters(int device) { return {used[device].now, used[device].most, used[device].total}; }
void reset_peak(int device) { used[device].most = used[device].now.load(); }

namespace {

// The bytes of a storage, which keep it alive.
c10::DataPtr bytes_of(const c10::Storage& storage) {
  return {storage.mutable_data(), new c10::Storage(storage),
          [](void* held) { delete static_cast<c10::Storage*>(held); }, c10::Device(c10::kCPU)};
}

c10::Storage host_storage(const c10::Storage& storage) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), bytes_of(storage), c10::GetCPUAllocator(), true));
}

// A tensor over a storage, laid out as another is over its own.
at::Tensor over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  return tensor;
}

}  // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  return over(host_storage(tensor.storage()), c10::DispatchKey::CPU, tensor);
}

namespace {

// A storage of the CPU as a device's, whose block keeps the CPU's alive.
c10::Storage device_storage(const c10::Storage& host, int device) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), host.nbytes(), device_pointer(bytes_of(host), host.nbytes(), device),
      &device_allocator, true));
}

}  // namespace

at::Tensor on_device(const at::Tensor& tensor, int device) {
  return over(device_storage(tensor.storage(), device), c10::DispatchKey::CUDA, tensor);
}

namespace {

// One call of an operator: which host tensors stand for which of the device.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op) {}

  void run(torch::jit::Stack* stack) {
    const auto& arguments = op_.schema().arguments();
    const size_t begin = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) (*stack)[begin + i] = to_host((*stack)[begin + i]);
    check_devices();
    const int device = device_ < 0 ? here : device_;
    {
      const DeviceRandom random(op_, stack, begin);
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
    for (auto& [host, original] : tensors_) follow(host, original, device);
    for (size_t i = stack->size() - op_.schema().returns().size(); i < stack->size(); ++i)
      (*stack)[i] = to_device((*stack)[i], device);
  }

  // The random numbers of a device are not those of the host.
  struct DeviceRandom {
    DeviceRandom(const c10::OperatorHandle& op, torch::jit::Stack* stack, size_t begin);
    ~DeviceRandom();
    bool swapped = false;
    at::Tensor before;
  };

 private:
  at::Tensor host_of(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      has_host_ |= tensor.is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    TORCH_CHECK(
        device_ < 0 || device_ == tensor.get_device() || tensor.dim() == 0,
        "Expected all tensors to be on the same device, but found at least two devices, cuda:", device_, " and cuda:",
        tensor.get_device(), "! (", op_.schema().name(), ")");
    if (device_ < 0 || tensor.dim() > 0) device_ = tensor.get_device();
    for (const auto& [host, original] : tensors_)
      if (original.is_same(tensor)) return host;
    auto host = over(host_of(tensor.storage()), c10::DispatchKey::CPU, tensor);
    tensors_.emplace_back(host, tensor);
    return host;
  }

  c10::Storage host_of(const c10::Storage& storage) {
    for (const auto& [host, original] : storages_)
      if (original.is_alias_of(storage)) return host;
    storages_.emplace_back(host_storage(storage), storage);
    return storages_.back().first;
  }

  c10::IValue to_host(const c10::IValue& value) {
    if (value.isTensor()) return host_of(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(host_of(each));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
        list.push_back(each.has_value() ? std::optional<at::Tensor>(host_of(*each)) : std::nullopt);
      return list;
    }
    if (value.isStorage() && value.toStorage().device().is_cuda()) return host_of(value.toStorage());
    if (value.isDevice() && value.toDevice().is_cuda()) {
      const auto device = value.toDevice();
      device_ = device.has_index() ? device.index() : here;
      TORCH_CHECK(device_ < devices, "CUDA error: invalid device ordinal ", device_, " of ", devices);
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  // CUDA's kernels take numbers of the host beside tensors of the device, and indices of it, but no other tensors.
  void check_devices() const {
    if (device_ < 0 || !has_host_) return;
    static const std::set<std::string> both = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_",
        "aten::_unsafe_index.Tensor", "aten::index_put", "aten::_foreach_copy_", "aten::set_.source_Tensor"};
    TORCH_CHECK(
        both.count(toString(op_.operator_name())) || both.count(op_.schema().name()),
        "Expected all tensors to be on the same device, but found at least two devices, cuda:", device_,
        " and cpu! (", op_.schema().name(), ")");
  }

  c10::Storage storage_of(const c10::Storage& host, int device) {
    for (const auto& [mine, original] : storages_)
      if (mine.is_alias_of(host)) return original;
    storages_.emplace_back(host, device_storage(host, device));
    return storages_.back().second;
  }

  // An argument that the operator gave other sizes, or other memory, as `resize_` and `set_` do.
  void follow(const at::Tensor& host, const at::Tensor& original, int device) {
    auto* impl = original.unsafeGetTensorImpl();
    auto* storage = original.storage().unsafeGetStorageImpl();
    const bool is_known = std::any_of(storages_.begin(), storages_.end(), [&](const auto& pair) {
      return pair.first.is_alias_of(host.storage());
    });
    if (!is_known || !storage_of(host.storage(), device).is_alias_of(original.storage())) {
      impl->set_storage_keep_dtype(storage_of(host.storage(), device));
    } else if (host.storage().data() != storage->data() || host.storage().nbytes() != storage->nbytes()) {
      auto moved = device_storage(host.storage(), original.get_device());
      storage->set_data_ptr_noswap(std::move(moved.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
      storage->set_nbytes(host.storage().nbytes());
    }
    if (impl->sizes() != host.sizes() || impl->strides() != host.strides() ||
        impl->storage_offset() != host.storage_offset())
      impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

  at::Tensor device_of(const at::Tensor& host, int device) {
    if (!host.defined() || !host.is_cpu()) return host;
    for (const auto& [mine, original] : tensors_)
      if (mine.is_same(host)) return original;
    return over(storage_of(host.storage(), device), c10::DispatchKey::CUDA, host);
  }

  c10::IValue to_device(const c10::IValue& value, int device) {
    if (value.isTensor()) return device_of(value.toTensor(), device);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(device_of(each, device));
      return list;
    }
    return value;
  }

  const c10::OperatorHandle& op_;
  int device_ = -1;
  bool has_host_ = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
};

at::Tensor random_states[kMostDevices];

Call::DeviceRandom::DeviceRandom(const c10::OperatorHandle& op, torch::jit::Stack* stack, size_t begin) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return;
  for (size_t i = begin; i < stack->size(); ++i)
    if ((*stack)[i].isGenerator()) return;
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  before = generator.get_state();
  if (random_states[here].defined()) generator.set_state(random_states[here]);
  swapped = true;
}

Call::DeviceRandom::~DeviceRandom() {
  if (!swapped) return;
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  random_states[here] = generator.get_state();
  generator.set_state(before);
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  Call(op).run(stack);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  const at::AutoDispatchBelowADInplaceOrView below;
  on_host(self).copy_(on_host(source));
  return self;
}

void record_stream(at::Tensor&, c10::Stream) {}

bool is_enabled(at::SDPBackend backend) {
  const auto& context = at::globalContext();
  switch (backend) {
    case at::SDPBackend::flash_attention: return context.userEnabledFlashSDP();
    case at::SDPBackend::efficient_attention: return context.userEnabledMemEfficientSDP();
    case at::SDPBackend::cudnn_attention: return context.userEnabledCuDNNSDP();
    case at::SDPBackend::math: return context.userEnabledMathSDP();
    default: return false;
  }
}

int64_t choose_attention(
    const at::Tensor& query, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& mask, double, bool,
    std::optional<double>, bool) {
  for (const at::SDPBackend backend : at::globalContext().sDPPriorityOrder()) {
    if (!is_enabled(backend)) continue;
    if (backend != at::SDPBackend::cudnn_attention) return 0;  // by plain operations
    const bool is_half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
    if (is_half && query.size(-1) % 8 == 0 && !mask) return static_cast<int64_t>(backend);
  }
  return static_cast<int64_t>(at::SDPBackend::error);
}

// Operators' entries for CUDA: those that the wheel's CUDA library fills, and what has none of its own there.
void stand_in_for_kernels() {
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  static torch::Library all(torch::Library::IMPL, "_", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  static std::vector<std::unique_ptr<torch::Library>> others;
  static std::map<std::string, torch::Library*> by_namespace{{"aten", &aten}};
  const std::set<std::string> own = {"aten::copy_", "aten::record_stream", "aten::_fused_sdp_choice"};
  struct Silence final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto space = name.getNamespace().value_or("");
    if (space == "c10d" || space == "_c10d_functional" || own.count(c10::toString(name))) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    auto& library = by_namespace[std::string(space)];
    if (library == nullptr) {
      others.push_back(std::make_unique<torch::Library>(
          torch::Library::IMPL, std::string(space), c10::DispatchKey::CUDA, __FILE__, __LINE__));
      library = others.back().get();
    }
    library->impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
  aten.impl("copy_", TORCH_FN(copy_));
  aten.impl("record_stream", TORCH_FN(record_stream));
  aten.impl("_fused_sdp_choice", TORCH_FN(choose_attention));
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);  // scaled_dot_product_attention's
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

void resize_storage(const at::Tensor& any_of_storage, int64_t size) {
  auto* storage = any_of_storage.storage().unsafeGetStorageImpl();
  auto fresh = device_allocator.allocate(static_cast<size_t>(size));
  std::memcpy(fresh.get(), storage->data(), std::min<size_t>(size, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(size);
}

}  // namespace

at::Tensor random_state(int device) {
  if (!random_states[device].defined()) random_states[device] = at::detail::createCPUGenerator(device).get_state();
  return random_states[device].clone();
}
void set_random_state(int device, const at::Tensor& state) { random_states[device] = state.clone(); }

}  // namespace rehearsal

namespace at {

// What the CPU's side of PyTorch asks of CUDA.
struct RehearsedHooks final : CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(rehearsal::device_count()); }
  int getNumGPUs() const override { return rehearsal::device_count(); }
  DeviceIndex current_device() const override { return static_cast<DeviceIndex>(rehearsal::current_device()); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { rehearsal::set_current_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = current_device();
    rehearsal::set_current_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return rehearsal::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &rehearsal::pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &rehearsal::device_allocator; }
  void deviceSynchronize(DeviceIndex) const override {}
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91900; }
  long versionRuntimeCuDNN() const override { return 91900; }
  long versionCuDNNFrontend() const override { return 11600; }
  long versionCUDART() const override { return 13000; }
};

}  // namespace at

namespace rehearsal {

// PyTorch has made its hooks while it was imported, and keeps them: the object stays, its functions become these.
void replace_hooks() {
  static const at::RehearsedHooks hooks;
  auto* kept = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(kept), static_cast<const void*>(&hooks), sizeof(void*));
}

void install() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)].store(new Guard());
  c10::SetAllocator(c10::kCUDA, &device_allocator, 255);
  replace_hooks();
  stand_in_for_kernels();
}

}  // namespace rehearsal

namespace rehearsal {
void bind_groups(py::module_& m);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  rehearsal::bind_groups(m);
  m.def("install", &rehearsal::install);
  m.def("set_device_count", &rehearsal::set_device_count);
  m.def("device_count", &rehearsal::device_count);
  m.def("current_device", &rehearsal::current_device);
  m.def("set_device", &rehearsal::set_current_device);
  m.def("memory", [](int device) {
    const auto now = rehearsal::counters(device);
    return std::make_tuple(now.now, now.most, now.total);
  });
  m.def("current_stream", [](int device) { return rehearsal::Guard().getStream({c10::kCUDA, c10::DeviceIndex(device)}).id(); });
  m.def("set_stream", [](int64_t stream, int device) {
    rehearsal::Guard().exchangeStream(c10::Stream(c10::Stream::UNSAFE, {c10::kCUDA, c10::DeviceIndex(device)}, stream));
  });
  m.def("reset_peak", &rehearsal::reset_peak);
  m.def("random_state", &rehearsal::random_state);
  m.def("set_random_state", &rehearsal::set_random_state);
  m.def("resize_storage", &rehearsal::resize_storage);
}
