// What the files of the simulated accelerators share.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <functional>

namespace sim {

using at::Tensor;
using c10::Device;
using torch::jit::Stack;

bool is_sim(const Tensor& t);

// The same memory, seen as a CPU tensor. It keeps the device storage alive.
Tensor host_view(const Tensor& x);

using PerTensor = std::function<Tensor(const Tensor&, size_t)>;  // a tensor and its place in its list

// Apply `f` to every tensor of an argument or result.
c10::IValue transform(const c10::IValue& v, const PerTensor& f);

// Count a kernel on the current stream of the tensor's device.
void count_launch(const Tensor& t);

void register_collectives();

}  // namespace sim
