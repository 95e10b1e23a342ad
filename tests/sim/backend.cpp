// Simulated accelerators: the devices sim:0, sim:1, ... of a PyTorch PrivateUse1 backend.
//
// A device is a tag on ordinary host memory. Every operator runs at once, on the CPU, through one boxed
// fallback (run_on_host) that first applies the rules a real accelerator applies: operands on different
// devices are refused, results land on the device of the operands, copies between devices are counted.
//
// Sections: state and counters, memory, random numbers, streams and the current device, hooks,
// tensors without a kernel of their own, copies, the fallback, kernels the CPU does not have,
// autocast, registrations, and what Python reads and sets (the operators lockstep_sim::*).

#define AT_PER_OPERATOR_HEADERS  // all of them would take half as long as this file

#include "backend.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/op_registration/adaption.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

// From ATen/autocast_mode.h, whose own includes would double the time this file takes to compile.
namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(DeviceType device_type);
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& arg, DeviceType device_type);
}  // namespace at::autocast

namespace sim {

using at::IntArrayRef;
using c10::DeviceIndex;
using std::optional;

// ---------------------------------------------------------------- state and counters

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 64;
constexpr int kHost = -1;          // stands for the host where a device index is expected
constexpr int kPinned = -2;        // host memory that was allocated as pinned
constexpr int kUnknown = -3;       // memory of somebody else
constexpr size_t kLogLimit = 1 << 20;

int device_count = 0;                         // set once, before the first backward pass
thread_local int current_device = 0;          // as on CUDA, every thread has its own
thread_local int64_t current_stream[kMaxDevices] = {};

int checked(int64_t index) {
  TORCH_CHECK(0 <= index && index < device_count, "sim error: invalid device ordinal ", index);
  return static_cast<int>(index);
}

Device on_sim(int index) { return Device(kSim, static_cast<DeviceIndex>(index)); }
Device or_current(optional<Device> d) {
  return on_sim(checked(d && d->has_index() ? d->index() : current_device));
}
bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == kSim; }
int place(const Tensor& t) { return is_sim(t) ? t.device().index() : kHost; }

// One line of the stream log; sim/__init__.py names the actions in the same order.
enum Action { kRecord, kWait, kSet, kSyncStream, kSyncDevice, kSyncEvent, kUse, kCopy };
struct LogLine { int64_t action, device, stream, event, from, to; };

struct Books {
  std::mutex mutex;
  int64_t copies[kMaxDevices + 1][kMaxDevices + 1][2] = {};  // [from + 1][to + 1]: calls, bytes
  std::map<std::pair<int, int64_t>, int64_t> launches;       // (device, stream) -> kernels run there
  std::deque<LogLine> log;

  void note(Action action, int64_t device, int64_t stream, int64_t event = 0, int64_t from = kHost,
            int64_t to = kHost) {
    std::lock_guard<std::mutex> hold(mutex);
    if (log.size() == kLogLimit) log.pop_front();
    log.push_back({action, device, stream, event, from, to});
  }
  void copied(int from, int to, int64_t bytes) {
    if (from == to) return;
    {
      std::lock_guard<std::mutex> hold(mutex);
      copies[from + 1][to + 1][0] += 1;
      copies[from + 1][to + 1][1] += bytes;
    }
    const int runs_on = from == kHost ? to : from;  // CUDA copies on the stream of the source
    note(kCopy, runs_on, current_stream[runs_on], 0, from, to);
  }
  void launched(int device) {
    std::lock_guard<std::mutex> hold(mutex);
    ++launches[{device, current_stream[device]}];
  }
};
Books& books = *new Books;  // never destroyed, like Memory below: other threads may outlive the statics
void count_launch(const Tensor& t) { books.launched(place(t)); }

// What a direct copy between two devices delivers (the values of sim.break_peer_copies).
enum Fault { kHealthy, kFlip, kZero, kStale };
std::atomic<int> peer_fault[kMaxDevices][kMaxDevices] = {};

// ---------------------------------------------------------------- memory

struct Block { int where; size_t bytes; };
struct Memory {
  std::mutex mutex;
  std::unordered_map<void*, Block> blocks;  // live allocations
  size_t total[kMaxDevices] = {};           // what the device claims to have
  c10::CachingAllocator::Stat used[kMaxDevices], count[kMaxDevices];

