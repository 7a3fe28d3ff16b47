// Stacks that take turns on one OS thread, so that a CUDA thread can stop in the middle of a kernel.
#pragma once
#include <cstddef>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {

// Where a stack was left. `start` prepares one; `jump` leaves one and goes on with another.
struct Fiber {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  // `entry` runs on the stack when it is first jumped to, and must never return.
  void start(char* stack, size_t bytes, void (*entry)());
};

void jump(Fiber& from, Fiber& to);

// `count` stacks of `STACK_BYTES`, each above a page that may not be touched: an overflow is a fault, not a
// scribble over its neighbour. Kept for the life of the OS thread.
constexpr size_t STACK_BYTES = 64 << 10;
char* stacks(size_t count);

}  // namespace emulator
