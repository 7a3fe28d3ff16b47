// Attention on CUDA: the contract of mod.rs. The host cuts spans into tiles; a block has a tile of rows of one head
// and walks over the tiles of the other side that it meets. f32 products on the ordinary cores, no atomics: every
// sum has one order.
//
// A warp has R rows. Lane l has columns l, l + 32, .. of the scores (C of them) and of the head dim (D of them).
#include "common.cuh"

constexpr u32 WARPS = 4;

// As the host lays tiles out. `lead`: position of the tile's (or the other side's) first query minus that of its
// first key.
struct Tile {
  u32 row, rows, other, others;
  int lead;
};
constexpr u32 TILE_WORDS = 5;

__device__ __forceinline__ Tile read_tile(In<u32> tiles) {
  const u64 at = static_cast<u64>(blockIdx.x) * TILE_WORDS;
  return {tiles[at], tiles[at + 1], tiles[at + 2], tiles[at + 3], static_cast<int>(static_cast<u32>(tiles[at + 4]))};
}

// Elements between rows in shared memory: whole float4, and lanes that read neighbouring rows meet no bank twice.
__device__ __forceinline__ u32 leading(u32 head_dim) { return (head_dim + 3) / 4 * 4 + 4; }

// The first `rows` of `height` rows, zeros below and beside them.
__device__ __forceinline__ void load_rows(In<float> from, u64 stride, u32 rows, u32 height, u32 head_dim,
                                          Shared<float> to) {
  const u32 ld = leading(head_dim);
  for (u32 row = threadIdx.x / WARP; row < height; row += WARPS) {
    for (u32 i = threadIdx.x % WARP; i < ld; i += WARP) {
      to[row * ld + i] = row < rows && i < head_dim ? from[row * stride + i] : 0.0f;
    }
  }
}

// s[r][c] = row r of `a` . row (lane + 32 c) of `b`.
template <u32 R, u32 C>
__device__ __forceinline__ void products(Shared<float> a, Shared<float> b, u32 head_dim, float (&s)[R][C]) {
  const u32 ld = leading(head_dim), lane = threadIdx.x % WARP;
#pragma unroll
  for (u32 r = 0; r < R; r++) {
#pragma unroll
    for (u32 c = 0; c < C; c++) s[r][c] = 0.0f;
  }
  for (u32 i = 0; i < head_dim; i += 4) {
    float4 y[C];
#pragma unroll
    for (u32 c = 0; c < C; c++) y[c] = LOAD4(b, (lane + WARP * c) * ld + i);
#pragma unroll
    for (u32 r = 0; r < R; r++) {
      const float4 x = LOAD4(a, r * ld + i);
#pragma unroll
      for (u32 c = 0; c < C; c++) {
        s[r][c] += x.x * y[c].x + x.y * y[c].y + x.z * y[c].z + x.w * y[c].w;
      }
    }
  }
}

// sum[r][d] += weights[r][.] . column (lane + 32 d) of `b`, over its first `rows` rows.
template <u32 R, u32 C, u32 D>
__device__ __forceinline__ void weighted_rows(Shared<float> weights, Shared<float> b, u32 rows, u32 head_dim,
                                              float (&sum)[R][D]) {
  const u32 ld = leading(head_dim), lane = threadIdx.x % WARP;
  for (u32 j = 0; j < rows; j++) {
    float y[D];
#pragma unroll
    for (u32 d = 0; d < D; d++) {
      const u32 column = lane + WARP * d;
      y[d] = column < head_dim ? static_cast<float>(b[j * ld + column]) : 0.0f;
    }
#pragma unroll
    for (u32 r = 0; r < R; r++) {
      const float w = weights[r * WARP * C + j];
#pragma unroll
      for (u32 d = 0; d < D; d++) sum[r][d] += w * y[d];
    }
  }
}

