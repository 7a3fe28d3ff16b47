#include "rms_norm.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

namespace drivetrain {
namespace {

// Rows that one task takes: fixed, so that sums do not depend on the number of threads.
constexpr int64_t kRows = 128;
// Independent partial sums, so that the compiler may use vector registers.
constexpr int64_t kLanes = 8;

template <typename F>
double sum_over(int64_t n, F term) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += term(i + l);
  for (; i < n; ++i) lanes[0] += term(i);
  double total = 0;
  for (double lane : lanes) total += lane;
  return total;
}

template <typename F>
void for_each_task(int64_t rows, F task) {
  const int64_t tasks = (rows + kRows - 1) / kRows;
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) task(t, t * kRows, std::min(rows, (t + 1) * kRows));
  });
}

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                            const at::Tensor& weight, double eps) {
    const auto x = input.contiguous();
    const int64_t n = weight.numel(), rows = n == 0 ? 0 : x.numel() / n;
    const auto y = at::empty_like(x);
    const auto inverse = at::empty({rows}, x.options().dtype(at::kDouble));
    const float *xs = x.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
    float* ys = y.mutable_data_ptr<float>();
    double* inv = inverse.mutable_data_ptr<double>();
    for_each_task(rows, [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const float* row = xs + r * n;
        const double squares = sum_over(n, [&](int64_t i) { return double(row[i]) * row[i]; });
        inv[r] = 1 / std::sqrt(squares / n + eps);
        for (int64_t i = 0; i < n; ++i) ys[r * n + i] = float(row[i] * inv[r] * w[i]);
      }
    });
    ctx->save_for_backward({x, weight, inverse});
    return y;
  }

  // With s = 1 / sqrt(mean(x^2) + eps): dx = s (w dy - x s^2 mean(w dy x)), dw = sum over rows of dy x s.
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list d_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &inverse = saved[2];
    const auto d_y = d_outputs[0].contiguous();
    const int64_t n = weight.numel(), rows = inverse.numel();
    const auto d_x = at::empty_like(x);
    const auto partial = at::zeros({(rows + kRows - 1) / kRows, n}, inverse.options());
    const float *xs = x.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
    const float* dys = d_y.const_data_ptr<float>();
    const double* inv = inverse.const_data_ptr<double>();
    float* dxs = d_x.mutable_data_ptr<float>();
    double* sums = partial.mutable_data_ptr<double>();
    for_each_task(rows, [&](int64_t task, int64_t begin, int64_t end) {
      double* d_w = sums + task * n;
      for (int64_t r = begin; r < end; ++r) {
        const float *row = xs + r * n, *dy = dys + r * n;
        const double s = inv[r];
        const double dot =
            sum_over(n, [&](int64_t i) { return double(w[i]) * dy[i] * row[i]; });
        const double pull = s * s * dot / n;
        for (int64_t i = 0; i < n; ++i) {
          dxs[r * n + i] = float(s * (double(w[i]) * dy[i] - row[i] * pull));
          d_w[i] += double(dy[i]) * row[i] * s;
        }
      }
    });
    return {d_x, partial.sum(0).to(at::kFloat), at::Tensor()};
  }
};

}  // namespace

std::unique_ptr<at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  for (const auto& t : {x, weight})
    TORCH_CHECK(t.scalar_type() == at::kFloat && t.device().is_cpu(),
                "rms_norm: expected f32 in host memory, found ", t.toString());
  TORCH_CHECK(weight.dim() == 1 && x.dim() > 0 && x.size(-1) == weight.size(0),
              "rms_norm: expected a weight of x's last dim, found ", weight.sizes(), " for ", x.sizes());
  return std::make_unique<at::Tensor>(RmsNorm::apply(x, weight.contiguous(), eps));
}

}  // namespace drivetrain
