#pragma once
#include "autograd.h"

namespace drivetrain {

struct Segment;
struct RecomputeState;

// What a segment gave, which is computed again in backward.
class Recomputed {
 public:
  Recomputed(at::Tensor output, c10::intrusive_ptr<RecomputeState> state);
  ~Recomputed();

  std::unique_ptr<at::Tensor> output() const { return std::make_unique<at::Tensor>(output_); }

  // Frees the output's memory. It is filled again when the gradient of any of `consumers` is known, each of which was
  // computed from the output and needs it in its own backward. Nothing happens where there is no graph.
  void discard(const TensorList& consumers);

 private:
  at::Tensor output_;
  c10::intrusive_ptr<RecomputeState> state_;
};

// Runs the segment and keeps of it nothing but its inputs and the output.
std::unique_ptr<Recomputed> recomputed(const TensorList& inputs, rust::Box<Segment> segment);

}  // namespace drivetrain
