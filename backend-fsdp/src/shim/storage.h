#pragma once
#include <ATen/core/Tensor.h>

namespace drivetrain {

// Sets the size of the memory behind a tensor, which every view of it shares; 0 frees it. Sizes and strides
// of the views stay, so that they are valid again once the memory is back. The contents are not kept, and no
// version counter moves: autograd does not take it for a change.
void resize_storage(const at::Tensor& tensor, size_t bytes);

// Gives memory that the heap holds and nobody uses back to the system.
void release_memory();

}  // namespace drivetrain
