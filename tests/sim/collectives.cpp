// Collectives of simulated accelerators. In a file of their own, since the headers of process groups take as long to
// compile as all the rest: the two are compiled side by side.

#include "backend.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <limits>
#include <mutex>
#include <utility>
#include <vector>

extern "C" {  // of Python, whose headers the rest of this file does without
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace sim {

// A collective runs on the CPU backend of its group, on copies in host memory. As on a real accelerator its results
// are there once its work has been waited for, and not before: until then they are NaN (integers are inverted).
// A future of a group that is called NCCL is done at once, as there, where everything goes in the order of streams; one
// of Gloo is done when a thread of Gloo's says so.
struct Staged { Tensor tensor, copy; bool written; };

Tensor original(const std::vector<Staged>& staged, const Tensor& copy) {
  for (const auto& each : staged) {
    if (each.copy.is_same(copy)) return each.tensor;
  }
  return copy;
}

// Lets other ranks, where they are threads, run Python meanwhile.
struct WithoutGil {
  void* thread = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() {
    if (thread) PyEval_RestoreThread(thread);
  }
};

struct SimWork final : c10d::Work {
  c10::intrusive_ptr<c10d::Work> inner;
  std::vector<Staged> staged;
  std::once_flag arrived;
  bool in_stream_order;
  SimWork(c10::intrusive_ptr<c10d::Work> work, std::vector<Staged> tensors, bool in_stream_order)
      : inner(std::move(work)), staged(std::move(tensors)), in_stream_order(in_stream_order) {}

  void arrive() {
    std::call_once(arrived, [this] {
      for (const auto& each : staged) {
        if (each.written) host_view(each.tensor).copy_(each.copy);
      }
    });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = inner->wait(timeout);
    arrive();
    return done;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override { return inner->isCompleted(); }
  bool isSuccess() const override { return inner->isSuccess(); }
  std::exception_ptr exception() const override { return inner->exception(); }
  int sourceRank() const override { return inner->sourceRank(); }
  void abort() override { inner->abort(); }
  std::vector<Tensor> result() override {
    auto tensors = inner->result();
    for (auto& t : tensors) t = original(staged, t);
    return tensors;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (in_stream_order) {
      WithoutGil released;
      inner->wait(kNoTimeout);
    }
    auto theirs = inner->getFuture();
    auto mine = c10::make_intrusive<c10::ivalue::Future>(theirs->elementType(),
                                                         std::vector<Device>{staged.at(0).tensor.device()});
    theirs->addCallback([mine, self = c10::intrusive_ptr<SimWork>::reclaim_copy(this)](c10::ivalue::Future& done) {
      if (done.hasError()) return mine->setError(done.exception_ptr());
      self->arrive();
      mine->markCompleted(transform(done.constValue(), [&](const Tensor& t, size_t) { return original(self->staged, t); }));
    });
    return mine;
  }
};

// All bits of a float set are a NaN; other types get values that they had not.
void spoil(const Tensor& t) {
  if (t.is_floating_point() || t.is_complex()) t.fill_(std::numeric_limits<double>::quiet_NaN());
  else t.bitwise_not_();
}

void run_collective(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t begin = stack->size() - arguments.size();
  const bool sends = op.operator_name().name == "c10d::send";
  std::vector<Staged> staged;
  bool in_stream_order = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "process_group") {
      const auto group = (*stack)[begin + i].toCustomClass<c10d::ProcessGroup>();
      in_stream_order = group->getBackendType() == c10d::ProcessGroup::BackendType::NCCL;
    }
    const bool written = !sends && arguments[i].name().rfind("input", 0) != 0;
    (*stack)[begin + i] = transform((*stack)[begin + i], [&](const Tensor& t, size_t) {
      if (!is_sim(t)) return t;
      staged.push_back({t, host_view(t).clone(), written});
      return staged.back().copy;
    });
  }
  TORCH_CHECK(!staged.empty(), "sim error: ", op.operator_name(), " was called without a tensor on a device");
  count_launch(staged[0].tensor);

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  for (const auto& each : staged) {
    if (each.written) spoil(host_view(each.tensor));
  }
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    auto& result = (*stack)[i];
    if (result.isCustomClass()) {
      auto work = c10::make_intrusive<SimWork>(result.toCustomClass<c10d::Work>(), staged, in_stream_order);
      result = c10::intrusive_ptr<c10d::Work>(std::move(work));
    } else {
      result = transform(result, [&](const Tensor& t, size_t) { return original(staged, t); });
    }
  }
}

// PyTorch has kernels for these already, which ask the group for a backend of the device. Whoever puts others in
// their place is warned, which is not for those who run tests.
void register_collectives() {
  struct : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static auto* library =
      new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const char* name :
       {"allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "allreduce_",
        "allreduce_coalesced_", "alltoall_", "alltoall_base_", "barrier", "broadcast_", "gather_", "recv_", "reduce_",
        "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "scatter_", "send"}) {
    library->impl(name, torch::CppFunction::makeFromBoxedFunction<&run_collective>());
  }
}

}  // namespace sim