  void* take(size_t bytes, int where) {
    if (where >= 0) {
      std::lock_guard<std::mutex> hold(mutex);
      const size_t live = static_cast<size_t>(used[where].current);
      TORCH_CHECK_WITH(OutOfMemoryError, live + bytes <= total[where], "sim out of memory. Tried to allocate ", bytes,
                       " bytes on sim:", where, ", which has ", total[where] - std::min(live, total[where]), " free");
    }
    void* p = std::malloc(bytes + 1);
    TORCH_CHECK(p, "sim error: the host has no memory left");
    if (where >= 0) std::memset(p, 0xff, bytes);  // NaN: nobody may rely on fresh memory being zero
    std::lock_guard<std::mutex> hold(mutex);
    blocks[p] = {where, bytes};
    if (where >= 0) used[where].increase(bytes), count[where].increase(1);
    return p;
  }
  void give_back(void* p) {
    {
      std::lock_guard<std::mutex> hold(mutex);
      auto it = blocks.find(p);
      if (it != blocks.end()) {
        const auto [where, bytes] = it->second;
        if (where >= 0) used[where].decrease(bytes), count[where].decrease(1);
        blocks.erase(it);
      }
    }
    std::free(p);
  }
  int where_is(const void* p) {
    std::lock_guard<std::mutex> hold(mutex);
    auto it = blocks.find(const_cast<void*>(p));
    return it == blocks.end() ? kUnknown : it->second.where;
  }
};
Memory& memory() {
  static auto* it = new Memory;
  return *it;
}
void release(void* p) { memory().give_back(p); }

