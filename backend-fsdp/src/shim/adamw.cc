#include "adamw.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>

namespace drivetrain {

void fused_adamw(const TensorList& weights, const TensorList& gradients, const TensorList& exp_avgs,
                 const TensorList& exp_avg_sqs, double learning_rate, double beta1, double beta2,
                 double weight_decay, double epsilon, double count) {
  if (weights.size() == 0) return;
  const at::NoGradGuard no_grad;
  const auto step = at::full({}, count, weights.tensors[0].options().dtype(at::kFloat));
  const std::vector<at::Tensor> steps(weights.size(), step);
  at::_fused_adamw_(weights.tensors, gradients.tensors, exp_avgs.tensors, exp_avg_sqs.tensors,
                    /*max_exp_avg_sqs=*/{}, steps, learning_rate, beta1, beta2, weight_decay, epsilon,
                    /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace drivetrain
