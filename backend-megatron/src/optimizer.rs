//! AdamW over this rank's share of every region, behind the step's one commit point.

use drivetrain_core::{
    Result,
    communicator::Communicator,
    config::JobConfig,
    engine::{OptimReport, StepOptions},
    optim::{self, LearningRate},
};
use drivetrain_kernels::{
    Memory, Processor,
    ops::{
        adamw::{self, AdamW},
        elementwise,
    },
};

use crate::{
    data_parallel::{DataParallel, Gradients},
    device,
    weights::{Buffers, Layout},
};

/// Moments of the weights this rank owns, and the step. The master weights are those shares of the f32
/// weights themselves.
#[derive(Debug)]
pub(crate) struct Optimizer {
    config: JobConfig,
    learning_rate: LearningRate,
    /// First and second moment of each region's share.
    pub(crate) moments: Vec<[Memory; 2]>,
    /// Committed steps.
    pub(crate) step: u64,
}

impl Optimizer {
    /// Moments of 0.
    pub(crate) fn new(job: &JobConfig, data: &DataParallel, processor: &Processor) -> Self {
        Self {
            config: job.clone(),
            learning_rate: LearningRate::new(job),
            moments: Self::zero_moments(data, processor),
            step: 0,
        }
    }

    /// Moments of 0 for what this rank owns.
    pub(crate) fn zero_moments(data: &DataParallel, processor: &Processor) -> Vec<[Memory; 2]> {
        let zeros = |region| [(); 2].map(|()| processor.zeros(data.own(region).len()));
        (0..data.num_regions()).map(zeros).collect()
    }

    /// Clips by the global norm and updates this rank's shares of `params`, or changes nothing if a gradient
    /// of any rank is not finite.
    ///
    /// # Errors
    /// Those of [`optim::decide`], all before anything has changed.
    pub(crate) fn update(
        &mut self,
        processor: &Processor,
        world: &dyn Communicator,
        (layout, data): (&Layout, &DataParallel),
        params: &mut Buffers,
        grads: &Gradients,
        options: &StepOptions,
    ) -> Result<OptimReport> {
        let decision = optim::decide(
            world,
            own_squares(processor, data, grads),
            self.step,
            &self.learning_rate,
            self.config.optimizer.max_grad_norm,
            options,
        )?;
        let report = decision.report;
        let Some(grad_scale) = decision.gradient_scale else {
            return Ok(report);
        };
        self.step = report.step;
        for region in 0..data.num_regions() {
            let (own, bucket) = (data.own(region), data.region(region).bucket);
            let g = grads.own(region);
            let [m, v] = &mut self.moments[region];
            for piece in layout.pieces(region, own.clone()) {
                let spec = &layout.parameters()[piece.parameter];
                if !optim::is_trained(&self.config, spec) {
                    continue;
                }
                let factors = AdamW {
                    lr: report.learning_rate,
                    beta1: self.config.optimizer.beta1,
                    beta2: self.config.optimizer.beta2,
                    eps: self.config.optimizer.epsilon,
                    weight_decay: optim::weight_decay(&self.config.optimizer, spec),
                    step: self.step,
                    grad_scale,
                };
                let local = piece.range.start - own.start..piece.range.end - own.start;
                adamw::update(
                    processor,
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
        let elements: usize = self.moments.iter().flatten().map(|m| m.len()).sum();
        (elements * size_of::<f32>()) as u64
    }
}

/// Sum of squares of what this rank owns: every element is owned once, so the sum over ranks counts each
/// parameter once.
///
/// # Errors
/// The device's, whatever the gradients came to.
fn own_squares(processor: &Processor, data: &DataParallel, grads: &Gradients) -> Result<f64> {
    let squares = (0..data.num_regions())
        .map(|region| elementwise::sum_of_squares(processor, grads.own(region)).sum)
        .sum();
    device::check(processor, "optim_step").map(|()| squares)
}
