#include "autograd.h"

#include <torch/csrc/autograd/autograd.h>

namespace drivetrain {

std::unique_ptr<TensorList> tensor_list() { return std::make_unique<TensorList>(); }

std::unique_ptr<TensorList> gradients(const at::Tensor& output, const TensorList& inputs,
                                      const at::Tensor& output_gradient) {
  auto list = std::make_unique<TensorList>();
  list->tensors = torch::autograd::grad({output}, inputs.tensors, {output_gradient});
  return list;
}

}  // namespace drivetrain
