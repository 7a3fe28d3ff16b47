#pragma once
#include "autograd.h"

namespace drivetrain {

// torch.optim.AdamW's fused update, in place. `count` is the number of updates, this one included.
void fused_adamw(const TensorList& weights, const TensorList& gradients, const TensorList& exp_avgs,
                 const TensorList& exp_avg_sqs, double learning_rate, double beta1, double beta2,
                 double weight_decay, double epsilon, double count);

}  // namespace drivetrain
