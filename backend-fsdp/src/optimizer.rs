//! AdamW on the shards, with the one point at which a step commits.

use drivetrain_core::{
    Result,
    communicator::Communicator,
    config::JobConfig,
    engine::{OptimReport, StepOptions},
    optim::{self, LearningRate, is_trained, weight_decay},
};
use tch::{Kind, Tensor};

use crate::{
    error::{Torch, torch},
    sharding::Unit,
    shim,
};

/// Settings, schedule, and the number of committed steps.
#[derive(Debug)]
pub(crate) struct Optimizer {
    config: JobConfig,
    schedule: LearningRate,
    /// Committed steps.
    pub(crate) step: u64,
}

impl Optimizer {
    /// The optimizer of a job, before its first step.
    pub(crate) fn new(config: &JobConfig) -> Self {
        Self {
            config: config.clone(),
            schedule: LearningRate::new(config),
            step: 0,
        }
    }

    /// One step over all units, whose gradients are dropped. Collective over `world`. Replicas of a shard hold
    /// the same gradients: one of them `answers` for their norm.
    pub(crate) fn step(
        &mut self,
        units: &mut [Unit],
        world: &dyn Communicator,
        answers: bool,
        options: &StepOptions,
    ) -> Result<OptimReport> {
        let squares = units.iter().map(sum_of_squares).sum::<Torch<f64>>();
        // 0 for another replica, unless it is not finite.
        let own = squares.map(|squares| if answers { squares } else { 0.0 * squares });
        let decision = optim::decide(
            world,
            own.map_err(torch("grad_norm")),
            self.step,
            &self.schedule,
            self.config.optimizer.max_grad_norm,
            options,
        )?;
        let report = decision.report;
        if let Some(scale) = decision.gradient_scale {
            let updated = units
                .iter_mut()
                .try_for_each(|unit| self.update(unit, report.learning_rate, scale));
            optim::committed(report.step, updated.map_err(torch("optim_step")))?;
        }
        self.step = report.step;
        for unit in units {
            unit.gradient = None;
        }
        Ok(report)
    }

    /// Parameters that decay and those that do not, each in one fused call.
    fn update(&self, unit: &mut Unit, learning_rate: f64, scale: f64) -> Torch<()> {
        let Some(mut gradient) = unit.gradient.take() else {
            return Ok(());
        };
        if scale != 1.0 {
            let _ = gradient.f_mul_scalar_(scale)?;
        }
        let (config, specs) = (self.config.optimizer, unit.layout.specs());
        let decay = |p: usize| weight_decay(&config, &specs[p]);
        let mut rest: Vec<usize> = (0..specs.len())
            .filter(|&p| !unit.layout.shard(unit.rank, p).is_empty())
            .filter(|&p| is_trained(&self.config, &specs[p]))
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
                    beta1: config.beta1,
                    beta2: config.beta2,
                    weight_decay: decay(first),
                    epsilon: config.epsilon,
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
    let mut total = Tensor::f_zeros([1], (Kind::Double, gradient.device()))?;
    for part in gradient.f_split(STRETCH, 0)? {
        let part = part.f_to_kind(Kind::Double)?;
        let _ = total.f_add_(&part.f_dot(&part)?)?;
    }
    f64::try_from(&total)
}
