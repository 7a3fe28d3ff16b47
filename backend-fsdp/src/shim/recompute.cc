#include "recompute.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "drivetrain-fsdp/src/shim/mod.rs.h"
#include "storage.h"

namespace drivetrain {

struct RecomputeState : torch::CustomClassHolder {
  RecomputeState(rust::Box<Segment> segment, std::vector<at::Tensor> inputs)
      : segment(std::move(segment)), inputs(std::move(inputs)) {}

  at::Tensor forward(const std::vector<at::Tensor>& from) const {
    TensorList list;
    list.tensors = from;
    return std::move(*segment->run(list));
  }

  // Computes it again with its graph, and fills the output's memory.
  void again() {
    if (output.defined()) return;
    for (const auto& input : inputs)
      leaves.push_back(input.detach().set_requires_grad(input.requires_grad()));
    {
      const at::AutoGradMode enabled(true);
      output = forward(leaves);
    }
    if (!memory.defined()) return;
    const at::NoGradGuard no_grad;
    resize_storage(memory, bytes);
    memory.copy_(output);
  }

  std::vector<at::Tensor> gradients(const at::Tensor& d_output) {
    again();
    std::vector<at::Tensor> wanted;
    for (const auto& leaf : leaves)
      if (leaf.requires_grad()) wanted.push_back(leaf);
    const auto found = torch::autograd::grad({output}, wanted, {d_output}, std::nullopt, false, true);
    std::vector<at::Tensor> all;
    size_t next = 0;
    for (const auto& leaf : leaves) all.push_back(leaf.requires_grad() ? found[next++] : at::Tensor());
    output.reset();
    leaves.clear();
    return all;
  }

  rust::Box<Segment> segment;
  std::vector<at::Tensor> inputs;
  // The output's memory where it was discarded, with a version counter of its own: filling it is no change to autograd.
  at::Tensor memory;
  size_t bytes = 0;
  // From `again` to `gradients`.
  std::vector<at::Tensor> leaves;
  at::Tensor output;
};

namespace {

struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const c10::intrusive_ptr<RecomputeState>& state,
                            at::TensorList inputs) {
    ctx->saved_data["state"] =
        c10::IValue::make_capsule(c10::intrusive_ptr<torch::CustomClassHolder>(state));
    return state->forward(inputs.vec());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list d_outputs) {
    const auto capsule = ctx->saved_data["state"].toCapsule();
    auto all = static_cast<RecomputeState*>(capsule.get())->gradients(d_outputs[0]);
    all.insert(all.begin(), at::Tensor());
    return all;
  }
};

}  // namespace

Recomputed::Recomputed(at::Tensor output, c10::intrusive_ptr<RecomputeState> state)
    : output_(std::move(output)), state_(std::move(state)) {}

Recomputed::~Recomputed() = default;

void Recomputed::discard(const TensorList& consumers) {
  if (!output_.requires_grad()) return;
  state_->memory = output_.variable_data();
  state_->bytes = output_.storage().nbytes();
  resize_storage(state_->memory, 0);
  for (const auto& consumer : consumers.tensors)
    consumer.register_hook([state = state_](const at::Tensor&) { state->again(); });
}

std::unique_ptr<Recomputed> recomputed(const TensorList& inputs, rust::Box<Segment> segment) {
  auto state = c10::make_intrusive<RecomputeState>(std::move(segment), inputs.tensors);
  if (!at::GradMode::is_enabled()) {
    auto output = state->forward(inputs.tensors);
    return std::make_unique<Recomputed>(std::move(output), std::move(state));
  }
  auto output = Recompute::apply(state, at::TensorList(inputs.tensors));
  return std::make_unique<Recomputed>(std::move(output), std::move(state));
}

}  // namespace drivetrain
