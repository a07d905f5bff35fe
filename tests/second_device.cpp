// A device in host memory whose tensors are not the CPU's, and whose random numbers are its own, see second_device.py.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;

// Counts its bytes, as CUDA's does: those that are allocated now, and the most since the last reset.
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* data = n ? c10::alloc_cpu(n) : nullptr;
    if (data) {
      std::lock_guard<std::mutex> held(mutex);
      sizes[data] = n;
      live += n;
      peak = std::max(peak, live);
    }
    return {data, data, &release, c10::Device(DEVICE, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  static void release(void* data) {
    if (!data) return;
    {
      std::lock_guard<std::mutex> held(mutex);
      live -= sizes.at(data);
      sizes.erase(data);
    }
    c10::free_cpu(data);
  }
  static inline std::mutex mutex;
  static inline std::unordered_map<void*, int64_t> sizes;
  static inline int64_t live = 0, peak = 0;
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
};
Allocator allocator;
REGISTER_ALLOCATOR(DEVICE, &allocator);

// Everything runs at once: there is one stream, and an event has always happened.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<DEVICE> {
  c10::Device exchangeDevice(c10::Device) const override { return {DEVICE, 0}; }
  c10::Device getDevice() const override { return {DEVICE, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  static c10::Stream stream() noexcept { return c10::Stream(c10::Stream::DEFAULT, c10::Device(DEVICE, 0)); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  Generator() {
    device_ = c10::Device(DEVICE, 0);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

const at::Generator& default_generator() {
  static auto generator = at::make_generator<Generator>();
  return generator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  at::Device getDeviceFromPtr(void*) const override { return {DEVICE, 0}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    c10::DataPtr data = allocator.allocate(n);
    if (size_t kept = std::min(n, storage.nbytes())) std::memcpy(data.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(n);
  }
};

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor on_cpu(const at::Tensor& tensor) {  // the same memory
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  at::Tensor target = to.is_cpu() ? to : on_cpu(to);
  target.copy_(from.is_cpu() ? from : on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return on_cpu(tensor).item(); }

// Random numbers come from the device's generator, by the kernels of CPU's.
template <class Draw>
at::Tensor& drawn(at::Tensor& self, const std::optional<at::Generator>& given, Draw draw) {
  at::Generator ours = given && given->defined() ? *given : default_generator();
  at::Generator cpus = at::make_generator<at::CPUGeneratorImpl>();
  cpus.set_state(ours.get_state());
  draw(on_cpu(self), cpus);
  ours.set_state(cpus.get_state());
  return self;
}

at::Tensor& bernoulli_(at::Tensor& self, double p, std::optional<at::Generator> generator) {
  return drawn(self, generator, [&](at::Tensor t, at::Generator g) { t.bernoulli_(p, g); });
}
at::Tensor& bernoulli_tensor_(at::Tensor& self, const at::Tensor& p, std::optional<at::Generator> generator) {
  return drawn(self, generator, [&](at::Tensor t, at::Generator g) { t.bernoulli_(p.is_cpu() ? p : on_cpu(p), g); });
}
at::Tensor& uniform_(at::Tensor& self, double from, double to, std::optional<at::Generator> generator) {
  return drawn(self, generator, [&](at::Tensor t, at::Generator g) { t.uniform_(from, to, g); });
}
at::Tensor& normal_(at::Tensor& self, double mean, double std, std::optional<at::Generator> generator) {
  return drawn(self, generator, [&](at::Tensor t, at::Generator g) { t.normal_(mean, std, g); });
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

at::Generator the_generator() { return default_generator(); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("bernoulli_.float", &bernoulli_);
  m.impl("bernoulli_.Tensor", &bernoulli_tensor_);
  m.impl("uniform_", &uniform_);
  m.impl("normal_", &normal_);
}

int64_t allocated_bytes() { return Allocator::live; }
int64_t peak_bytes() { return Allocator::peak; }
void reset_peak() { Allocator::peak = Allocator::live; }

TORCH_LIBRARY(toy, m) {
  m.def("default_generator", &the_generator);
  m.def("allocated_bytes", &allocated_bytes);
  m.def("peak_bytes", &peak_bytes);
  m.def("reset_peak", &reset_peak);
}

const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

}  // namespace
