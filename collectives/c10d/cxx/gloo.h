// c10d's Gloo: messages between two ranks. Collectives are made of these in Rust, so that sums are in rank order and an
// abort ends whatever waits.
#pragma once
#include <cstdint>
#include <memory>

#include "rust/cxx.h"
#include "store.h"

namespace drivetrain {

// A message on its way.
class Message {
 public:
  struct Inner;
  explicit Message(std::unique_ptr<Inner> inner);
  ~Message();
  // Whether it has been sent or received; false after an abort. Throws at the timeout, and where the peer has gone.
  bool wait(std::int64_t timeout_ms) const;
  // Ends the wait of another thread, or the next one. The group is of no use after it.
  void abort() const;

 private:
  std::unique_ptr<Inner> inner_;
};

class Group {
 public:
  struct Inner;
  explicit Group(std::unique_ptr<Inner> inner);
  ~Group();
  // `data` stays where it is, and as it is, for as long as the message exists.
  std::shared_ptr<Message> send(const std::uint8_t* data, std::size_t size, std::int32_t to, std::int32_t tag) const;
  std::shared_ptr<Message> receive(std::uint8_t* data, std::size_t size, std::int32_t from, std::int32_t tag) const;

 private:
  std::unique_ptr<Inner> inner_;
};

// Connects to every other rank. `interface`: a network interface's name, or "" for that of this machine's name.
std::shared_ptr<Group> connect_gloo(const Store& store, rust::Str prefix, std::int32_t rank, std::int32_t size,
                                    std::int64_t timeout_ms, rust::Str interface);

}  // namespace drivetrain
