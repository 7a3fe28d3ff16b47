// Stands in for gloo's header: see algorithm.h.
#pragma once
namespace gloo::transport {
class Device;
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer();
};
}  // namespace gloo::transport