struct SimAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* p = bytes ? memory().take(bytes, current_device) : nullptr;
    return {p, p, &release, on_sim(current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& p, c10::Stream s) override { books.note(kUse, s.device_index(), s.id()); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> hold(memory().mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stats.reserved_bytes[0] = stats.active_bytes[0] = memory().used[checked(device)];
    stats.allocation[0] = stats.active[0] = memory().count[device];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> hold(memory().mutex);
    memory().used[checked(device)].reset_accumulated();
    memory().count[device].reset_accumulated();
  }
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> hold(memory().mutex);
    memory().used[checked(device)].reset_peak();
    memory().count[device].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::lock_guard<std::mutex> hold(memory().mutex);
    const size_t all = memory().total[checked(device)], live = memory().used[device].current;
    return {all - std::min(all, live), all};
  }
} allocator;
REGISTER_ALLOCATOR(kSim, &allocator);

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* p = memory().take(bytes, kPinned);
    return {p, p, &release, Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned_allocator;

// ---------------------------------------------------------------- random numbers

// The generator of a device: a CPU generator that says it is on the device. Seeded alike, a device draws
// what the CPU draws, and every device has a sequence of its own, as on CUDA.
struct SimGenerator final : c10::GeneratorImpl {
  at::Generator inner;
  SimGenerator(int device, at::Generator g)
      : GeneratorImpl(on_sim(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(g)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(inner).seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  SimGenerator* clone_impl() const override { return new SimGenerator(device_.index(), inner.clone()); }
};
at::Generator new_generator(int device) {
  return at::make_generator<SimGenerator>(device, at::detail::createCPUGenerator());
}
at::Generator& default_generator(int device) {
  static auto* all = new std::vector<at::Generator>([] {
    std::vector<at::Generator> v;
    for (int i = 0; i < kMaxDevices; ++i) v.push_back(new_generator(i));
    return v;
  }());
  return (*all)[checked(device < 0 ? current_device : device)];
}
// The CPU generator behind the `generator` argument of an operator that runs on `home`.
at::Generator generator_behind(const c10::IValue& given, Device home) {
  at::Generator g = given.isNone() ? default_generator(home.index()) : given.toGenerator();
  TORCH_CHECK(g.device().type() == kSim, "Expected a 'sim' device type for generator but found '",
              g.device().type(), "'");
  TORCH_CHECK(g.device() == home, "Expected a generator on ", home, " but found one on ", g.device());
  return static_cast<SimGenerator*>(g.unsafeGetGeneratorImpl())->inner;
}

// ---------------------------------------------------------------- streams and the current device

struct Event { int64_t id; std::chrono::steady_clock::time_point at; };
std::atomic<int64_t> last_event{0}, last_stream{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(Device d, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, d, id); }
  static int64_t id(void* event) { return event ? static_cast<Event*>(event)->id : 0; }

  c10::DeviceType type() const override { return kSim; }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  Device getDevice() const override { return on_sim(current_device); }
  void setDevice(Device d) const override { current_device = checked(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = d.index(); }
  Device exchangeDevice(Device d) const override {
    const Device old = getDevice();
    setDevice(d);
    return old;
  }

  c10::Stream getStream(Device d) const override {
    d = or_current(d);
    return stream(d, current_stream[d.index()]);
  }
  c10::Stream getDefaultStream(Device d) const override { return stream(or_current(d), 0); }
  c10::Stream getNewStream(Device d, int) const override { return stream(or_current(d), ++last_stream); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const int64_t old = std::exchange(current_stream[checked(s.device_index())], s.id());
    if (old != s.id()) books.note(kSet, s.device_index(), s.id());
    return stream(s.device(), old);
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return reinterpret_cast<void*>(s.id()); }

  void record(void** event, const c10::Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event{++last_event, {}};
    static_cast<Event*>(*event)->at = std::chrono::steady_clock::now();
    books.note(kRecord, s.device_index(), s.id(), id(*event));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) books.note(kWait, s.device_index(), s.id(), id(event));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override { books.note(kSyncEvent, current_device, 0, id(event)); }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    const auto passed = static_cast<Event*>(to)->at - static_cast<Event*>(from)->at;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& s) const override { books.note(kSyncStream, s.device_index(), s.id()); }
  void synchronizeDevice(const DeviceIndex d) const override { books.note(kSyncDevice, d, 0); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream& s) const override {
    books.note(kUse, s.device_index(), s.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---------------------------------------------------------------- hooks

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  auto fresh = allocator.allocate(bytes);
  if (storage.data() && bytes) std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count); }
  void setCurrentDevice(DeviceIndex i) const override { current_device = checked(i); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(current_device); }
  DeviceIndex exchangeDevice(DeviceIndex i) const override {
    return static_cast<DeviceIndex>(std::exchange(current_device, checked(i)));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override {
    return i < 0 ? getCurrentDevice() : exchangeDevice(i);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override {
    return new_generator(checked(i < 0 ? current_device : i));
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* p) const override { return memory().where_is(p) == kPinned; }
  Device getDeviceFromPtr(void* p) const override {
    const int where = memory().where_is(p);
    TORCH_CHECK(where >= 0, "sim error: not a device pointer");
    return on_sim(where);
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t bytes) const override { resize_storage(s, bytes); }
} hooks;

// ---------------------------------------------------------------- tensors: making, viewing, resizing

Tensor empty(IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<Device> device,
             optional<bool>, optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(or_current(device));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
                     optional<Device> device, optional<bool>) {
  c10::DeviceGuard guard(or_current(device));
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
// Another tensor on the storage of `base`.
Tensor view_of(const Tensor& base, IntArrayRef size, IntArrayRef stride, int64_t offset, caffe2::TypeMeta dtype) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                       base.key_set(), dtype);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return view;
}
Tensor as_strided(const Tensor& x, IntArrayRef size, IntArrayRef stride, optional<int64_t> offset) {
  return view_of(x, size, stride, offset.value_or(x.storage_offset()), x.dtype());
}
const Tensor& resize_(const Tensor& x, IntArrayRef size, optional<at::MemoryFormat> format) {
  const size_t needed = (c10::multiply_integers(size) + x.storage_offset()) * x.itemsize();
  if (needed > x.storage().nbytes()) resize_storage(x.storage(), needed);
  x.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) x.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return x;
}
Tensor& set_storage_offset(Tensor& x, c10::Storage s, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(s));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  return x;
}
Tensor& set_storage(Tensor& x, c10::Storage s) {
  const auto n = static_cast<int64_t>(s.nbytes() / x.itemsize());
  return set_storage_offset(x, std::move(s), 0, {n}, {});
}
Tensor& set_tensor(Tensor& x, const Tensor& source) {
  return set_storage_offset(x, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor host_view(const Tensor& x) {
  if (!is_sim(x)) return x;
  const auto& storage = x.storage();
  auto* keep = new c10::Storage(storage);
  auto drop = [](void* p) { delete static_cast<c10::Storage*>(p); };
  c10::Storage seen(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    c10::DataPtr(storage.mutable_data(), keep, drop, Device(at::kCPU)), c10::GetCPUAllocator(), true);
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(seen), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                    x.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  if (x.is_conj()) t._set_conj(true);
  if (x.is_neg()) t._set_neg(true);
  return t;
}
// A CPU result, moved to `device` (as part of a kernel: this is no transfer).
Tensor to_device(const Tensor& r, Device device) {
  if (!r.defined() || is_sim(r)) return r;
  TORCH_CHECK(r.layout() == at::kStrided, "sim error: only dense tensors are simulated");
  const auto strides = r.is_non_overlapping_and_dense() ? r.strides().vec() : r.contiguous().strides().vec();
  auto out = empty_strided(r.sizes(), strides, r.scalar_type(), std::nullopt, device, std::nullopt);
  host_view(out).copy_(r);
  return out;
}

// ---------------------------------------------------------------- copies

// What a broken connection makes of `right`.
Tensor garbled(const Tensor& right, Fault fault) {
  if (fault == kZero) return at::zeros_like(right);
  if (right.scalar_type() == at::kBool) return right.logical_not();
  auto wrong = right.clone(at::MemoryFormat::Contiguous);
  auto* bytes = static_cast<unsigned char*>(wrong.mutable_data_ptr());
  for (size_t i = 0; i < wrong.nbytes(); ++i) bytes[i] = static_cast<unsigned char>(~bytes[i]);
  return wrong;
}
Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const int from = place(source), to = place(target);
  books.copied(from, to, static_cast<int64_t>(source.nbytes()));
  const bool returns_at_once = non_blocking && memory().where_is(target.const_data_ptr()) == kPinned;
  if (from >= 0 && to == kHost && !returns_at_once) books.note(kSyncStream, from, current_stream[from]);
  const bool peers = from >= 0 && to >= 0 && from != to;
  const auto fault = peers ? static_cast<Fault>(peer_fault[from][to].load()) : kHealthy;
  if (fault == kStale) return target;
  auto data = host_view(source);
  host_view(target).copy_(fault == kHealthy ? data : garbled(data, fault));
  return target;
}
at::Scalar local_scalar(const Tensor& x) {  // .item(), bool(tensor), ...
  books.copied(place(x), kHost, static_cast<int64_t>(x.itemsize()));
  books.note(kSyncStream, place(x), current_stream[place(x)]);
  return host_view(x).item();
}
void record_stream(Tensor&, c10::Stream s) { books.note(kUse, s.device_index(), s.id()); }

// ---------------------------------------------------------------- the fallback

c10::IValue transform(const c10::IValue& v, const PerTensor& f) {
  if (v.isList() && v.toListRef().size() && v.toListRef()[0].isTensorList()) {  // Tensor[][], in collectives
    c10::impl::GenericList out(v.toList().elementType());
    for (const c10::IValue& tensors : v.toListRef()) out.push_back(transform(tensors, f));
    return out;
  }
  if (v.isTensor()) return f(v.toTensor(), 0);
  if (v.isTensorList()) {
    std::vector<Tensor> out;
    for (const Tensor& t : v.toTensorVector()) out.push_back(f(t, out.size()));
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<optional<Tensor>> out;
    for (const auto& t : v.toOptionalTensorList().vec()) {
      out.push_back(t ? optional<Tensor>(f(*t, out.size())) : std::nullopt);
    }
    return out;
  }
  return v;
}

// Where an operator runs, and PyTorch's rule that its tensors agree on it. The positions of a _foreach_
// operator are independent of each other: there the rule holds position by position.
struct Placement {
  std::string method;
  bool foreach;
  optional<Device> home;
  std::vector<Device> rows;

  explicit Placement(const std::string& op)
      : method("wrapper_sim_" + op.substr(op.find(':') + 2)), foreach(op.rfind("aten::_foreach_", 0) == 0) {}
  void agree(const Tensor& t, const std::string& argument, bool in_list, size_t position) {
    if (!home) home = t.device();
    if (foreach && in_list && position == rows.size()) rows.push_back(t.device());
    optional<Device> expected = foreach && in_list ? rows[position] : *home;
    c10::impl::check_and_update_common_device(expected, t, method.c_str(), argument.c_str());
  }
  Device of(size_t position) const { return position < rows.size() ? rows[position] : *home; }
};

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t begin = stack->size() - arguments.size();
  auto argument = [&](size_t i) -> c10::IValue& { return (*stack)[begin + i]; };

  // Which device? All device tensors agree on it, or it was asked for.
  Placement placement(op.operator_name().name);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool list = argument(i).isTensorList();
    if (argument(i).isDevice() && argument(i).toDevice().type() == kSim && !placement.home) {
      placement.home = or_current(argument(i).toDevice());
    }
    transform(argument(i), [&](const Tensor& t, size_t position) {
      if (is_sim(t)) placement.agree(t, arguments[i].name(), list, position);
      return t;
    });
  }
  TORCH_CHECK(placement.home, "sim error: ", op.operator_name(), " was called without a tensor on a device");
  const Device home = *placement.home;

  // Host tensors are welcome only as a number that is read, and as the indices of x[...].
  std::vector<std::pair<Tensor, Tensor>> seen;  // device tensor, its host view
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    const bool indices = argument(i).isOptionalTensorList(), written = alias && alias->isWrite();
    if (arguments[i].name() == "generator") {
      argument(i) = generator_behind(argument(i), home);
    } else if (argument(i).isDevice()) {
      argument(i) = Device(at::kCPU);
    } else {
      argument(i) = transform(argument(i), [&](const Tensor& t, size_t) {
        if (t.defined() && t.is_cpu() && !indices && (t.dim() || written)) {
          c10::impl::common_device_check_failure(home, t, placement.method.c_str(), arguments[i].name().c_str());
        }
        if (!is_sim(t)) return t;
        seen.emplace_back(t, host_view(t));
        return seen.back().second;
      });
    }
  }

  c10::DeviceGuard guard(home);
  books.launched(home.index());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  for (auto& [t, h] : seen) {  // an out= argument that the kernel resized
    if (t.sizes() == h.sizes()) continue;
    resize_(t, h.sizes(), std::nullopt);
    host_view(t).copy_(h);
  }
  const size_t results = stack->size() - schema.returns().size();
  for (size_t i = results; i < stack->size(); ++i) {
    (*stack)[i] = transform((*stack)[i], [&, seen = std::cref(seen)](const Tensor& r, size_t position) -> Tensor {
      if (!r.defined()) return r;
      for (const auto& [t, h] : seen.get()) {
        if (r.is_same(h)) return t;
      }
      for (const auto& [t, h] : seen.get()) {
        if (r.has_storage() && r.storage().is_alias_of(h.storage())) {
          return view_of(t, r.sizes(), r.strides(), r.storage_offset(), r.dtype());
        }
      }
      return to_device(r, placement.of(position));
    });
  }
}

