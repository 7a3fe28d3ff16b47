// SwiGLU on CUDA: the contract of mod.rs. blockIdx.y counts tokens, 65,535 at a time; x counts columns.
#include "common.cuh"

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

extern "C" __global__ void __launch_bounds__(256)
swiglu_forward(In<float> gate, u64 gate_stride, In<float> up, u64 up_stride, Out<float> y, u32 tokens, u32 width) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= width) return;
  for (u64 t = blockIdx.y; t < tokens; t += gridDim.y) {
    const float g = gate[t * gate_stride + i];
    y[t * width + i] = g * sigmoid(g) * up[t * up_stride + i];
  }
}

extern "C" __global__ void __launch_bounds__(256)
swiglu_backward(In<float> dy, In<float> gate, u64 gate_stride, In<float> up, u64 up_stride, Out<float> dgate,
                u64 dgate_stride, Out<float> dup, u64 dup_stride, u32 tokens, u32 width) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= width) return;
  for (u64 t = blockIdx.y; t < tokens; t += gridDim.y) {
    const float g = gate[t * gate_stride + i], d = dy[t * width + i], s = sigmoid(g);
    dgate[t * dgate_stride + i] = d * up[t * up_stride + i] * s * (1.0f + g * (1.0f - s));
    dup[t * dup_stride + i] = d * (g * s);
  }
}