// A row of a result from the lanes' columns.
template <u32 D>
__device__ __forceinline__ void store_row(const float (&values)[D], float factor, bool accumulate, u32 head_dim,
                                          Out<float> to) {
#pragma unroll
  for (u32 d = 0; d < D; d++) {
    const u32 column = threadIdx.x % WARP + WARP * d;
    if (column >= head_dim) continue;
    const float value = values[d] * factor;
    to[column] = accumulate ? to[column] + value : value;
  }
}

struct Heads {
  u32 heads, kv_heads, head_dim, window;
  float scale;
  __device__ __forceinline__ bool visible(int back) const {
    return back >= 0 && static_cast<u32>(back) < window;
  }
};

template <u32 R, u32 C, u32 D>
__device__ __forceinline__ void forward(In<u32> tiles, In<float> q, u64 q_stride, In<float> k, u64 k_stride,
                                        In<float> v, u64 v_stride, u32 merge, Out<float> out, u64 out_stride,
                                        Out<float> lse, Heads h) {
  constexpr u32 HEIGHT = WARPS * R, WIDTH = WARP * C;
  DYNAMIC_SHARED(float, all);
  const u32 ld = leading(h.head_dim), lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const auto q_tile = all;
  const auto k_tile = q_tile + HEIGHT * ld;
  const auto v_tile = k_tile + WIDTH * ld;
  const auto p = v_tile + (WIDTH * ld + warp * R * WIDTH);
  const Tile tile = read_tile(tiles);
  const u32 head = blockIdx.y, kv_column = head / (h.heads / h.kv_heads) * h.head_dim;
  load_rows(q + (tile.row * q_stride + head * h.head_dim), q_stride, tile.rows, HEIGHT, h.head_dim, q_tile);

  // The running largest score, sum of exponentials and weighted values of each row, relative to that score.
  float peak[R], sum[R], values[R][D];
#pragma unroll
  for (u32 r = 0; r < R; r++) {
    const u32 row = warp * R + r;
    const bool here = merge && row < tile.rows;
    peak[r] = here ? static_cast<float>(lse[static_cast<u64>(tile.row + row) * h.heads + head]) : -infinity();
    sum[r] = peak[r] > -infinity() ? 1.0f : 0.0f;
#pragma unroll
    for (u32 d = 0; d < D; d++) {
      const u32 column = lane + WARP * d;
      const bool inside = here && column < h.head_dim && sum[r] > 0.0f;
      const u64 at = (tile.row + row) * out_stride + head * h.head_dim + column;
      values[r][d] = inside ? static_cast<float>(out[at]) : 0.0f;
    }
  }
  for (u32 first = 0; first < tile.others; first += WIDTH) {
    const u32 keys = min(WIDTH, tile.others - first);
    const u64 row = tile.other + first;
    __syncthreads();  // the last tiles are done with
    load_rows(k + (row * k_stride + kv_column), k_stride, keys, WIDTH, h.head_dim, k_tile);
    load_rows(v + (row * v_stride + kv_column), v_stride, keys, WIDTH, h.head_dim, v_tile);
    __syncthreads();
    float s[R][C];
    products<R, C>(q_tile + warp * R * ld, k_tile, h.head_dim, s);
#pragma unroll
    for (u32 r = 0; r < R; r++) {
      const u32 query = warp * R + r;
      const int back = tile.lead + static_cast<int>(query) - static_cast<int>(first);
      float largest = -infinity();
#pragma unroll
      for (u32 c = 0; c < C; c++) {
        const u32 key = lane + WARP * c;
        const bool seen = query < tile.rows && key < keys && h.visible(back - static_cast<int>(key));
        s[r][c] = seen ? s[r][c] * h.scale : -infinity();
        largest = fmaxf(largest, s[r][c]);
      }
      const float now = fmaxf(peak[r], warp_max(largest));
      // With nothing seen yet there is no score to be relative to, and all is 0.
      const bool any = now > -infinity();
      const float shrink = any ? expf(peak[r] - now) : 0.0f;
      float added = 0.0f;
#pragma unroll
      for (u32 c = 0; c < C; c++) {
        const float e = any ? expf(s[r][c] - now) : 0.0f;
        p[r * WIDTH + lane + WARP * c] = e;
        added += e;
      }
      sum[r] = sum[r] * shrink + warp_sum(added);
      peak[r] = now;
#pragma unroll
      for (u32 d = 0; d < D; d++) values[r][d] *= shrink;
    }
    __syncwarp();
    weighted_rows<R, C, D>(p, v_tile, keys, h.head_dim, values);
  }
#pragma unroll
  for (u32 r = 0; r < R; r++) {
    const u32 row = warp * R + r;
    if (row >= tile.rows) continue;
    const bool any = sum[r] > 0.0f;
    const u64 at = tile.row + row;
    store_row<D>(values[r], any ? 1.0f / sum[r] : 0.0f, false, h.head_dim, out + (at * out_stride + head * h.head_dim));
    if (lane == 0) lse[at * h.heads + head] = any ? peak[r] + logf(sum[r]) : -infinity();
  }
}

