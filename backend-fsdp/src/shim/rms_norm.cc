#include "rms_norm.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/rms_norm.h>
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

// T is the dtype of rows and weight; what is computed in between is f64.
template <typename T>
void forward_rows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& y,
                  const at::Tensor& inverse, double eps) {
  const int64_t n = weight.numel(), rows = inverse.numel();
  const T *xs = x.const_data_ptr<T>(), *w = weight.const_data_ptr<T>();
  T* ys = y.mutable_data_ptr<T>();
  double* inv = inverse.mutable_data_ptr<double>();
  for_each_task(rows, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* row = xs + r * n;
      const double squares =
          sum_over(n, [&](int64_t i) { return double(float(row[i])) * float(row[i]); });
      inv[r] = 1 / std::sqrt(squares / n + eps);
      for (int64_t i = 0; i < n; ++i)
        ys[r * n + i] = T(float(float(row[i]) * inv[r] * float(w[i])));
    }
  });
}

// With s = 1 / sqrt(mean(x^2) + eps): dx = s (w dy - x s^2 mean(w dy x)), dw = sum over rows of dy x s.
template <typename T>
void backward_rows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& inverse,
                   const at::Tensor& d_y, const at::Tensor& d_x, const at::Tensor& partial) {
  const int64_t n = weight.numel(), rows = inverse.numel();
  const T *xs = x.const_data_ptr<T>(), *w = weight.const_data_ptr<T>();
  const T* dys = d_y.const_data_ptr<T>();
  const double* inv = inverse.const_data_ptr<double>();
  T* dxs = d_x.mutable_data_ptr<T>();
  double* sums = partial.mutable_data_ptr<double>();
  for_each_task(rows, [&](int64_t task, int64_t begin, int64_t end) {
    double* d_w = sums + task * n;
    for (int64_t r = begin; r < end; ++r) {
      const T *row = xs + r * n, *dy = dys + r * n;
      const double s = inv[r];
      const double dot = sum_over(
          n, [&](int64_t i) { return double(float(w[i])) * float(dy[i]) * float(row[i]); });
      const double pull = s * s * dot / n;
      for (int64_t i = 0; i < n; ++i) {
        dxs[r * n + i] = T(float(s * (double(float(w[i])) * float(dy[i]) - float(row[i]) * pull)));
        d_w[i] += double(float(dy[i])) * float(row[i]) * s;
      }
    }
  });
}

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                            const at::Tensor& weight, double eps) {
    const auto x = input.contiguous();
    const int64_t n = weight.numel(), rows = n == 0 ? 0 : x.numel() / n;
    const auto y = at::empty_like(x);
    const auto inverse = at::empty({rows}, x.options().dtype(at::kDouble));
    if (x.scalar_type() == at::kFloat)
      forward_rows<float>(x, weight, y, inverse, eps);
    else
      forward_rows<at::BFloat16>(x, weight, y, inverse, eps);
    ctx->save_for_backward({x, weight, inverse});
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list d_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &inverse = saved[2];
    const auto d_y = d_outputs[0].contiguous();
    const int64_t n = weight.numel(), rows = inverse.numel();
    const auto d_x = at::empty_like(x);
    const auto partial = at::zeros({(rows + kRows - 1) / kRows, n}, inverse.options());
    if (x.scalar_type() == at::kFloat)
      backward_rows<float>(x, weight, inverse, d_y, d_x, partial);
    else
      backward_rows<at::BFloat16>(x, weight, inverse, d_y, d_x, partial);
    return {d_x, partial.sum(0).to(weight.scalar_type()), at::Tensor()};
  }
};

}  // namespace

std::unique_ptr<at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  for (const auto& t : {x, weight})
    TORCH_CHECK((t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16) &&
                    t.scalar_type() == x.scalar_type() && t.device() == x.device(),
                "rms_norm: expected f32 or bf16 of one dtype in one memory, found ", x.toString(), " and ",
                t.toString());
  TORCH_CHECK(weight.dim() == 1 && x.dim() > 0 && x.size(-1) == weight.size(0),
              "rms_norm: expected a weight of x's last dim, found ", weight.sizes(), " for ", x.sizes());
  if (!x.device().is_cpu())
    return std::make_unique<at::Tensor>(at::rms_norm(x, weight.sizes(), weight, eps));
  return std::make_unique<at::Tensor>(RmsNorm::apply(x, weight.contiguous(), eps));
}

}  // namespace drivetrain
