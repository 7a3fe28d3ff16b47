//! AdamW over this rank's share of every bucket, behind the step's one commit point.

use drivetrain_core::{
    Result,
    config::{JobConfig, OptimizerConfig},
    engine::{OptimReport, StepOptions},
    optim::{self, LearningRate},
};
use drivetrain_kernels::{
    Cpu,
    ops::{
        adamw::{self, AdamW},
        elementwise,
    },
};

use crate::{
    data_parallel::{DataParallel, Gradients},
    weights::{Buffers, Layout},
};

/// Moments of the weights this rank owns, and the step. The master weights are those shares of the f32
/// weights themselves.
#[derive(Debug)]
pub(crate) struct Optimizer {
    config: OptimizerConfig,
    learning_rate: LearningRate,
    /// First and second moment of each bucket's share.
    pub(crate) moments: Vec<[Vec<f32>; 2]>,
    /// Committed steps.
    pub(crate) step: u64,
}

impl Optimizer {
    /// Moments of 0.
    pub(crate) fn new(job: &JobConfig, data: &DataParallel) -> Self {
        Self {
            config: job.optimizer,
            learning_rate: LearningRate::new(job),
            moments: Self::zero_moments(data),
            step: 0,
        }
    }

    /// Moments of 0 for what this rank owns.
    pub(crate) fn zero_moments(data: &DataParallel) -> Vec<[Vec<f32>; 2]> {
        (0..data.num_buckets())
            .map(|b| [vec![0.0; data.own(b).len()], vec![0.0; data.own(b).len()]])
            .collect()
    }

    /// Clips by the global norm and updates this rank's shares of `params`, or changes nothing if a gradient
    /// of any rank is not finite.
    ///
    /// # Errors
    /// The communicator's, all before anything has changed.
    pub(crate) fn update(
        &mut self,
        cpu: Cpu,
        layout: &Layout,
        data: &DataParallel,
        params: &mut Buffers,
        grads: &Gradients,
        options: &StepOptions,
    ) -> Result<OptimReport> {
        let divisor = options.gradient_divisor.unwrap_or(1.0);
        let learning_rate = options
            .learning_rate
            .unwrap_or_else(|| self.learning_rate.at(self.step));
        // The commit point: after this sum every rank knows the same norm and takes the same way.
        let mut sums = own_squares(cpu, layout, data, grads);
        data.sum(&mut sums)?;
        let grad_norm = sums[0].sqrt() / divisor;
        let mut report = OptimReport {
            step: self.step,
            grad_norm,
            clip_factor: 1.0,
            skipped: sums[1] > 0.0 || !grad_norm.is_finite(),
            learning_rate,
        };
        if report.skipped {
            return Ok(report);
        }
        report.clip_factor = optim::clip_factor(grad_norm, self.config.max_grad_norm);
        self.step += 1;
        report.step = self.step;
        for bucket in 0..data.num_buckets() {
            let own = data.own(bucket);
            let g = grads.own(data, bucket);
            let [m, v] = &mut self.moments[bucket];
            for piece in layout.buckets()[bucket].pieces(own.clone()) {
                let spec = &layout.parameters()[piece.parameter];
                if !spec.trainable {
                    continue;
                }
                let factors = AdamW {
                    lr: learning_rate,
                    beta1: self.config.beta1,
                    beta2: self.config.beta2,
                    eps: self.config.epsilon,
                    weight_decay: optim::weight_decay(&self.config, spec),
                    step: self.step,
                    grad_scale: report.clip_factor / divisor,
                };
                let local = piece.range.start - own.start..piece.range.end - own.start;
                adamw::update(
                    cpu,
                    &factors,
                    &mut params.bucket_mut(bucket)[piece.range],
                    &g[local.clone()],
                    &mut m[local.clone()],
                    &mut v[local],
                );
            }
        }
        Ok(report)
    }

    /// Bytes of moments.
    pub(crate) fn num_bytes(&self) -> u64 {
        let elements: usize = self.moments.iter().flatten().map(Vec::len).sum();
        (elements * size_of::<f32>()) as u64
    }
}

/// Sum of squares of what this rank owns (every element is owned once, so the sum over ranks counts each
/// parameter once), and 1 if any of it is not finite.
fn own_squares(cpu: Cpu, layout: &Layout, data: &DataParallel, grads: &Gradients) -> [f64; 2] {
    let mut sums = [0.0, 0.0];
    for (bucket, places) in layout.buckets().iter().enumerate() {
        let own = data.own(bucket);
        let g = grads.own(data, bucket);
        for piece in places.pieces(own.clone()) {
            if layout.parameters()[piece.parameter].trainable {
                let local = piece.range.start - own.start..piece.range.end - own.start;
                let squares = elementwise::sum_of_squares(cpu, &g[local]);
                sums[0] += squares.sum;
                sums[1] += f64::from(u8::from(!squares.finite));
            }
        }
    }
    sums
}
