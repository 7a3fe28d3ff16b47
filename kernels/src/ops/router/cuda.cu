// Router of a mixture of experts on CUDA: the contract of mod.rs, in f32 or f64. A warp a token; lane l has experts
// l, l + 32, .. up to 1,024.
#include "common.cuh"

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }

template <class T>
__device__ __forceinline__ T largest(T x) {
#pragma unroll
  for (int by = 16; by > 0; by >>= 1) {
    const T other = __shfl_xor_sync(ALL_LANES, x, by);
    x = other > x ? other : x;
  }
  return x;
}

// An expert and what decides about it. NaN ranks below everything.
template <class T>
struct Candidate {
  T score, logit;
  u32 expert;

  __device__ __forceinline__ bool before(const Candidate& other) const {
    if (score > other.score) return true;
    if (score < other.score) return false;
    if (logit > other.logit) return true;
    if (logit < other.logit) return false;
    return expert < other.expert;
  }
};

template <class T>
__device__ __forceinline__ T ranked(T x) {
  return x == x ? x : static_cast<T>(-infinity());
}

template <class T>
__device__ __forceinline__ void route(In<T> logits, In<float> bias, Out<T> probs, Out<T> lse, Out<u32> experts,
                                      Out<float> weights, u32 tokens, u32 num_experts, u32 top_k, u32 renormalise) {
  const u32 lane = threadIdx.x % WARP, token = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
  if (token >= tokens) return;
  const auto l = logits + static_cast<u64>(token) * num_experts;
  const auto p = probs + static_cast<u64>(token) * num_experts;
  const auto chosen = experts + static_cast<u64>(token) * top_k;
  const auto w = weights + static_cast<u64>(token) * top_k;
  T peak = static_cast<T>(-infinity()), sum = 0;
  for (u32 e = lane; e < num_experts; e += WARP) {
    const T x = l[e];
    peak = x > peak ? x : peak;
  }
  peak = largest(peak);
  for (u32 e = lane; e < num_experts; e += WARP) sum += exponential(static_cast<T>(l[e]) - peak);
  sum = warp_sum(sum);
  for (u32 e = lane; e < num_experts; e += WARP) p[e] = exponential(static_cast<T>(l[e]) - peak) / sum;
  if (lane == 0) lse[token] = peak + logarithm(sum);

  u32 taken = 0;  // bit i: expert lane + 32 i
  T best_logit = 0, total = 0;
  for (u32 j = 0; j < top_k; j++) {
    Candidate<T> best = {static_cast<T>(-infinity()), static_cast<T>(-infinity()), num_experts};
    for (u32 e = lane, i = 0; e < num_experts; e += WARP, i++) {
      if (taken >> i & 1) continue;
      const T score = static_cast<T>(p[e]) + (bias ? static_cast<T>(bias[e]) : static_cast<T>(0));
      const Candidate<T> candidate = {ranked(score), ranked(static_cast<T>(l[e])), e};
      if (candidate.before(best)) best = candidate;
    }
#pragma unroll
    for (int by = 16; by > 0; by >>= 1) {
      const Candidate<T> other = {__shfl_xor_sync(ALL_LANES, best.score, by),
                                  __shfl_xor_sync(ALL_LANES, best.logit, by),
                                  __shfl_xor_sync(ALL_LANES, best.expert, by)};
      if (other.before(best)) best = other;
    }
    if (best.expert % WARP == lane) taken |= 1u << best.expert / WARP;
    if (lane == 0) chosen[j] = best.expert;
    // Of the chosen logits: their largest, to which the softmax over them is relative.
    const T logit = l[best.expert];
    best_logit = j == 0 || logit > best_logit ? logit : best_logit;
  }
  __syncwarp();
  if (renormalise) {
    for (u32 j = lane; j < top_k; j += WARP) total += exponential(static_cast<T>(l[chosen[j]]) - best_logit);
    total = warp_sum(total);
  }
  for (u32 j = lane; j < top_k; j += WARP) {
    const u32 e = chosen[j];
    const T x = l[e];
    const T weight = renormalise ? exponential(x - best_logit) / total : exponential(x - peak) / sum;
    w[j] = static_cast<float>(weight);
  }
}

