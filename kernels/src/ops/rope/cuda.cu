// RoPE on CUDA: the contract of mod.rs, in place. blockIdx.y counts tokens; a thread has a pair of a head.
#include "common.cuh"

// `sign`: 1 forward, -1 backward. A position beyond the table's `rows` gives NaN.
extern "C" __global__ void __launch_bounds__(256)
rope_rotate(In<u32> positions, In<float> cosines, In<float> sines, u32 rows, float sign, Out<float> x, u64 stride,
            u32 tokens, u32 heads, u32 head_dim) {
  const u32 pair = blockIdx.x * blockDim.x + threadIdx.x, half = head_dim / 2;
  if (pair >= heads * half) return;
  const u32 head = pair / half, i = pair % half;
  for (u64 t = blockIdx.y; t < tokens; t += gridDim.y) {
    const u32 position = positions[t];
    const bool known = position < rows;
    const u64 entry = static_cast<u64>(position) * half + i;
    const float c = known ? cosines[entry] : not_a_number();
    const float s = known ? sign * sines[entry] : not_a_number();
    const auto row = x + (t * stride + head * head_dim);
    const float a = row[i], b = row[half + i];
    row[i] = a * c - b * s;
    row[half + i] = b * c + a * s;
  }
}
