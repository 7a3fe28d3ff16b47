#include "linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

namespace drivetrain {
namespace {

// Elements of the weight that are in f64 at once: 1 MiB, which stays in a core's cache.
constexpr int64_t kScratch = 1 << 17;

struct ExactLinear : torch::autograd::Function<ExactLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& weight) {
    const int64_t n = weight.size(0), k = weight.size(1);
    const int64_t step = std::max<int64_t>(kScratch / std::max<int64_t>(k, 1), 1);
    const auto y = at::empty({x.size(0), n}, x.options());
    const auto inputs = x.to(at::kDouble);
    const auto scratch = at::empty({std::min(step, n), k}, inputs.options());
    for (int64_t first = 0; first < n; first += step) {
      const int64_t rows = std::min(step, n - first);
      const auto w = scratch.narrow(0, 0, rows);
      w.copy_(weight.narrow(0, first, rows));
      y.narrow(1, first, rows).copy_(at::mm(inputs, w.t()));
    }
    ctx->save_for_backward({x, weight});
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list d_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &d_y = d_outputs[0];
    return {d_y.mm(weight), d_y.t().mm(x)};
  }
};

}  // namespace

std::unique_ptr<at::Tensor> exact_linear(const at::Tensor& x, const at::Tensor& weight) {
  for (const auto& t : {x, weight})
    TORCH_CHECK(t.scalar_type() == at::kFloat && t.device().is_cpu() && t.dim() == 2,
                "exact_linear: expected f32 matrices in host memory, found ", t.toString(), " of ",
                t.sizes());
  TORCH_CHECK(x.size(1) == weight.size(1), "exact_linear: expected rows of one length, found ",
              x.sizes(), " and ", weight.sizes());
  return std::make_unique<at::Tensor>(ExactLinear::apply(x, weight));
}

}  // namespace drivetrain