// `d_probs` and `d_lse` may be null.
template <class T>
__device__ __forceinline__ void route_backward(In<T> probs, In<u32> experts, In<float> weights, In<float> d_weights,
                                               In<T> d_probs, In<T> d_lse, Out<T> dlogits, u32 tokens, u32 num_experts,
                                               u32 top_k, u32 renormalise) {
  const u32 lane = threadIdx.x % WARP, token = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
  if (token >= tokens) return;
  const u64 start = static_cast<u64>(token) * num_experts, slots = static_cast<u64>(token) * top_k;
  // sum of w dw over the chosen: for renormalised weights their own mean, otherwise part of that of all p.
  T pull = 0, mean = 0;
  for (u32 j = lane; j < top_k; j += WARP) {
    pull += static_cast<T>(weights[slots + j]) * static_cast<T>(d_weights[slots + j]);
  }
  pull = warp_sum(pull);
  if (d_probs) {
    for (u32 e = lane; e < num_experts; e += WARP) mean += probs[start + e] * d_probs[start + e];
    mean = warp_sum(mean);
  }
  if (!renormalise) mean += pull;
  const T of_lse = d_lse ? d_lse[token] : static_cast<T>(0);
  for (u32 e = lane; e < num_experts; e += WARP) {
    const T p = probs[start + e];
    T gradient = p * ((d_probs ? d_probs[start + e] : static_cast<T>(0)) - mean + of_lse);
    for (u32 j = 0; j < top_k; j++) {
      if (experts[slots + j] != e) continue;
      const T w = weights[slots + j], dw = d_weights[slots + j];
      gradient += renormalise ? w * (dw - pull) : p * dw;
    }
    dlogits[start + e] = gradient;
  }
}

// A block an expert: adds, over tokens `first` to `end`, how many were sent to it and what p they gave it.
template <class T>
__device__ __forceinline__ void loads(In<u32> experts, In<T> probs, Out<u32> counts, Out<double> prob_sums, u32 first,
                                      u32 end, u32 num_experts, u32 top_k) {
  SHARED(u32, count_of_warp, 4);
  SHARED(double, sum_of_warp, 4);
  u32 count = 0;
  double sum = 0.0;
  for (u64 t = first + threadIdx.x; t < end; t += blockDim.x) {
    for (u32 j = 0; j < top_k; j++) count += experts[t * top_k + j] == blockIdx.x ? 1u : 0u;
    sum += probs[t * num_experts + blockIdx.x];
  }
  count = block_sum<u32>(count, count_of_warp);
  sum = block_sum<double>(sum, sum_of_warp);
  if (threadIdx.x == 0) {
    counts[blockIdx.x] += count;
    prob_sums[blockIdx.x] += sum;
  }
}

#define ROUTER(T, name)                                                                                            \
  extern "C" __global__ void __launch_bounds__(128)                                                                \
  router_forward_##name(In<T> logits, In<float> bias, Out<T> probs, Out<T> lse, Out<u32> experts,                  \
                        Out<float> weights, u32 tokens, u32 num_experts, u32 top_k, u32 renormalise) {             \
    route<T>(logits, bias, probs, lse, experts, weights, tokens, num_experts, top_k, renormalise);                 \
  }                                                                                                                \
  extern "C" __global__ void __launch_bounds__(128)                                                                \
  router_backward_##name(In<T> probs, In<u32> experts, In<float> weights, In<float> d_weights, In<T> d_probs,      \
                         In<T> d_lse, Out<T> dlogits, u32 tokens, u32 num_experts, u32 top_k, u32 renormalise) {   \
    route_backward<T>(probs, experts, weights, d_weights, d_probs, d_lse, dlogits, tokens, num_experts, top_k,     \
                      renormalise);                                                                                \
  }                                                                                                                \
  extern "C" __global__ void __launch_bounds__(128)                                                                \
  router_expert_loads_##name(In<u32> experts, In<T> probs, Out<u32> counts, Out<double> prob_sums, u32 first,      \
                             u32 end, u32 num_experts, u32 top_k) {                                                \
    loads<T>(experts, probs, counts, prob_sums, first, end, num_experts, top_k);                                   \
  }

ROUTER(float, f32)
ROUTER(double, f64)

// logits = x W^T in f64, a warp each.
extern "C" __global__ void __launch_bounds__(128)
router_project_f64(In<float> x, In<float> weight, Out<double> logits, u32 num_experts, u32 width, u64 count) {
  const u64 at = static_cast<u64>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
  if (at >= count) return;
  const u64 row = at / num_experts * width, of_expert = at % num_experts * width;
  double sum = 0.0;
  for (u32 i = threadIdx.x % WARP; i < width; i += WARP) {
    sum += static_cast<double>(x[row + i]) * static_cast<double>(weight[of_expert + i]);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % WARP == 0) logits[at] = sum;
}

// out[r, i] += sum over j of coefficient(r, j) rows[j, i], in f64 and the order of j; r by blockIdx.y, i by thread.
// dx has r = token, j = expert; dweight r = expert, j = token.
extern "C" __global__ void __launch_bounds__(256)
router_project_f64_backward(In<double> dlogits, u64 stride_of_r, u64 stride_of_j, In<float> rows, u32 num_rows,
                            Out<float> out, u32 width, u32 num_out) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= width) return;
  for (u64 r = blockIdx.y; r < num_out; r += gridDim.y) {
    double sum = 0.0;
    for (u64 j = 0; j < num_rows; j++) {
      sum += dlogits[r * stride_of_r + j * stride_of_j] * static_cast<double>(rows[j * width + i]);
    }
    out[r * width + i] = static_cast<float>(static_cast<double>(out[r * width + i]) + sum);
  }
}