// ---------------------------------------------------------------- kernels the CPU does not have

void same_device(const char* method, at::TensorList tensors) {
  optional<Device> home;
  for (const auto& t : tensors) c10::impl::check_and_update_common_device(home, t, method, "weight");
  books.launched(home->index());
}

Tensor convolution(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  const bool biased = bias && bias->defined();
  same_device("wrapper_sim_convolution", {x, weight, biased ? *bias : Tensor()});
  auto y = at::convolution(host_view(x), host_view(weight), biased ? host_view(*bias) : Tensor(), stride, padding,
                           dilation, transposed, output_padding, groups);
  return to_device(y, x.device());
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                        IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                                        bool transposed, IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  same_device("wrapper_sim_convolution_backward", {grad, x, weight});
  const std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [gx, gw, gb] =
      at::convolution_backward(host_view(grad), host_view(x), host_view(weight), bias_sizes, stride, padding, dilation,
                               transposed, output_padding, groups, mask);
  return {to_device(gx, x.device()), to_device(gw, x.device()), to_device(gb, x.device())};
}

// Drawn as the CPU's own dropout draws, so that the same seed drops the same elements.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, optional<bool> train) {
  if (!train.value_or(true)) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  auto noise = at::empty_like(x).bernoulli_(1 - p);
  auto mask = noise.to(at::kBool);
  return {x * noise.div_(1 - p), mask};
}

