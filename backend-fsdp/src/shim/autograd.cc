#include "autograd.h"

#include <torch/csrc/autograd/autograd.h>

namespace drivetrain {

std::unique_ptr<TensorList> tensor_list() { return std::make_unique<TensorList>(); }

std::unique_ptr<TensorList> gradients(const TensorList& outputs, const TensorList& inputs,
                                      const TensorList& output_gradients) {
  auto list = std::make_unique<TensorList>();
  list->tensors =
      torch::autograd::grad(outputs.tensors, inputs.tensors, output_gradients.tensors);
  return list;
}

}  // namespace drivetrain
