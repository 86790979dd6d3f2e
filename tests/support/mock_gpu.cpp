// A device of its own in the memory of the host, for tests of what needs a GPU.
//
// Operations copy their tensors to the CPU, compute there and copy the results back. An operation
// with tensors of different devices is refused, as CUDA refuses it. There are several devices. A
// call returns when its work is done.
//
// It uses PrivateUse1, the device type that torch leaves to others.

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_native_batch_norm_legit_ops.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm_backward_ops.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <chrono>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 4;

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kDevices] = {};
std::atomic<c10::StreamId> last_stream{0};

// ---- memory ----

void release(void* memory) { c10::free_cpu(memory); }

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes == 0 ? nullptr : c10::alloc_cpu(bytes);
    return {memory, memory, &release, c10::Device(kType, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

DeviceAllocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

// ---- devices, streams and events ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device next) const override {
    const auto before = getDevice();
    setDevice(next);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device next) const override {
    TORCH_CHECK(next.index() >= 0 && next.index() < kDevices, "no device ", next);
    current_device = next.index();
  }
  void uncheckedSetDevice(c10::Device next) const noexcept override {
    current_device = next.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    const auto real = device.has_index() ? device : getDevice();
    return c10::Stream(c10::Stream::UNSAFE, real, current_streams[real.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device.has_index() ? device : getDevice(), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const auto real = device.has_index() ? device : getDevice();
    return c10::Stream(c10::Stream::UNSAFE, real, ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = getStream(next.device());
    current_streams[next.device().index()] = next.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  using Clock = std::chrono::steady_clock;
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    if (*event == nullptr) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto& begin = *static_cast<Clock::time_point*>(from);
    const auto passed = *static_cast<Clock::time_point*>(to) - begin;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex next) const override { Guard().setDevice({kType, next}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex next) const override {
    return Guard().exchangeDevice({kType, next}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex next) const override {
    return next < 0 ? current_device : exchangeDevice(next);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(c10::kCPU);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// ---- tensors ----

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::OptionalDeviceGuard guard_of(std::optional<c10::Device> device) {
  const bool is_given = device.has_value() && device->has_index();
  return c10::OptionalDeviceGuard(is_given ? device : std::nullopt);
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  const auto guard = guard_of(device);
  return at::detail::empty_generic(
      size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  const auto guard = guard_of(device);
  return at::detail::empty_strided_generic(
      size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

// The memory of a tensor of any device as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto alias = at::from_blob(
      tensor.mutable_data_ptr(),
      tensor.sizes(),
      tensor.strides(),
      tensor.options().device(c10::kCPU).requires_grad(false));
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(self));
  return target;
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  if (self.sizes() == size && !format) return self;
  tensor->set_sizes_contiguous(size);
  if (format) tensor->empty_tensor_restride(*format);
  auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  const size_t bytes = (self.storage_offset() + self.numel()) * self.itemsize();
  if (bytes > storage->nbytes()) {
    c10::DeviceGuard guard(self.device());
    auto memory = allocator.allocate(bytes);
    if (storage->nbytes()) std::memcpy(memory.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr(std::move(memory));
    storage->set_nbytes(bytes);
  }
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  resize_(target, self.sizes(), std::nullopt);
  return copy_from(self, target, false);
}

at::Tensor& set_storage(
    at::Tensor& self,
    at::Storage storage,
    int64_t offset,
    c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_storage_offset(offset);
  tensor->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const int64_t elements = storage.nbytes() / self.itemsize();
  return set_storage(self, std::move(storage), 0, {elements}, {1});
}

void record_stream(at::Tensor&, c10::Stream) {}

// What `tensor.data = data` does, which torch refuses if only one of both is of PrivateUse1. It
// allows it for a tensor of the CPU and one of CUDA
// (TensorImpl::has_compatible_shallow_copy_type).
void set_data(const at::Tensor& self, const at::Tensor& data) {
  if (auto* meta = torch::autograd::impl::get_autograd_meta(self)) {
    std::lock_guard<std::mutex> lock(meta->mutex_);
    meta->grad_accumulator_.reset();  // it knows the former device
  }
  self.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

// ---- operations ----

// The devices must be equal, except for numbers (tensors without dimensions) of the CPU.
void check_device(const c10::OperatorHandle& op, const at::Tensor& tensor, c10::Device& common) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return;
  if (common.is_cpu() && !tensor.is_cpu()) common = tensor.device();
  TORCH_CHECK(
      tensor.device() == common,
      "Expected all tensors to be on the same device, but found at least two devices, ", common,
      " and ", tensor.device(), "! (", op.schema().name(), ")");
}

void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  c10::Device common(c10::kCPU);
  const auto look_for_device = [&common](const at::Tensor& tensor) {
    if (tensor.defined() && !tensor.is_cpu() && common.is_cpu()) common = tensor.device();
  };
  for (const auto& argument : arguments) {
    if (argument.isTensor()) look_for_device(argument.toTensor());
    if (argument.isTensorList())
      for (const auto& tensor : argument.toTensorVector()) look_for_device(tensor);
  }
  // indices of any device may select elements: their lists have optional tensors, not seen here
  for (const auto& argument : arguments) {
    if (argument.isTensor()) check_device(op, argument.toTensor(), common);
    if (argument.isTensorList() && op.schema().name().rfind("aten::_foreach", 0) != 0)
      for (const auto& tensor : argument.toTensorVector()) check_device(op, tensor, common);
  }
  at::native::cpu_fallback(op, stack);
}

template <class Op, class... Arguments>
auto call_on_host(const Arguments&... arguments) {
  return at::native::call_fallback_fn<&compute_on_host, Op>::call(arguments...);
}

// torch calls these for convolutions of a device that it does not know.
at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups) {
  return call_on_host<at::_ops::convolution>(
      input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient,
    const at::Tensor& input,
    const at::Tensor& weight,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> mask) {
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  const at::OptionalIntArrayRef bias_sizes(at::IntArrayRef{channels});
  return call_on_host<at::_ops::convolution_backward>(
      gradient, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
      groups, mask);
}

// The schema does not say that the running statistics change, so they would change on the CPU only.
std::tuple<at::Tensor, at::Tensor, at::Tensor> native_batch_norm(
    const at::Tensor& input,
    const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_variance,
    bool train,
    double momentum,
    double epsilon) {
  if (!running_mean.has_value() || !running_mean->defined()) {
    return call_on_host<at::_ops::_native_batch_norm_legit_no_stats>(
        input, weight, bias, train, momentum, epsilon);
  }
  at::Tensor mean = *running_mean, variance = *running_variance;
  return at::native::call_fallback_fn<&compute_on_host, at::_ops::_native_batch_norm_legit>::call(
      input, weight, bias, mean, variance, train, momentum, epsilon);
}

// As at::native::batch_norm_backward_cuda: what its kernel that computes no gradient of the inputs
// requires.
std::tuple<at::Tensor, at::Tensor, at::Tensor> native_batch_norm_backward(
    const at::Tensor& gradient,
    const at::Tensor& input,
    const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_variance,
    const std::optional<at::Tensor>& save_mean,
    const std::optional<at::Tensor>& save_invstd,
    bool train,
    double epsilon,
    std::array<bool, 3> mask) {
  const bool has_mean = save_mean.has_value() && save_mean->defined();
  TORCH_INTERNAL_ASSERT(mask[0] || has_mean, "save_mean should always be defined\n");
  return call_on_host<at::_ops::native_batch_norm_backward>(
      gradient, input, weight, running_mean, running_variance, save_mean, save_invstd, train,
      epsilon, mask);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("record_stream", &record_stream);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("native_batch_norm", &native_batch_norm);
  m.impl("native_batch_norm_backward", &native_batch_norm_backward);
}

TORCH_LIBRARY(mock_gpu, m) { m.def("set_data", &set_data); }

// ---- autocast, with the rules of CUDA ----

#define LOWER(...) KERNEL(kType, __VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL(kType, __VA_ARGS__, fp32)
#define FLOAT32_BY_DTYPE(...) KERNEL(kType, __VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL(kType, __VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_BY_DTYPE)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace
