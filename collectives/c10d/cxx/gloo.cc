#include "gloo.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "guarded.h"
#include "store_inner.h"

namespace drivetrain {

using std::chrono::milliseconds;

struct Message::Inner {
  c10::intrusive_ptr<c10d::Work> work;
};

struct Group::Inner {
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group;
};

namespace {

std::vector<at::Tensor> bytes(std::uint8_t* data, std::size_t size) {
  return {at::from_blob(data, {static_cast<std::int64_t>(size)}, at::TensorOptions().dtype(at::kByte))};
}

std::shared_ptr<Message> message(c10::intrusive_ptr<c10d::Work> work) {
  return std::make_shared<Message>(std::make_unique<Message::Inner>(Message::Inner{std::move(work)}));
}

}  // namespace

Message::Message(std::unique_ptr<Inner> inner) : inner_(std::move(inner)) {}

Message::~Message() = default;

bool Message::wait(std::int64_t timeout_ms) const {
  return guarded([&] { return inner_->work->wait(milliseconds(timeout_ms)); });
}

void Message::abort() const {
  guarded([&] { inner_->work->abort(); });
}

Group::Group(std::unique_ptr<Inner> inner) : inner_(std::move(inner)) {}

Group::~Group() = default;

std::shared_ptr<Message> Group::send(const std::uint8_t* data, std::size_t size, std::int32_t to,
                                     std::int32_t tag) const {
  return guarded([&] {
    // c10d takes what it only reads as it takes what it writes.
    auto tensors = bytes(const_cast<std::uint8_t*>(data), size);
    return message(inner_->group->send(tensors, to, tag));
  });
}

std::shared_ptr<Message> Group::receive(std::uint8_t* data, std::size_t size, std::int32_t from,
                                        std::int32_t tag) const {
  return guarded([&] {
    auto tensors = bytes(data, size);
    return message(inner_->group->recv(tensors, from, tag));
  });
}

std::shared_ptr<Group> connect_gloo(const Store& store, rust::Str prefix, std::int32_t rank, std::int32_t size,
                                    std::int64_t timeout_ms, rust::Str interface) {
  return guarded([&] {
    auto options = c10d::ProcessGroupGloo::Options::create(milliseconds(timeout_ms));
    options->devices.push_back(interface.empty()
                                   ? c10d::ProcessGroupGloo::createDefaultDevice()
                                   : c10d::ProcessGroupGloo::createDeviceForInterface(text(interface)));
    // Messages are the device's thread's; these run collectives, of which there are none.
    options->threads = 1;
    auto keys = c10::make_intrusive<c10d::PrefixStore>(text(prefix), store.inner().store);
    auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(keys, rank, size, options);
    return std::make_shared<Group>(std::make_unique<Group::Inner>(Group::Inner{std::move(group)}));
  });
}

}  // namespace drivetrain
