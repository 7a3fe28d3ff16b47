// Flat passes on CUDA: the contract of mod.rs. Threads stride over the elements, so any grid will do.
#include "common.cuh"

#define FOR_ELEMENTS(i, count)                                                                        \
  for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < (count);                  \
       i += static_cast<u64>(gridDim.x) * blockDim.x)

extern "C" __global__ void __launch_bounds__(256) axpy(float alpha, In<float> x, Out<float> y, u64 count) {
  FOR_ELEMENTS(i, count) y[i] += alpha * x[i];
}

extern "C" __global__ void __launch_bounds__(256) add(In<float> x, In<float> y, Out<float> out, u64 count) {
  FOR_ELEMENTS(i, count) out[i] = x[i] + y[i];
}

extern "C" __global__ void __launch_bounds__(256) scale(float alpha, Out<float> x, u64 count) {
  FOR_ELEMENTS(i, count) x[i] *= alpha;
}

extern "C" __global__ void __launch_bounds__(256) f32_to_bf16(In<float> x, Out<bf16> y, u64 count) {
  FOR_ELEMENTS(i, count) y[i] = to_bf16(x[i]);
}

extern "C" __global__ void __launch_bounds__(256) bf16_to_f32(In<bf16> x, Out<float> y, u64 count) {
  FOR_ELEMENTS(i, count) y[i] = from_bf16(x[i]);
}

// A sum a block. The grid alone decides who adds what, so the total is the same in every run.
extern "C" __global__ void __launch_bounds__(256)
sum_of_squares_partial(In<float> x, Out<double> partial, u64 count) {
  SHARED(double, warps, 8);
  double sum = 0.0;
  FOR_ELEMENTS(i, count) {
    const double value = x[i];
    sum += value * value;
  }
  sum = block_sum<double>(sum, warps);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block: the sum of the sums.
extern "C" __global__ void __launch_bounds__(256)
sum_of_squares_total(In<double> partial, u32 count, Out<double> total) {
  SHARED(double, warps, 8);
  double sum = 0.0;
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) sum += partial[i];
  sum = block_sum<double>(sum, warps);
  if (threadIdx.x == 0) total[0] = sum;
}
