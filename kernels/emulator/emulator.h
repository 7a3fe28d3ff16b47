// The CUDA execution model on a CPU thread, as far as the kernels of this crate use it.
//
// A kernel's source is compiled as C++ with this header in place of CUDA's own. A CUDA thread is a fiber; a
// block runs warp by warp on one OS thread, blocks one after the other. What is checked: every access of
// global and shared memory (memory.h), barriers that not all threads reach, warp operations that name
// lanes which do not take part.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "fiber.h"
#include "memory.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__

namespace emulator {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
  size_t count() const { return static_cast<size_t>(x) * y * z; }
};

enum class State : uint8_t { Ready, AtBlockBarrier, AtWarpBarrier, Done };

struct Thread {
  Fiber fiber;
  State state = State::Ready;
  unsigned mask = 0;  // at a warp barrier: the lanes it names
  const char* file = nullptr;
  int line = 0;  // of the barrier
  Dim3 index;
};

constexpr unsigned WARP = 32;

struct SharedArray {
  const void* tag;  // its declaration
  std::unique_ptr<Region> region;
};

// The block that runs on this OS thread.
struct Block {
  std::string kernel;
  Dim3 grid, shape, index;
  std::vector<Thread> threads;
  std::vector<uint64_t> exchange;    // a slot a thread, for warp operations
  std::vector<uint32_t> warp_times;  // __syncwarp passed, by warp
  std::vector<unsigned> passed;      // lanes that went on from the __syncwarp that their warp is leaving
  uint32_t block_time = 0;           // __syncthreads passed
  uint32_t launch = 0, number = 0;
  Fiber scheduler;
  size_t running = 0;
  std::vector<SharedArray> arrays;
  std::unique_ptr<Region> dynamic;
  void (*body)(void*) = nullptr;
  void* body_data = nullptr;
  std::string failure;

  Thread& thread() { return threads[running]; }
  unsigned lane() const { return running % WARP; }
  unsigned warp() const { return running / WARP; }
};

extern thread_local Block* block __attribute__((tls_model("initial-exec")));

// Throws an error that names kernel, block and thread.
[[noreturn]] void fail(const std::string& what);
void wait(State state, unsigned mask, const char* file, int line);

Region* shared_array(const void* tag, size_t bytes);

template <class T>
Pointer<T> shared(const void* tag, size_t count) {
  return Pointer<T>(shared_array(tag, count * sizeof(T)), 0, count, -1);
}
template <class T>
Pointer<T> dynamic_shared() {
  return Pointer<T>(block->dynamic.get(), 0, block->dynamic->bytes / sizeof(T), -1);
}

// Every lane of `mask` gives `value`; returns that of lane `source`, or its own where that is not in the warp.
template <class T>
T exchange(unsigned mask, T value, int source, const char* file, int line) {
  static_assert(sizeof(T) <= 8 && std::is_arithmetic_v<T>);
  uint64_t* slots = &block->exchange[block->warp() * WARP];
  memcpy(&slots[block->lane()], &value, sizeof(T));
  wait(State::AtWarpBarrier, mask, file, line);
  T result = value;
  if (source >= 0 && source < static_cast<int>(WARP)) {
    if (!(mask >> source & 1)) fail("a shuffle reads lane " + std::to_string(source) + ", which its mask leaves out");
    memcpy(&result, &slots[source], sizeof(T));
  }
  // Nobody gives its next value before all have read this one.
  wait(State::AtWarpBarrier, mask, file, line);
  return result;
}

// How Rust passes an argument: the address of its value, as cuLaunchKernel takes it, and for a pointer
// the bytes it may reach.
struct Argument {
  const void* value;
  uint64_t bytes;
  uint64_t reach;
  uint32_t is_pointer;
};

Region* region_of(uint64_t address, uint64_t* offset);

template <class P>
P argument(const Argument& given, int number) {
  const auto wrong = [&](const char* what) {
    throw std::runtime_error("parameter " + std::to_string(number) + ": " + what);
  };
  if constexpr (is_pointer<P>::value) {
    if (!given.is_pointer) wrong("the kernel takes a pointer, the launch gives a number");
    uint64_t address = 0, offset = 0;
    memcpy(&address, given.value, sizeof address);
    if (address == 0) return P();
    Region* region = region_of(address, &offset);
    if (!region || offset + given.reach > region->bytes) wrong("the address is not of a device buffer");
    constexpr size_t element = sizeof(typename P::Value);
    if (offset % element) wrong("the address is not aligned to the element");
    return P(region, offset, given.reach / element, number);
  } else {
    if (given.is_pointer) wrong("the kernel takes a number, the launch gives a pointer");
    if (given.bytes != sizeof(P)) wrong("the number's size differs");
    P value;
    memcpy(&value, given.value, sizeof(P));
    return value;
  }
}

// A kernel with its parameters' types forgotten.
struct Kernel {
  const char* name;
  void (*run)(const Argument*, size_t, void (*)(void (*)(void*), void*, void*), void*);
  Kernel* next;
};
extern Kernel* kernels;

template <class... P, size_t... I>
void run_kernel(void (*kernel)(P...), const Argument* arguments, size_t count,
                void (*with)(void (*)(void*), void*, void*), void* data, std::index_sequence<I...>) {
  if (count != sizeof...(P)) {
    throw std::runtime_error("the kernel takes " + std::to_string(sizeof...(P)) + " arguments, the launch gives " +
                             std::to_string(count));
  }
  auto values = std::make_pair(kernel, std::tuple<P...>(argument<P>(arguments[I], static_cast<int>(I))...));
  using Values = decltype(values);
  with([](void* v) { std::apply(static_cast<Values*>(v)->first, static_cast<Values*>(v)->second); }, &values, data);
}

}  // namespace emulator

// Makes a kernel known by name.
#define EMULATOR_KERNEL(kernel)                                                                             \
  static emulator::Kernel registered_##kernel = {                                                           \
      #kernel,                                                                                              \
      [](const emulator::Argument* a, size_t n, void (*with)(void (*)(void*), void*, void*), void* d) {     \
        emulator::run_kernel(kernel, a, n, with, d, parameters_of(kernel));                                 \
      },                                                                                                    \
      emulator::kernels};                                                                                   \
  static const bool known_##kernel = (emulator::kernels = &registered_##kernel, true);

template <class... P>
constexpr auto parameters_of(void (*)(P...)) {
  return std::index_sequence_for<P...>();
}

#define threadIdx (emulator::block->thread().index)
#define blockIdx (emulator::block->index)
#define blockDim (emulator::block->shape)
#define gridDim (emulator::block->grid)

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulator::wait(emulator::State::AtBlockBarrier, 0, file, line);
}
void __syncwarp(unsigned mask = 0xffffffffu, const char* file = __builtin_FILE(), int line = __builtin_LINE());

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int by, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return emulator::exchange(mask, value, static_cast<int>(emulator::block->lane()) ^ by, file, line);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return emulator::exchange(mask, value, lane & 31, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, const char* file = __builtin_FILE(),
                   int line = __builtin_LINE()) {
  return emulator::exchange(mask, value, static_cast<int>(emulator::block->lane() + by), file, line);
}
unsigned __ballot_sync(unsigned mask, int predicate, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE());
inline int __any_sync(unsigned mask, int predicate, const char* file = __builtin_FILE(),
                      int line = __builtin_LINE()) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }

template <class T>
T atomicAdd(emulator::Pointer<T> place, T value) {
  return place.atomic_add(value);
}

struct alignas(16) float4 {
  float x, y, z, w;
};
inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