// The recurrent cells, written with differentiable operators: registered for autograd, so PyTorch derives
// their backward (any number of times). The last result is a workspace that only the fused backward reads.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             const optional<Tensor>& input_bias, const optional<Tensor>& hidden_bias) {
  auto gates = input_gates + hidden_gates;
  if (input_bias && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  const auto g = gates.chunk(4, 1);
  const auto cy = g[1].sigmoid() * cx + g[0].sigmoid() * g[2].tanh();
  return {g[3].sigmoid() * cy.tanh(), cy, gates.detach()};
}
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    const optional<Tensor>& input_bias, const optional<Tensor>& hidden_bias) {
  const bool biased = input_bias && input_bias->defined();
  const auto i = (biased ? input_gates + *input_bias : input_gates).chunk(3, 1);
  const auto h = (biased ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  const auto reset = (h[0] + i[0]).sigmoid(), update = (h[1] + i[1]).sigmoid();
  const auto fresh = (i[2] + h[2] * reset).tanh();
  return {(hx - fresh) * update + fresh, fresh.detach()};
}

// Attention by matrix products: the math backend is 0.
int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&, double, bool,
                   optional<double>, bool) {
  return 0;
}

// Nested tensors are not simulated: an encoder takes its other path.
bool left_aligned(const Tensor&, const Tensor&) { return false; }

