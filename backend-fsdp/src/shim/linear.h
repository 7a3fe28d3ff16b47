#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

namespace drivetrain {

// x weight^T, each dot product summed in f64 and rounded once, with f32 gradients for x and weight.
std::unique_ptr<at::Tensor> exact_linear(const at::Tensor& x, const at::Tensor& weight);

}  // namespace drivetrain
