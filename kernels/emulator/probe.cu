// Kernels by which the emulator itself is tested: what it must get right, and what it must refuse.
#include "common.cuh"

// Every thread adds its index to two sums, and its warp's votes to the third.
extern "C" __global__ void probe_atomics(InOut<float> sums) {
  atomicAdd(sums + 0, static_cast<float>(threadIdx.x));
  atomicAdd(sums + 1, 1.0f);
  const u32 odd = __ballot_sync(ALL_LANES, threadIdx.x % 2);
  if (threadIdx.x % WARP == 0) atomicAdd(sums + 2, static_cast<float>(__popc(odd)));
}

// Lane l gets l ^ 5, then lane 7's index, then that of the lane three above, or its own.
extern "C" __global__ void probe_shuffles(Out<float> out) {
  const float mine = static_cast<float>(threadIdx.x);
  out[3 * threadIdx.x] = __shfl_xor_sync(ALL_LANES, mine, 5);
  out[3 * threadIdx.x + 1] = __shfl_sync(ALL_LANES, mine, 7);
  out[3 * threadIdx.x + 2] = __shfl_down_sync(ALL_LANES, mine, 3);
}

// Reversal within the block through shared memory, as it should be.
extern "C" __global__ void probe_reverse(InOut<float> x) {
  SHARED(float, all, 256);
  all[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = all[blockDim.x - 1 - threadIdx.x];
}

// The same within each warp, ordered by __syncwarp alone.
extern "C" __global__ void probe_reverse_warps(InOut<float> x) {
  SHARED(float, all, 256);
  all[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  x[threadIdx.x] = all[threadIdx.x / WARP * WARP + (WARP - 1 - threadIdx.x % WARP)];
}

// The barrier is missing.
extern "C" __global__ void probe_race(InOut<float> x) {
  SHARED(float, all, 256);
  all[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = all[blockDim.x - 1 - threadIdx.x];
}

// A thread writes what others still read.
extern "C" __global__ void probe_late_write(InOut<float> x) {
  SHARED(float, one, 1);
  if (threadIdx.x == 0) one[0] = x[0];
  __syncthreads();
  const float first = one[0];
  if (threadIdx.x == 0) one[0] = 1.0f;
  x[threadIdx.x] = first;
}

// Two blocks write the same element.
extern "C" __global__ void probe_blocks_collide(Out<float> out) { out[threadIdx.x] = 1.0f; }

extern "C" __global__ void probe_beyond_the_end(Out<float> out, u32 count) {
  if (threadIdx.x <= count) out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void probe_before_the_start(Out<float> out) { out[static_cast<int>(threadIdx.x) - 1] = 1.0f; }

extern "C" __global__ void probe_beyond_shared(Out<float> out) {
  SHARED(float, all, 31);
  all[threadIdx.x] = 1.0f;
  out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void probe_unwritten(In<float> x, Out<float> out) { out[threadIdx.x] = x[threadIdx.x]; }

extern "C" __global__ void probe_unwritten_shared(Out<float> out) {
  DYNAMIC_SHARED(float, all);
  out[threadIdx.x] = all[threadIdx.x];
}

extern "C" __global__ void probe_misaligned(In<float> x, Out<float> out) { out[0] = LOAD4(x, 1).x; }

extern "C" __global__ void probe_divergent_barrier(Out<float> out) {
  if (threadIdx.x < 40) __syncthreads();
  out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void probe_two_barriers(Out<float> out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void probe_exited_lane(Out<float> out) {
  if (threadIdx.x == 9) return;
  out[threadIdx.x] = warp_sum(1.0f);
}

extern "C" __global__ void probe_deadlock(Out<float> out) {
  if (threadIdx.x < 16) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1.0f;
}
