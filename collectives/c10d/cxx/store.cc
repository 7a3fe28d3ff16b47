#include "store.h"

#include <c10/util/Logging.h>

#include <cstdlib>

#include "guarded.h"
#include "store_inner.h"

namespace drivetrain {

namespace {

// What goes wrong is an error of ours; c10d's own log, with stack traces, only where it is asked for.
void quieten() {
  if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) {
    FLAGS_caffe2_log_level = c10::GLOG_FATAL;
  } else {
    c10::initLogging();
  }
}

}  // namespace

Store::Store(std::unique_ptr<Inner> inner) : inner_(std::move(inner)) {}

Store::~Store() = default;

std::uint16_t Store::port() const { return inner_->store->getPort(); }

void Store::set(rust::Str key, rust::Slice<const std::uint8_t> value) const {
  guarded([&] { inner_->store->set(text(key), std::vector<std::uint8_t>(value.begin(), value.end())); });
}

rust::Vec<std::uint8_t> Store::get(rust::Str key) const {
  return guarded([&] {
    rust::Vec<std::uint8_t> out;
    for (std::uint8_t byte : inner_->store->get(text(key))) out.push_back(byte);
    return out;
  });
}

std::int64_t Store::add(rust::Str key, std::int64_t amount) const {
  return guarded([&] { return inner_->store->add(text(key), amount); });
}

bool Store::has(rust::Str key) const {
  return guarded([&] { return inner_->store->check({text(key)}); });
}

std::unique_ptr<Store> tcp_store(rust::Str host, std::uint16_t port, bool serve, std::int64_t timeout_ms) {
  return guarded([&] {
    quieten();
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = serve;
    // Whoever is missing is found by name, by the keys that each rank sets.
    options.waitWorkers = false;
    options.timeout = std::chrono::milliseconds(timeout_ms);
    auto store = c10::make_intrusive<c10d::TCPStore>(text(host), options);
    return std::make_unique<Store>(std::make_unique<Store::Inner>(Store::Inner{std::move(store)}));
  });
}

}  // namespace drivetrain
