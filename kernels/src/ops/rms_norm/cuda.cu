// RMS norm on CUDA: the contract of mod.rs. Row r is group r % groups of token r / groups.
#include "common.cuh"

constexpr u32 MOST_WARPS = 32;

// The norm of the row that `value(i)` gives; one block.
template <class Value>
__device__ __forceinline__ float inverse_rms(u32 width, double eps, Value value) {
  SHARED(double, partial, MOST_WARPS);
  double squares = 0.0;
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
    const double x = value(i);
    squares += x * x;
  }
  return static_cast<float>(1.0 / sqrt(block_sum<double>(squares, partial) / width + eps));
}

// A block a row.
extern "C" __global__ void __launch_bounds__(1024)
rms_norm_forward(In<float> x, u64 x_stride, In<float> weight, Out<float> y, u64 y_stride, Out<float> inv_rms,
                 u32 groups, u32 width, double eps) {
  const u32 row = blockIdx.x;
  const u64 band = static_cast<u64>(row % groups) * width;
  const auto in = x + (row / groups * x_stride + band);
  const auto out = y + (row / groups * y_stride + band);
  const float inverse = inverse_rms(width, eps, [&](u32 i) -> float { return in[i]; });
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[i] = in[i] * inverse * weight[i];
  if (threadIdx.x == 0) inv_rms[row] = inverse;
}

// y of an earlier forward pass, made again from its inv_rms; a block a row.
extern "C" __global__ void __launch_bounds__(1024)
rms_norm_apply(In<float> x, u64 x_stride, In<float> weight, In<float> inv_rms, Out<float> y, u64 y_stride, u32 groups,
               u32 width) {
  const u32 row = blockIdx.x;
  const u64 band = static_cast<u64>(row % groups) * width;
  const auto in = x + (row / groups * x_stride + band);
  const auto out = y + (row / groups * y_stride + band);
  const float inverse = inv_rms[row];
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[i] = in[i] * inverse * weight[i];
}

// A block a row: h = x + residual first. A thread reads back only what it wrote itself.
extern "C" __global__ void __launch_bounds__(1024)
rms_norm_forward_residual(In<float> x, In<float> residual, In<float> weight, Out<float> h, Out<float> y,
                          Out<float> inv_rms, u32 width, double eps) {
  const u64 start = static_cast<u64>(blockIdx.x) * width;
  const float inverse = inverse_rms(width, eps, [&](u32 i) -> float {
    const float sum = x[start + i] + residual[start + i];
    h[start + i] = sum;
    return sum;
  });
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) y[start + i] = h[start + i] * inverse * weight[i];
  if (threadIdx.x == 0) inv_rms[blockIdx.x] = inverse;
}

// dx of a row, a block each: inv_rms (g - x inv_rms^2 mean(g x)), g = dy w.
extern "C" __global__ void __launch_bounds__(1024)
rms_norm_backward_input(In<float> dy, u64 dy_stride, In<float> x, u64 x_stride, In<float> weight, In<float> inv_rms,
                        u32 accumulate, Out<float> dx, u64 dx_stride, u32 groups, u32 width) {
  SHARED(double, partial, MOST_WARPS);
  const u32 row = blockIdx.x, token = row / groups;
  const u64 band = static_cast<u64>(row % groups) * width;
  const auto g = dy + (token * dy_stride + band);
  const auto in = x + (token * x_stride + band);
  const auto out = dx + (token * dx_stride + band);
  double products = 0.0;
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
    const float gradient = g[i] * weight[i];
    products += static_cast<double>(gradient) * static_cast<double>(in[i]);
  }
  const double inverse = inv_rms[row];
  const float factor = static_cast<float>(block_sum<double>(products, partial) / width * inverse * inverse);
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
    const float gradient = static_cast<float>(inverse) * (g[i] * weight[i] - in[i] * factor);
    out[i] = accumulate ? out[i] + gradient : gradient;
  }
}

// dw of 32 columns, a block each: thread (c, s) sums rows s, s + blockDim.y, .. of column c, then the sums are
// added in the order of s.
extern "C" __global__ void __launch_bounds__(1024)
rms_norm_backward_weight(In<float> dy, u64 dy_stride, In<float> x, u64 x_stride, In<float> inv_rms, u32 accumulate,
                         Out<float> dweight, u32 rows, u32 groups, u32 width) {
  SHARED(double, sums, 1024);
  const u32 column = blockIdx.x * WARP + threadIdx.x;
  double sum = 0.0;
  if (column < width) {
    for (u32 row = threadIdx.y; row < rows; row += blockDim.y) {
      const u32 token = row / groups;
      const u64 at = static_cast<u64>(row % groups) * width + column;
      const float normed = x[token * x_stride + at] * inv_rms[row];
      sum += static_cast<double>(dy[token * dy_stride + at]) * normed;
    }
  }
  sums[threadIdx.y * WARP + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < width) {
    double total = 0.0;
    for (u32 s = 0; s < blockDim.y; s++) total += sums[s * WARP + threadIdx.x];
    const float gradient = static_cast<float>(total);
    dweight[column] = accumulate ? dweight[column] + gradient : gradient;
  }
}
