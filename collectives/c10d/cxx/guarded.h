// Exceptions of libtorch, without their stack traces.
#pragma once
#include <c10/util/Exception.h>

#include <stdexcept>

namespace drivetrain {

// Runs `body`; cxx makes an error of what it throws, out of `what()`.
template <class Body>
auto guarded(Body body) -> decltype(body()) {
  try {
    return body();
  } catch (const c10::Error& error) {
    throw std::runtime_error(error.what_without_backtrace());
  } catch (const std::exception&) {
    throw;
  } catch (...) {
    throw std::runtime_error("an exception without a text");
  }
}

}  // namespace drivetrain
