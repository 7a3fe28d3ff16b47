// Log-probability and entropy on CUDA: the contract of mod.rs. A block a row of logits, whole or a shard.
#include "common.cuh"

constexpr u32 MOST_WARPS = 32;
constexpr u32 PARTIALS = 4;

struct Partial {
  double peak, sum, weighted;  // the largest z; sum of e^(z - peak); sum of (z - peak) e^(z - peak)
};

// The same in every thread of the block.
__device__ __forceinline__ Partial row_partial(In<float> logits, u32 columns, float inv_temperature, bool entropy) {
  SHARED(float, maxima, MOST_WARPS);
  SHARED(double, sums, MOST_WARPS);
  float peak = -infinity();
  bool nan = false;
  for (u32 i = threadIdx.x; i < columns; i += blockDim.x) {
    const float x = logits[i];
    peak = fmaxf(peak, x);
    nan |= is_nan(x);
  }
  peak = block_max(peak, maxima);
  double sum = nan ? static_cast<double>(not_a_number()) : 0.0, weighted = 0.0;
  // Without a peak no column can occur, or there are none.
  if (peak > -infinity()) {
    for (u32 i = threadIdx.x; i < columns; i += blockDim.x) {
      const float d = (logits[i] - peak) * inv_temperature, e = expf(d);
      sum += e;
      // d may be negative infinity where e is 0.
      if (entropy) weighted += e * fmaxf(d, -200.0f);
    }
  }
  // Products of two f32 are exact in f64.
  return {static_cast<double>(peak) * inv_temperature, block_sum<double>(sum, sums),
          entropy ? block_sum<double>(weighted, sums) : 0.0};
}

// z of the target, if its column is one of these.
__device__ __forceinline__ double target_logit(In<float> logits, u32 target, u32 first_id, u32 columns,
                                               float inv_temperature) {
  const bool here = target >= first_id && target - first_id < columns;
  return here ? static_cast<double>(logits[target - first_id]) * inv_temperature : -static_cast<double>(infinity());
}

struct Scored {
  double lse;
  float log_prob, entropy;
};

// Of a row's partial results, shard by shard in their order; `shard(r)` gives four numbers.
template <class Shards>
__device__ __forceinline__ Scored combine(u32 shards, Shards shard) {
  double peak = -static_cast<double>(infinity()), target = peak;
  for (u32 r = 0; r < shards; r++) {
    peak = fmax(peak, shard(r, 0));
    target = fmax(target, shard(r, 3));
  }
  double sum = 0.0, weighted = 0.0;
  for (u32 r = 0; r < shards; r++) {
    const double shard_sum = shard(r, 1);
    // Where nothing can occur there is no peak to shift from. NaN sums go on and spoil the row.
    if (shard_sum == 0.0) continue;
    const double shift = shard(r, 0) - peak, share = exp(shift);
    sum += share * shard_sum;
    if (share > 0.0) weighted += share * (shard(r, 2) + shift * shard_sum);
  }
  const double log_sum = log(sum);
  return {peak + log_sum, static_cast<float>(target - peak - log_sum), static_cast<float>(log_sum - weighted / sum)};
}

// `entropy` may be null.
extern "C" __global__ void __launch_bounds__(1024)
cross_entropy_forward(In<float> logits, In<u32> targets, float inv_temperature, Out<float> log_prob, Out<float> entropy,
                      Out<double> lse, u32 columns) {
  const u32 row = blockIdx.x;
  const auto x = logits + static_cast<u64>(row) * columns;
  const bool with_entropy = static_cast<bool>(entropy);
  const Partial partial = row_partial(x, columns, inv_temperature, with_entropy);
  if (threadIdx.x) return;
  const double target = target_logit(x, targets[row], 0, columns, inv_temperature);
  const Scored scored = combine(1, [&](u32, u32 which) {
    return which == 0 ? partial.peak : which == 1 ? partial.sum : which == 2 ? partial.weighted : target;
  });
  log_prob[row] = scored.log_prob;
  lse[row] = scored.lse;
  if (with_entropy) entropy[row] = scored.entropy;
}

extern "C" __global__ void __launch_bounds__(1024)
cross_entropy_forward_partial(In<float> logits, In<u32> targets, float inv_temperature, u32 entropy,
                              Out<double> partials, u32 first_id, u32 columns) {
  const u32 row = blockIdx.x;
  const auto x = logits + static_cast<u64>(row) * columns;
  const Partial partial = row_partial(x, columns, inv_temperature, entropy != 0);
  if (threadIdx.x) return;
  const auto out = partials + static_cast<u64>(row) * PARTIALS;
  out[0] = partial.peak;
  out[1] = partial.sum;
  out[2] = partial.weighted;
  out[3] = target_logit(x, targets[row], first_id, columns, inv_temperature);
}

// A thread a row. `entropy` may be null.
extern "C" __global__ void __launch_bounds__(256)
cross_entropy_combine(In<double> partials, u32 shards, u32 rows, Out<float> log_prob, Out<float> entropy,
                      Out<double> lse) {
  const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const Scored scored = combine(shards, [&](u32 shard, u32 which) -> double {
    return partials[(static_cast<u64>(shard) * rows + row) * PARTIALS + which];
  });
  log_prob[row] = scored.log_prob;
  lse[row] = scored.lse;
  if (entropy) entropy[row] = scored.entropy;
}

// dlogits may be the logits. `entropy` and `d_entropy` may be null.
extern "C" __global__ void __launch_bounds__(1024)
cross_entropy_backward(InOut<const float> logits, In<u32> targets, float inv_temperature, In<double> lse,
                       In<float> d_log_prob, In<float> entropy, In<float> d_entropy, InOut<float> dlogits, u32 first_id,
                       u32 columns) {
  const u32 row = blockIdx.x;
  const u64 start = static_cast<u64>(row) * columns;
  const auto x = logits + start;
  const auto out = dlogits + start;
  const float dl = d_log_prob[row], de = d_entropy ? d_entropy[row] : 0.0f;
  if (dl == 0.0f && de == 0.0f) {
    for (u32 i = threadIdx.x; i < columns; i += blockDim.x) out[i] = 0.0f;
    return;
  }
  // log p = (x - high) / temperature - low: lse in units of logits, and what its rounding lost.
  const double inv = inv_temperature, row_lse = lse[row];
  const float high = static_cast<float>(row_lse / inv);
  const float low = static_cast<float>(row_lse - static_cast<double>(high) * inv);
  // dx = p (level + slope log p), apart from the target. An entropy nothing flows into may hold anything.
  const double pull = de == 0.0f ? 0.0 : static_cast<double>(de) * entropy[row];
  const float level = static_cast<float>(-inv * (dl + pull)), slope = static_cast<float>(-inv * de);
  const u32 target = targets[row] - first_id;  // wraps to a column that is not here
  const u32 holder = target < columns ? target % blockDim.x : blockDim.x;
  float at_target = 0.0f;
  if (threadIdx.x == holder) {
    // 1 - p without cancellation: a sure prediction has p near 1.
    const double log_p = (x[target] - high) * inv_temperature - low, hit = inv * dl;
    const double rest = level + hit + slope * fmax(log_p, -200.0);
    at_target = static_cast<float>(-hit * expm1(log_p) + exp(log_p) * rest);
  }
  for (u32 i = threadIdx.x; i < columns; i += blockDim.x) {
    const float log_p = (x[i] - high) * inv_temperature - low;
    out[i] = i == target ? at_target : expf(log_p) * (slope * fmaxf(log_p, -200.0f) + level);
  }
}
