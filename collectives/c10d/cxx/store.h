// c10d's TCPStore: where ranks find each other, and leave word when one fails.
#pragma once
#include <cstdint>
#include <memory>

#include "rust/cxx.h"

namespace c10d {
class Store;
}

namespace drivetrain {

class Store {
 public:
  struct Inner;
  explicit Store(std::unique_ptr<Inner> inner);
  ~Store();
  std::uint16_t port() const;
  void set(rust::Str key, rust::Slice<const std::uint8_t> value) const;
  rust::Vec<std::uint8_t> get(rust::Str key) const;
  std::int64_t add(rust::Str key, std::int64_t amount) const;
  bool has(rust::Str key) const;
  const Inner& inner() const { return *inner_; }

 private:
  std::unique_ptr<Inner> inner_;
};

// `serve`: this process keeps the store, on a free port where `port` is 0.
std::unique_ptr<Store> tcp_store(rust::Str host, std::uint16_t port, bool serve, std::int64_t timeout_ms);

}  // namespace drivetrain