// dq of a tile of queries, from the keys they see.
template <u32 R, u32 C, u32 D>
__device__ __forceinline__ void backward_queries(In<u32> tiles, In<float> q, u64 q_stride, In<float> k, u64 k_stride,
                                                 In<float> v, u64 v_stride, In<float> lse, In<float> delta,
                                                 In<float> dout, u64 dout_stride, u32 accumulate, Out<float> dq,
                                                 u64 dq_stride, Heads h) {
  constexpr u32 HEIGHT = WARPS * R, WIDTH = WARP * C;
  DYNAMIC_SHARED(float, all);
  const u32 ld = leading(h.head_dim), lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const auto q_tile = all;
  const auto dout_tile = q_tile + HEIGHT * ld;
  const auto k_tile = dout_tile + HEIGHT * ld;
  const auto v_tile = k_tile + WIDTH * ld;
  const auto ds = v_tile + (WIDTH * ld + warp * R * WIDTH);
  const Tile tile = read_tile(tiles);
  const u32 head = blockIdx.y, column = head * h.head_dim, kv_column = head / (h.heads / h.kv_heads) * h.head_dim;
  load_rows(q + (tile.row * q_stride + column), q_stride, tile.rows, HEIGHT, h.head_dim, q_tile);
  load_rows(dout + (tile.row * dout_stride + column), dout_stride, tile.rows, HEIGHT, h.head_dim, dout_tile);
  float row_lse[R], row_delta[R], gradient[R][D];
#pragma unroll
  for (u32 r = 0; r < R; r++) {
    const u32 row = warp * R + r;
    const u64 at = static_cast<u64>(tile.row + row) * h.heads + head;
    row_lse[r] = row < tile.rows ? lse[at] : 0.0f;
    row_delta[r] = row < tile.rows ? delta[at] : 0.0f;
#pragma unroll
    for (u32 d = 0; d < D; d++) gradient[r][d] = 0.0f;
  }
  for (u32 first = 0; first < tile.others; first += WIDTH) {
    const u32 keys = min(WIDTH, tile.others - first);
    const u64 row = tile.other + first;
    __syncthreads();
    load_rows(k + (row * k_stride + kv_column), k_stride, keys, WIDTH, h.head_dim, k_tile);
    load_rows(v + (row * v_stride + kv_column), v_stride, keys, WIDTH, h.head_dim, v_tile);
    __syncthreads();
    float s[R][C], dp[R][C];
    products<R, C>(q_tile + warp * R * ld, k_tile, h.head_dim, s);
    products<R, C>(dout_tile + warp * R * ld, v_tile, h.head_dim, dp);
#pragma unroll
    for (u32 r = 0; r < R; r++) {
      const u32 query = warp * R + r;
      const int back = tile.lead + static_cast<int>(query) - static_cast<int>(first);
#pragma unroll
      for (u32 c = 0; c < C; c++) {
        const u32 key = lane + WARP * c;
        const bool seen = query < tile.rows && key < keys && h.visible(back - static_cast<int>(key));
        const float probability = seen ? expf(s[r][c] * h.scale - row_lse[r]) : 0.0f;
        ds[r * WIDTH + key] = h.scale * probability * (dp[r][c] - row_delta[r]);
      }
    }
    __syncwarp();
    weighted_rows<R, C, D>(ds, k_tile, keys, h.head_dim, gradient);
  }
#pragma unroll
  for (u32 r = 0; r < R; r++) {
    const u32 row = warp * R + r;
    if (row >= tile.rows) continue;
    store_row<D>(gradient[r], 1.0f, accumulate, h.head_dim, dq + ((tile.row + row) * dq_stride + column));
  }
}

