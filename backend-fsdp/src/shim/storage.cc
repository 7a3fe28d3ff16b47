#include "storage.h"

#include <ATen/native/Resize.h>

namespace drivetrain {

void resize_storage(const at::Tensor& tensor, size_t bytes) {
  TORCH_CHECK(tensor.device().is_cpu(), "resize_storage: expected a CPU tensor, found ", tensor.device());
  at::native::resize_bytes_cpu(tensor.storage().unsafeGetStorageImpl(), bytes);
}

}  // namespace drivetrain
