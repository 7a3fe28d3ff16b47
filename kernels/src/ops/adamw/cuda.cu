// AdamW on CUDA: the contract of mod.rs, one fused pass. The host gives the factors of the step in f32.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
adamw_update(Out<float> p, In<float> g, Out<float> m, Out<float> v, float keep, float grad_scale, float one_minus_beta1,
             float beta2, float one_minus_beta2, float step_size, float inv_root, float eps, u64 count) {
  for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<u64>(gridDim.x) * blockDim.x) {
    const float gradient = g[i] * grad_scale;
    float first = m[i], second = v[i];
    first += one_minus_beta1 * (gradient - first);
    second = beta2 * second + one_minus_beta2 * gradient * gradient;
    m[i] = first;
    v[i] = second;
    p[i] = p[i] * keep - step_size * (first / (sqrtf(second) * inv_root + eps));
  }
}