// dk and dv of a tile of keys of a key/value head, from all queries that see them, head after head.
template <u32 R, u32 C, u32 D>
__device__ __forceinline__ void backward_keys(In<u32> tiles, In<float> q, u64 q_stride, In<float> k, u64 k_stride,
                                              In<float> v, u64 v_stride, In<float> lse, In<float> delta,
                                              In<float> dout, u64 dout_stride, u32 accumulate, Out<float> dk,
                                              u64 dk_stride, Out<float> dv, u64 dv_stride, Heads h) {
  constexpr u32 HEIGHT = WARPS * R, WIDTH = WARP * C;
  DYNAMIC_SHARED(float, all);
  const u32 ld = leading(h.head_dim), lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const auto k_tile = all;
  const auto v_tile = k_tile + HEIGHT * ld;
  const auto q_tile = v_tile + HEIGHT * ld;
  const auto dout_tile = q_tile + WIDTH * ld;
  const auto p = dout_tile + (WIDTH * ld + 2 * warp * R * WIDTH);
  const auto ds = p + R * WIDTH;
  const Tile tile = read_tile(tiles);
  const u32 group = h.heads / h.kv_heads, kv_column = blockIdx.y * h.head_dim;
  load_rows(k + (tile.row * k_stride + kv_column), k_stride, tile.rows, HEIGHT, h.head_dim, k_tile);
  load_rows(v + (tile.row * v_stride + kv_column), v_stride, tile.rows, HEIGHT, h.head_dim, v_tile);
  float of_keys[R][D], of_values[R][D];
#pragma unroll
  for (u32 r = 0; r < R; r++) {
#pragma unroll
    for (u32 d = 0; d < D; d++) of_keys[r][d] = of_values[r][d] = 0.0f;
  }
  for (u32 head = blockIdx.y * group; head < (blockIdx.y + 1) * group; head++) {
    for (u32 first = 0; first < tile.others; first += WIDTH) {
      const u32 queries = min(WIDTH, tile.others - first);
      const u64 row = tile.other + first;
      __syncthreads();
      load_rows(q + (row * q_stride + head * h.head_dim), q_stride, queries, WIDTH, h.head_dim, q_tile);
      load_rows(dout + (row * dout_stride + head * h.head_dim), dout_stride, queries, WIDTH, h.head_dim, dout_tile);
      __syncthreads();
      float s[R][C], dp[R][C];
      products<R, C>(k_tile + warp * R * ld, q_tile, h.head_dim, s);
      products<R, C>(v_tile + warp * R * ld, dout_tile, h.head_dim, dp);
#pragma unroll
      for (u32 c = 0; c < C; c++) {
        const u32 query = lane + WARP * c;
        const u64 at = (row + query) * h.heads + head;
        const float row_lse = query < queries ? lse[at] : 0.0f;
        const float row_delta = query < queries ? delta[at] : 0.0f;
#pragma unroll
        for (u32 r = 0; r < R; r++) {
          const u32 key = warp * R + r;
          const int back = tile.lead + static_cast<int>(first + query) - static_cast<int>(key);
          const bool seen = query < queries && key < tile.rows && h.visible(back);
          const float probability = seen ? expf(s[r][c] * h.scale - row_lse) : 0.0f;
          p[r * WIDTH + query] = probability;
          ds[r * WIDTH + query] = h.scale * probability * (dp[r][c] - row_delta);
        }
      }
      __syncwarp();
      weighted_rows<R, C, D>(p, dout_tile, queries, h.head_dim, of_values);
      weighted_rows<R, C, D>(ds, q_tile, queries, h.head_dim, of_keys);
    }
  }
#pragma unroll
  for (u32 r = 0; r < R; r++) {
    const u32 row = warp * R + r;
    if (row >= tile.rows) continue;
    const u64 at = tile.row + row;
    store_row<D>(of_keys[r], 1.0f, accumulate, h.head_dim, dk + (at * dk_stride + kv_column));
    store_row<D>(of_values[r], 1.0f, accumulate, h.head_dim, dv + (at * dv_stride + kv_column));
  }
}