// ---------------------------------------------------------------- autocast

enum class Cast { kLower, kFloat, kWidest };

// Cast the floating tensors of an operator as CUDA's autocast does, then run it with autocast off.
template <Cast policy>
void autocast(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));
  auto eligible = [](const Tensor& t) { return is_sim(t) && t.is_floating_point() && t.scalar_type() != at::kDouble; };
  const size_t begin = stack->size() - op.schema().arguments().size();
  auto to = policy == Cast::kFloat ? at::kFloat : at::autocast::get_autocast_dtype(kSim);
  if (policy == Cast::kWidest) {
    for (size_t i = begin; i < stack->size(); ++i) {
      transform((*stack)[i], [&](const Tensor& t, size_t) {
        if (eligible(t) && t.scalar_type() == at::kFloat) to = at::kFloat;
        return t;
      });
    }
  }
  for (size_t i = begin; i < stack->size(); ++i) {
    (*stack)[i] = transform((*stack)[i], [&](const Tensor& t, size_t) {
      return eligible(t) ? at::autocast::cached_cast(to, t, kSim) : t;
    });
  }
  op.callBoxed(stack);
}

// ---------------------------------------------------------------- registrations

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("native_dropout", native_dropout);
  m.impl("_fused_sdp_choice", sdp_choice);
  m.impl("_nested_tensor_from_mask_left_aligned", left_aligned);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  // Without a kernel of their own these two would go through their out= form, which warns about a resize.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  // copies between devices, position by position
  m.impl("_foreach_copy_", [](at::TensorList self, at::TensorList source, bool non_blocking) {
    TORCH_CHECK(self.size() == source.size(), "Tensor lists must have the same number of tensors, got ", self.size(),
                " and ", source.size());
    for (size_t i = 0; i < self.size(); ++i) self[i].copy_(source[i], non_blocking);
  });
}
// A copy reads conjugated and negated views itself; resolving them first would be a copy again.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the commoner part of the lists in ATen/autocast_mode.h
  for (const char* name :
       {"_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input",
        "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
        "linear", "addbmm", "baddbmm", "bmm", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell",
        "rnn_tanh_cell", "rnn_relu_cell", "scaled_dot_product_attention"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::kLower>>());
  }
  for (const char* name :
       {"exp", "log", "log10", "log2", "log1p", "expm1", "reciprocal", "rsqrt", "pow.Tensor_Scalar",
        "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm",
        "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
        "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
        "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
        "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "cdist", "renorm", "logsumexp", "prod",
        "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
        "linalg_matrix_norm", "sum", "sum.dim_IntList", "norm.Scalar", "norm.ScalarOpt_dim"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::kFloat>>());
  }
  for (const char* name : {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
                           "index_put", "tensordot", "scatter_add"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::kWidest>>());
  }
}

