#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

#include "rust/cxx.h"

namespace drivetrain {

// A list of tensors that Rust fills and reads.
struct TensorList {
  std::vector<at::Tensor> tensors;
  void push(const at::Tensor& tensor) { tensors.push_back(tensor); }
  size_t size() const { return tensors.size(); }
  std::unique_ptr<at::Tensor> get(size_t index) const {
    return std::make_unique<at::Tensor>(tensors.at(index));
  }
  std::unique_ptr<at::Tensor> take(size_t index) {
    return std::make_unique<at::Tensor>(std::move(tensors.at(index)));
  }
};

std::unique_ptr<TensorList> tensor_list();

// Gradients of something with respect to each of `inputs`, given its gradients with respect to each of `outputs`.
// Frees the graph. An input that does not contribute is an error.
std::unique_ptr<TensorList> gradients(const TensorList& outputs, const TensorList& inputs,
                                      const TensorList& output_gradients);

}  // namespace drivetrain
