//! AdamW on the shards, with the one point at which a step commits.

use drivetrain_core::{
    Result,
    communicator::Communicator,
    config::{JobConfig, OptimizerConfig},
    engine::{OptimReport, StepOptions},
    optim::{LearningRate, clip_factor, weight_decay},
};
use tch::{Device, Kind, Tensor};

use crate::{
    error::{Torch, torch},
    sharding::Unit,
    shim,
};

/// Settings, schedule, and the number of committed steps.
#[derive(Debug)]
pub(crate) struct Optimizer {
    config: OptimizerConfig,
    schedule: LearningRate,
    /// Committed steps.
    pub(crate) step: u64,
}

impl Optimizer {
    /// The optimizer of a job, before its first step.
    pub(crate) fn new(config: &JobConfig) -> Self {
        Self {
            config: config.optimizer,
            schedule: LearningRate::new(config),
            step: 0,
        }
    }

    /// One step over all units, whose gradients are dropped. Collective over `shards`: the all-reduce of squared
    /// norm and finite flag is where the step commits or every rank skips it.
    pub(crate) fn step(
        &mut self,
        units: &mut [Unit],
        shards: &dyn Communicator,
        options: &StepOptions,
    ) -> Result<OptimReport> {
        let learning_rate = options
            .learning_rate
            .unwrap_or_else(|| self.schedule.at(self.step));
        let scale = 1.0 / options.gradient_divisor.unwrap_or(1.0);
        let mut squares = 0.0;
        for unit in units.iter() {
            squares += sum_of_squares(unit).map_err(torch("grad_norm"))?;
        }
        let mut sums = [squares, f64::from(u8::from(!squares.is_finite()))];
        shards.sum_f64(&mut sums)?;
        let grad_norm = sums[0].sqrt() * scale.abs();
        let skipped = sums[1] > 0.0 || !grad_norm.is_finite();
        let factor = match skipped {
            true => 1.0,
            false => clip_factor(grad_norm, self.config.max_grad_norm),
        };
        if !skipped {
            for unit in units.iter_mut() {
                self.update(unit, learning_rate, scale * factor)
                    .map_err(torch("optim_step"))?;
            }
            self.step += 1;
        }
        for unit in units {
            unit.gradient = None;
        }
        Ok(OptimReport {
            step: self.step,
            grad_norm,
            clip_factor: factor,
            skipped,
            learning_rate,
        })
    }

    /// Parameters that decay and those that do not, each in one fused call.
    fn update(&self, unit: &mut Unit, learning_rate: f64, scale: f64) -> Torch<()> {
        let Some(mut gradient) = unit.gradient.take() else {
            return Ok(());
        };
        if scale != 1.0 {
            let _ = gradient.f_mul_scalar_(scale)?;
        }
        let decay = |p: usize| weight_decay(&self.config, &unit.layout.specs()[p]);
        let mut rest: Vec<usize> = (0..unit.layout.specs().len())
            .filter(|&p| !unit.layout.shard(unit.rank, p).is_empty())
            .collect();
        while let Some(&first) = rest.first() {
            let (alike, others): (Vec<_>, Vec<_>) =
                rest.into_iter().partition(|&p| decay(p) == decay(first));
            let parts = |flat: &Tensor| -> Torch<Vec<Tensor>> {
                alike.iter().map(|&p| unit.part(flat, p)).collect()
            };
            shim::fused_adamw(
                &parts(&unit.weight)?,
                &parts(&gradient)?,
                &parts(&unit.exp_avg)?,
                &parts(&unit.exp_avg_sq)?,
                shim::AdamwScalars {
                    learning_rate,
                    beta1: self.config.beta1,
                    beta2: self.config.beta2,
                    weight_decay: decay(first),
                    epsilon: self.config.epsilon,
                    count: self.step + 1,
                },
            )?;
            rest = others;
        }
        Ok(())
    }
}

/// In f64, a stretch at a time.
fn sum_of_squares(unit: &Unit) -> Torch<f64> {
    const STRETCH: i64 = 1 << 16;
    let Some(gradient) = &unit.gradient else {
        return Ok(0.0);
    };
    let mut total = Tensor::f_zeros([1], (Kind::Double, Device::Cpu))?;
    for part in gradient.f_split(STRETCH, 0)? {
        let part = part.f_to_kind(Kind::Double)?;
        let _ = total.f_add_(&part.f_dot(&part)?)?;
    }
    f64::try_from(&total)
}
