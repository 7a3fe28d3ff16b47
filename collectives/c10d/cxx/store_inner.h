// What a Store holds; for the files here that hand it to c10d.
#pragma once
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "store.h"

namespace drivetrain {

struct Store::Inner {
  c10::intrusive_ptr<c10d::TCPStore> store;
};

inline std::string text(rust::Str str) { return std::string(str.data(), str.size()); }

}  // namespace drivetrain
