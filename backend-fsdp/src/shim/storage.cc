#include "storage.h"

#include <malloc.h>

namespace drivetrain {

void resize_storage(const at::Tensor& tensor, size_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  TORCH_CHECK(storage->resizable() && storage->allocator() != nullptr,
              "resize_storage: this memory is not the tensor's own");
  storage->set_data_ptr_noswap(storage->allocator()->allocate(bytes));
  storage->set_nbytes(bytes);
}

void release_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace drivetrain