// delta of a row and head = dout . out; a warp each.
extern "C" __global__ void __launch_bounds__(128)
attention_delta(In<float> out, u64 out_stride, In<float> dout, u64 dout_stride, Out<float> delta, u32 heads,
                u32 head_dim, u64 count) {
  const u64 at = static_cast<u64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
  if (at >= count) return;
  const u64 row = at / heads, column = at % heads * head_dim;
  float sum = 0.0f;
  for (u32 i = threadIdx.x % WARP; i < head_dim; i += WARP) {
    sum += out[row * out_stride + column + i] * dout[row * dout_stride + column + i];
  }
  sum = warp_sum(sum);
  if (threadIdx.x % WARP == 0) delta[at] = sum;
}

// A row a block.
extern "C" __global__ void __launch_bounds__(128) attention_fill(Out<float> x, u64 stride, u32 width, float value) {
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) x[blockIdx.x * stride + i] = value;
}

// The widest head dim of each form: rows a warp, columns of scores and of the head dim a lane.
#define ATTENTION(width, R, C, D, KEY_R)                                                                             \
  extern "C" __global__ void __launch_bounds__(128) attention_forward_##width(                                       \
      In<u32> tiles, In<float> q, u64 q_stride, In<float> k, u64 k_stride, In<float> v, u64 v_stride, u32 merge,     \
      Out<float> out, u64 out_stride, Out<float> lse, u32 heads, u32 kv_heads, u32 head_dim, u32 window,             \
      float scale) {                                                                                                 \
    forward<R, C, D>(tiles, q, q_stride, k, k_stride, v, v_stride, merge, out, out_stride, lse,                      \
                     {heads, kv_heads, head_dim, window, scale});                                                    \
  }                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(128) attention_backward_queries_##width(                              \
      In<u32> tiles, In<float> q, u64 q_stride, In<float> k, u64 k_stride, In<float> v, u64 v_stride,                \
      In<float> lse, In<float> delta, In<float> dout, u64 dout_stride, u32 accumulate, Out<float> dq, u64 dq_stride, \
      u32 heads, u32 kv_heads, u32 head_dim, u32 window, float scale) {                                              \
    backward_queries<R, C, D>(tiles, q, q_stride, k, k_stride, v, v_stride, lse, delta, dout, dout_stride,           \
                              accumulate, dq, dq_stride, {heads, kv_heads, head_dim, window, scale});                \
  }                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(128) attention_backward_keys_##width(                                 \
      In<u32> tiles, In<float> q, u64 q_stride, In<float> k, u64 k_stride, In<float> v, u64 v_stride,                \
      In<float> lse, In<float> delta, In<float> dout, u64 dout_stride, u32 accumulate, Out<float> dk, u64 dk_stride, \
      Out<float> dv, u64 dv_stride, u32 heads, u32 kv_heads, u32 head_dim, u32 window, float scale) {                \
    backward_keys<KEY_R, C, D>(tiles, q, q_stride, k, k_stride, v, v_stride, lse, delta, dout, dout_stride,          \
                               accumulate, dk, dk_stride, dv, dv_stride,                                             \
                               {heads, kv_heads, head_dim, window, scale});                                          \
  }

ATTENTION(64, 8, 2, 2, 8)
ATTENTION(128, 8, 2, 4, 8)
ATTENTION(256, 8, 1, 8, 4)
