// What a linear layer needs beside its products on CUDA: the bias.
#include "common.cuh"

// y of every row = bias. blockIdx.y counts rows.
extern "C" __global__ void __launch_bounds__(256)
linear_fill_bias(In<float> bias, Out<float> y, u64 stride, u32 width, u32 rows) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= width) return;
  const float value = bias[i];
  for (u64 row = blockIdx.y; row < rows; row += gridDim.y) y[row * stride + i] = value;
}

// Sums of 32 columns, a block each: thread (c, s) adds rows s, s + blockDim.y, .. of column c, then the sums are added
// in the order of s.
extern "C" __global__ void __launch_bounds__(1024)
linear_backward_bias(In<float> dy, u64 stride, u32 accumulate, Out<float> dbias, u32 rows, u32 width) {
  SHARED(double, sums, 1024);
  const u32 column = blockIdx.x * WARP + threadIdx.x;
  double sum = 0.0;
  if (column < width) {
    for (u64 row = threadIdx.y; row < rows; row += blockDim.y) sum += dy[row * stride + column];
  }
  sums[threadIdx.y * WARP + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < width) {
    double total = 0.0;
    for (u32 s = 0; s < blockDim.y; s++) total += sums[s * WARP + threadIdx.x];
    const float gradient = static_cast<float>(total);
    dbias[column] = accumulate ? dbias[column] + gradient : gradient;
  }
}
