// What every kernel includes. No header of CUDA's is needed, so NVRTC alone compiles them.
//
// Kernels take their buffers as In, Out or InOut and their shared memory from SHARED or DYNAMIC_SHARED. On a
// GPU these are plain pointers and arrays. Under the emulator (kernels/emulator) they check every access.
#pragma once

#ifdef DRIVETRAIN_EMULATOR
#include "emulator.h"
template <class T>
using In = emulator::Pointer<const T>;
template <class T>
using Out = emulator::Pointer<T>;
template <class T>
using InOut = emulator::Pointer<T>;
template <class T>
using Shared = emulator::Pointer<T>;
#define SHARED(T, name, count)   \
  static const char name##_tag = 0; \
  const Shared<T> name = emulator::shared<T>(&name##_tag, count)
#define DYNAMIC_SHARED(T, name) const Shared<T> name = emulator::dynamic_shared<T>()
#define LOAD4(pointer, index) ((pointer).load<float4>(index))
#else
// Read only, and no other parameter reaches the same memory.
template <class T>
using In = const T* __restrict__;
// Written, and no other parameter reaches the same memory.
template <class T>
using Out = T* __restrict__;
// Read and written; another parameter may be the same buffer.
template <class T>
using InOut = T*;
template <class T>
using Shared = T*;
#define SHARED(T, name, count) __shared__ T name[count]
#define DYNAMIC_SHARED(T, name)                               \
  extern __shared__ __align__(16) unsigned char dynamic_raw[]; \
  T* const name = reinterpret_cast<T*>(dynamic_raw)
// Four neighbours, the first at a multiple of four.
#define LOAD4(pointer, index) (*reinterpret_cast<const float4*>((pointer) + (index)))
#endif

typedef unsigned u32;
typedef unsigned long long u64;
// bf16 as its bits: no header, and the same rounding on the host.
typedef unsigned short bf16;

constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fffffffu); }
__device__ __forceinline__ bool is_nan(float x) { return x != x; }

__device__ __forceinline__ float from_bf16(bf16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }

// To nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ bf16 to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  const u32 rounded = (bits + (0x7fffu + (bits >> 16 & 1u))) >> 16;
  return static_cast<bf16>(is_nan(x) ? bits >> 16 | 0x40u : rounded);
}

template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int by = 16; by > 0; by >>= 1) x += __shfl_xor_sync(ALL_LANES, x, by);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int by = 16; by > 0; by >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, by));
  return x;
}

// The sum over the block, the same in every thread and whatever their order. The block is whole warps, all of
// which call this; `partial` holds a place a warp.
template <class T>
__device__ __forceinline__ T block_sum(T x, Shared<T> partial) {
  const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
  x = warp_sum(x);
  __syncthreads();  // `partial` may still be read from an earlier sum
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  return warp_sum(lane < warps ? static_cast<T>(partial[lane]) : static_cast<T>(0));
}

// As block_sum, for the largest; NaN is passed over.
__device__ __forceinline__ float block_max(float x, Shared<float> partial) {
  const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
  x = warp_max(x);
  __syncthreads();
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  return warp_max(lane < warps ? static_cast<float>(partial[lane]) : -infinity());
}
