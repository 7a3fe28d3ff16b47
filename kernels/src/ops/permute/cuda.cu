// Permutation of tokens on CUDA: the contract of mod.rs.
#include "common.cuh"

// A block an expert: how many slots come before its own, then the places of its slots in their order.
extern "C" __global__ void __launch_bounds__(256)
permute_sort(In<u32> experts, u32 count, Out<u32> offsets, Out<u32> slots, Out<u32> rows) {
  SHARED(u32, warps, 8);
  const u32 expert = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  u32 below = 0;
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) below += experts[i] < expert ? 1u : 0u;
  u32 next = block_sum<u32>(below, warps);
  if (threadIdx.x == 0) {
    offsets[expert] = next;
    if (expert == gridDim.x - 1) offsets[expert + 1] = count;
  }
  for (u32 start = 0; start < count; start += blockDim.x) {
    const u32 slot = start + threadIdx.x;
    const bool mine = slot < count && experts[slot] == expert;
    const u32 votes = __ballot_sync(ALL_LANES, mine);
    __syncthreads();  // the counts of the last stretch are done with
    if (lane == 0) warps[warp] = static_cast<u32>(__popc(votes));
    __syncthreads();
    u32 before = 0, total = 0;
    for (u32 w = 0; w < blockDim.x / WARP; w++) {
      const u32 of_warp = warps[w];
      if (w < warp) before += of_warp;
      total += of_warp;
    }
    if (mine) {
      const u32 row = next + before + static_cast<u32>(__popc(votes & ((1u << lane) - 1)));
      slots[row] = slot;
      rows[slot] = row;
    }
    next += total;
  }
}

// A block a row: y of the row = x of its token.
extern "C" __global__ void __launch_bounds__(256)
permute_gather(In<u32> slots, In<float> x, Out<float> y, u32 top_k, u32 width) {
  const u64 from = static_cast<u64>(slots[blockIdx.x] / top_k) * width, to = static_cast<u64>(blockIdx.x) * width;
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) y[to + i] = x[from + i];
}

// A block a token: the sum of its rows in the order of its slots, each times its weight unless `weights` is null.
extern "C" __global__ void __launch_bounds__(256)
permute_gather_sum(In<u32> rows, In<float> y, In<float> weights, u32 accumulate, Out<float> out, u32 top_k,
                   u32 width) {
  const u64 first = static_cast<u64>(blockIdx.x) * top_k, to = static_cast<u64>(blockIdx.x) * width;
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
    float sum = accumulate ? static_cast<float>(out[to + i]) : 0.0f;
    for (u32 j = 0; j < top_k; j++) {
      const float value = y[static_cast<u64>(rows[first + j]) * width + i];
      sum += weights ? weights[first + j] * value : value;
    }
    out[to + i] = sum;
  }
}

// A block a row: dy = its weight times dout of its token, and the weight's derivative dout . y in f64.
extern "C" __global__ void __launch_bounds__(256)
permute_unpermute_backward(In<u32> slots, In<float> dout, In<float> y, In<float> weights, Out<float> dy,
                           Out<float> d_weights, u32 top_k, u32 width) {
  SHARED(double, partial, 8);
  const u32 slot = slots[blockIdx.x];
  const u64 from = static_cast<u64>(slot / top_k) * width, row = static_cast<u64>(blockIdx.x) * width;
  const float weight = weights[slot];
  double product = 0.0;
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
    const float d = dout[from + i];
    product += static_cast<double>(d) * static_cast<double>(y[row + i]);
    dy[row + i] = weight * d;
  }
  product = block_sum<double>(product, partial);
  if (threadIdx.x == 0) d_weights[slot] = static_cast<float>(product);
}