// ---------------------------------------------------------------- what Python reads and sets

Tensor numbers(const std::vector<int64_t>& values, IntArrayRef shape) {
  auto t = at::empty(shape, at::kLong);
  if (!values.empty()) std::memcpy(t.mutable_data_ptr(), values.data(), values.size() * sizeof(int64_t));
  return t;
}

TORCH_LIBRARY(lockstep_sim, m) {
  m.def("init", [](int64_t devices) {
    TORCH_CHECK(0 < devices && devices <= kMaxDevices, "1 to ", kMaxDevices, " devices, not ", devices);
    device_count = static_cast<int>(devices);
    at::RegisterPrivateUse1HooksInterface(&hooks);
    register_collectives();
  });
  m.def("copies", [] {  // rows of: from, to, calls, bytes
    std::lock_guard<std::mutex> hold(books.mutex);
    std::vector<int64_t> rows;
    for (int from = kHost; from < device_count; ++from) {
      for (int to = kHost; to < device_count; ++to) {
        const auto* cell = books.copies[from + 1][to + 1];
        if (cell[0]) rows.insert(rows.end(), {from, to, cell[0], cell[1]});
      }
    }
    return numbers(rows, {static_cast<int64_t>(rows.size()) / 4, 4});
  });
  m.def("reset_copies", []() -> void {
    std::lock_guard<std::mutex> hold(books.mutex);
    std::memset(books.copies, 0, sizeof books.copies);
  });
  m.def("launches", [] {  // rows of: device, stream, kernels
    std::lock_guard<std::mutex> hold(books.mutex);
    std::vector<int64_t> rows;
    for (const auto& [where, n] : books.launches) rows.insert(rows.end(), {where.first, where.second, n});
    return numbers(rows, {static_cast<int64_t>(rows.size()) / 3, 3});
  });
  m.def("stream_log", [] {  // rows of: action, device, stream, event, from, to
    std::lock_guard<std::mutex> hold(books.mutex);
    std::vector<int64_t> rows;
    for (const auto& e : books.log) rows.insert(rows.end(), {e.action, e.device, e.stream, e.event, e.from, e.to});
    return numbers(rows, {static_cast<int64_t>(rows.size()) / 6, 6});
  });
  m.def("reset_stream_log", []() -> void {
    std::lock_guard<std::mutex> hold(books.mutex);
    books.log.clear();
    books.launches.clear();
  });
  m.def("break_peer", [](int64_t from, int64_t to, int64_t fault) {
    TORCH_CHECK(kHealthy <= fault && fault <= kStale, "no such fault: ", fault);
    peer_fault[checked(from)][checked(to)] = static_cast<int>(fault);
  });
  m.def("set_total_memory", [](int64_t device, int64_t bytes) {
    std::lock_guard<std::mutex> hold(memory().mutex);
    memory().total[checked(device)] = static_cast<size_t>(bytes);
  });
  m.def("rng_state", [](int64_t device) {
    std::lock_guard<std::mutex> hold(default_generator(checked(device)).mutex());
    return default_generator(static_cast<int>(device)).get_state();
  });
  m.def("set_rng_state", [](int64_t device, const Tensor& state) {
    std::lock_guard<std::mutex> hold(default_generator(checked(device)).mutex());
    default_generator(static_cast<int>(device)).set_state(state);
  });
  m.def("seed", [](int64_t device, int64_t seed) {
    std::lock_guard<std::mutex> hold(default_generator(checked(device)).mutex());
    default_generator(static_cast<int>(device)).set_current_seed(static_cast<uint64_t>(seed));
  });
  m.def("initial_seed", [](int64_t device) {
    return static_cast<int64_t>(default_generator(checked(device)).current_seed());
  });
}

}  // namespace sim
