// Embedding on CUDA: the contract of mod.rs, over all rows of the table or a shard of them.
#include "common.cuh"

// A block a token. An id of another shard gives zeros, an id that is not below `vocab` gives NaN.
extern "C" __global__ void __launch_bounds__(256)
embedding_forward(In<float> table, In<u32> ids, Out<float> y, u32 vocab, u32 first_id, u32 rows, u32 width) {
  const u32 id = ids[blockIdx.x];
  const u64 to = static_cast<u64>(blockIdx.x) * width;
  const bool here = id >= first_id && id - first_id < rows;
  const float otherwise = id < vocab ? 0.0f : not_a_number();
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
    y[to + i] = here ? table[static_cast<u64>(id - first_id) * width + i] : otherwise;
  }
}

// A block a token; the block of an id's first token adds the gradients of all its tokens, in their order, so the
// result is the same in every run. T^2 comparisons in all, which for the tokens of a micro-batch is little beside
// the rows that are moved.
extern "C" __global__ void __launch_bounds__(256)
embedding_backward(In<float> dy, In<u32> ids, Out<float> dtable, u32 tokens, u32 first_id, u32 rows, u32 width) {
  SHARED(u32, found, 256);
  SHARED(u32, warps, 8);
  const u32 first = blockIdx.x, id = ids[first], lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  if (id < first_id || id - first_id >= rows) return;
  bool earlier = false;
  for (u32 t = threadIdx.x; t < first; t += blockDim.x) earlier |= ids[t] == id;
  if (block_sum<u32>(earlier ? 1u : 0u, warps)) return;

  const u64 row = static_cast<u64>(id - first_id) * width;
  for (u32 start = first; start < tokens; start += blockDim.x) {
    // The tokens of this stretch that have the id, in order: places by counting votes.
    const u32 t = start + threadIdx.x;
    const bool match = t < tokens && ids[t] == id;
    const u32 votes = __ballot_sync(ALL_LANES, match);
    __syncthreads();  // the last stretch is done with
    if (lane == 0) warps[warp] = static_cast<u32>(__popc(votes));
    __syncthreads();
    u32 before = 0, total = 0;
    for (u32 w = 0; w < blockDim.x / WARP; w++) {
      const u32 count = warps[w];
      if (w < warp) before += count;
      total += count;
    }
    if (match) found[before + static_cast<u32>(__popc(votes & ((1u << lane) - 1)))] = t;
    __syncthreads();
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
      float sum = total ? dtable[row + i] : 0.0f;
      for (u32 n = 0; n < total; n++) sum += dy[static_cast<u64>(found[n]) * width + i];
      if (total) dtable[row + i] = sum;
    }
  }
}
