#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

namespace drivetrain {

// x / sqrt(mean(x^2) + eps) * weight over the last dim, with gradients for x and weight.
std::unique_ptr<at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

}  // namespace drivetrain
