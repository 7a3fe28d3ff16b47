//! One rank's engine: the step, readable from top to bottom.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use drivetrain_core::{
    DType, Error, ErrorKind, Result,
    batch::{Batch, BatchTotals},
    checkpoint::{SaveHandle, StateReader, StateWriter},
    communicator::Communicator,
    engine::{
        Engine, ForwardBackwardReport, MemoryReport, OptimReport, Residency, ScoreRequest,
        StepOptions, WeightInit, Weights,
    },
    moe::{ExpertBias, RouterLosses, no_expert_tokens},
    objective::{Objective, ObjectiveValue, TokenOutputs},
    plan::TrainPlan,
    weights::{SeededWeights, WeightSink, WeightSource},
};
use tch::{Device, Tensor};

use crate::{
    asked::{Asked, ask},
    checkpoint,
    device::{self, Offloaded},
    error::{Torch, torch},
    microbatch::{Forwarded, HeadGradients, Pass},
    model::{Packed, RopeTables, TokenGradients},
    optimizer::Optimizer,
    options::Options,
    router::RouterPass,
    sharding::{Dtypes, ShardGroup},
    shim,
    units::Units,
    warm_up::warm_up,
    weights,
};

/// One rank.
#[derive(Debug)]
pub(crate) struct FsdpEngine {
    plan: TrainPlan,
    options: Options,
    world: Arc<dyn Communicator>,
    group: ShardGroup,
    units: Units,
    rope: RopeTables,
    optimizer: Optimizer,
    bias: ExpertBias,
    /// Of the open step.
    expert_tokens: Vec<Vec<u64>>,
    offloaded: Offloaded,
    /// Shards, root first, and the selection bias that goes with them.
    snapshots: BTreeMap<String, (Vec<Tensor>, ExpertBias)>,
}

impl FsdpEngine {
    /// Builds this rank's part. Collective over `world`.
    pub(crate) fn new(
        plan: &TrainPlan,
        options: Options,
        world: Arc<dyn Communicator>,
        init: WeightInit<'_>,
    ) -> Result<Self> {
        warm_up()?;
        let threads = plan.config.parallel.threads(world.world_size());
        tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX));
        let _no_grad = tch::no_grad_guard();
        let device = device::open(&plan.config, world.rank())?;
        let dtypes = Dtypes::new(&plan.config.precision);
        let group = ShardGroup::new(&world, &plan.mesh, dtypes, options, device)?;
        let mut units = Units::new(&plan.model, &plan.config, &group)?;
        let shards = match init {
            WeightInit::Seed(seed) => {
                let drawn = SeededWeights::new(&plan.model, seed);
                Some(weights::read(&units.all, &drawn)?)
            }
            WeightInit::Source(source) => Some(weights::read(&units.all, source)?),
            WeightInit::Deferred => None,
        };
        for (unit, shard) in units.all.iter_mut().zip(shards.into_iter().flatten()) {
            unit.weight = shard;
        }
        Ok(Self {
            options,
            group,
            units,
            rope: RopeTables::default(),
            optimizer: Optimizer::new(&plan.config),
            bias: ExpertBias::zeros(&plan.model),
            expert_tokens: no_expert_tokens(&plan.model),
            snapshots: BTreeMap::new(),
            offloaded: Offloaded::default(),
            plan: plan.clone(),
            world,
        })
    }

    /// Counts the units that are gathered.
    #[cfg(test)]
    pub(crate) fn residents(&self) -> &crate::sharding::Residents {
        self.group.residents()
    }

    /// Every micro-batch forward and backward. A rank whose objective fails goes on with empty micro-batches, so
    /// that the others do not wait for it; at the end all ranks agree.
    fn accumulate(
        &mut self,
        batch: &Batch,
        objective: &dyn Objective,
        totals: &BatchTotals,
    ) -> Result<ForwardBackwardReport> {
        let mut report = ForwardBackwardReport {
            expert_tokens: no_expert_tokens(&self.plan.model),
            ..ForwardBackwardReport::default()
        };
        let losses = RouterLosses::new(&self.plan.config, &self.plan.model);
        let mut outcome = Ok(());
        let mut parts = batch.iter_microbatches().peekable();
        while let Some(mut part) = parts.next() {
            if outcome.is_err() {
                part = part.select(&[]);
            }
            let packed = self.pack(&part, &part.scored())?;
            let forwarded = self.pass().forward(&self.units, &packed)?;
            let router = RouterPass {
                losses,
                part: &part,
                totals,
                data: &*self.world,
            };
            let router = router.gradients(&forwarded.routed(), &mut report)?;
            let mut head = None;
            if outcome.is_ok() {
                outcome = self
                    .evaluate(&part, &packed, &forwarded, objective, totals, &mut report)
                    .map(|gradients| head = gradients);
            }
            let pass = Pass {
                reduce: !self.options.accumulate_unsharded || parts.peek().is_none(),
                ..pass(&self.plan, &self.group, self.options, &self.bias)
            };
            pass.backward(&mut self.units, &packed, forwarded, head, &router)?;
        }
        self.world.agree("forward_backward", outcome)?;
        report.all_reduce(&*self.world)?;
        let sums = self.expert_tokens.iter_mut().flatten();
        let counts = report.expert_tokens.iter().flatten();
        sums.zip(counts).for_each(|(sum, n)| *sum += n);
        Ok(report)
    }

    /// The objective over a forwarded micro-batch, and its derivatives back through the head. One pass over the
    /// logits where the derivatives are known beforehand, else two.
    fn evaluate(
        &self,
        part: &Batch,
        packed: &Packed,
        forwarded: &Forwarded,
        objective: &dyn Objective,
        totals: &BatchTotals,
        report: &mut ForwardBackwardReport,
    ) -> Result<Option<HeadGradients>> {
        let needs = objective.requires();
        let (asked, width) = ask(
            part,
            packed,
            needs.temperature,
            needs.entropy,
            needs.log_probs_at.as_deref(),
        )?;
        let pass = self.pass();
        let outputs = match objective.derivative_known() {
            true => no_outputs(packed, &asked, width),
            false => pass
                .score_forwarded(&self.units, forwarded, &asked)?
                .spread(packed, width),
        };
        let mut value = objective.evaluate(part, &outputs, totals)?;
        let gradients = token_gradients(packed, &value, width)?;
        let (scores, head) = match pass.backward_head(&self.units, forwarded, &asked, &gradients)? {
            Some((scores, head)) => (Some(scores), Some(head)),
            None => (None, None),
        };
        if let (true, Some(scores)) = (objective.derivative_known(), scores) {
            value = objective.evaluate(part, &scores.spread(packed, width), totals)?;
        }
        report.loss += value.loss;
        report.metrics.merge(&value.metrics);
        Ok(head)
    }

    fn pack(&mut self, part: &Batch, scored: &[bool]) -> Result<Packed> {
        let device = self.group.device();
        Packed::new(part, scored, &self.plan.model, &mut self.rope, device)
    }

    fn pass(&self) -> Pass<'_> {
        pass(&self.plan, &self.group, self.options, &self.bias)
    }

    fn drop_step(&mut self) {
        self.units.drop_gradients();
        self.expert_tokens = no_expert_tokens(&self.plan.model);
    }

    /// The shards that `weights` names, root first, and the selection bias that goes with them.
    fn shards(&self, weights: &Weights) -> Result<(Vec<&Tensor>, &ExpertBias)> {
        match weights {
            Weights::Policy => Ok((self.units.weights(), &self.bias)),
            Weights::Tag(tag) => {
                let (shards, bias) = self.snapshots.get(tag).ok_or_else(|| unguarded(tag))?;
                Ok((shards.iter().collect(), bias))
            }
        }
    }

    fn export(
        &self,
        shards: Vec<&Tensor>,
        dtype: impl Fn(DType) -> DType,
        sink: &mut dyn WeightSink,
    ) -> Result<()> {
        let mut specs = self.plan.model.parameters();
        for spec in &mut specs {
            spec.dtype = dtype(spec.dtype);
        }
        let on_host = shards.iter().map(|shard| shard.f_to_device(Device::Cpu));
        let on_host: Vec<_> = on_host
            .collect::<Torch<_>>()
            .map_err(torch("export_weights"))?;
        let export = weights::Export {
            units: &self.units.all,
            shards: on_host.iter().collect(),
            specs,
            version: self.optimizer.step,
        };
        weights::export(&export, self.group.communicator(), sink)
    }
}

impl Engine for FsdpEngine {
    fn forward_backward(
        &mut self,
        batch: &Batch,
        objective: &dyn Objective,
        totals: &BatchTotals,
    ) -> Result<ForwardBackwardReport> {
        let started = Instant::now();
        self.offloaded.train("forward_backward")?;
        let _no_grad = tch::no_grad_guard();
        let mut report = self
            .accumulate(batch, objective, totals)
            .inspect_err(|_| self.drop_step())?;
        report.seconds = started.elapsed().as_secs_f64();
        Ok(report)
    }

    fn forward(&mut self, batch: &Batch, request: &ScoreRequest) -> Result<TokenOutputs> {
        self.offloaded.score("forward")?;
        let _no_grad = tch::no_grad_guard();
        let mut outputs = TokenOutputs::default();
        for part in batch.iter_microbatches() {
            let packed = self.pack(&part, &part.predicted())?;
            let (asked, width) = ask(
                &part,
                &packed,
                request.temperature,
                request.entropy,
                request.log_probs_at.as_deref(),
            )?;
            let (shards, bias) = self.shards(&request.weights)?;
            let pass = pass(&self.plan, &self.group, self.options, bias);
            let scores = pass.score(&self.units, &shards, &packed, &asked)?;
            outputs.append(scores.spread(&packed, width));
        }
        Ok(outputs)
    }

    fn optim_step(&mut self, options: &StepOptions) -> Result<OptimReport> {
        self.offloaded.train("optim_step")?;
        let _no_grad = tch::no_grad_guard();
        let answers = self.group.is_first_replica();
        let report = (self.optimizer).step(&mut self.units.all, &*self.world, answers, options)?;
        if !report.skipped {
            let rate = self.plan.config.moe.bias_update_rate;
            self.bias.update(rate, &self.expert_tokens);
        }
        self.drop_step();
        Ok(report)
    }

    fn zero_grad(&mut self) -> Result<()> {
        self.drop_step();
        Ok(())
    }

    fn step(&self) -> u64 {
        self.optimizer.step
    }

    fn export_weights(&mut self, weights: &Weights, sink: &mut dyn WeightSink) -> Result<()> {
        let chosen = self.plan.config.precision.export;
        self.export(self.shards(weights)?.0, |own| chosen.unwrap_or(own), sink)
    }

    fn export_gradients(&mut self, sink: &mut dyn WeightSink) -> Result<()> {
        let gradients: Vec<_> = self
            .units
            .all
            .iter()
            .filter_map(|u| u.gradient.as_ref())
            .collect();
        self.export(gradients, |_| DType::F32, sink)
    }

    fn import_weights(&mut self, weights: &Weights, source: &dyn WeightSource) -> Result<()> {
        let read = weights::read(&self.units.all, source);
        let shards = self.world.agree("import_weights", read)?;
        let bias = ExpertBias::zeros(&self.plan.model);
        match weights {
            Weights::Policy => {
                self.bias = bias;
                for (unit, shard) in self.units.all.iter_mut().zip(shards) {
                    unit.weight = shard;
                }
            }
            Weights::Tag(tag) => {
                self.snapshots.insert(tag.clone(), (shards, bias));
            }
        }
        Ok(())
    }

    fn save_state(&mut self, mut writer: Box<dyn StateWriter>) -> Result<SaveHandle> {
        let speaks = self.group.is_first_replica();
        self.bias.write(&mut *writer)?;
        checkpoint::save(&self.units.all, self.optimizer.step, speaks, &mut *writer)?;
        writer.finish()
    }

    fn load_state(&mut self, reader: &dyn StateReader) -> Result<()> {
        self.optimizer.step = checkpoint::load(&mut self.units.all, reader)?;
        self.bias = ExpertBias::read(&self.plan.model, reader)?;
        self.expert_tokens = no_expert_tokens(&self.plan.model);
        Ok(())
    }

    fn snapshot(&mut self, tag: &str) -> Result<()> {
        let copies = self.units.weights().into_iter().map(Tensor::copy).collect();
        (self.snapshots).insert(tag.to_owned(), (copies, self.bias.clone()));
        Ok(())
    }

    fn drop_snapshot(&mut self, tag: &str) -> Result<()> {
        self.snapshots.remove(tag);
        Ok(())
    }

    fn set_residency(&mut self, residency: Residency) -> Result<()> {
        let home = |held_by_host: bool| match held_by_host {
            true => Device::Cpu,
            false => self.group.home(),
        };
        let moments = home(residency != Residency::Device);
        let weights = home(residency == Residency::Offloaded);
        let moved = |tensor: &mut Tensor, to: Device| -> Result<()> {
            *tensor = tensor.f_to_device(to).map_err(torch("set_residency"))?;
            Ok(())
        };
        for unit in &mut self.units.all {
            moved(&mut unit.exp_avg, moments)?;
            moved(&mut unit.exp_avg_sq, moments)?;
            moved(&mut unit.weight, weights)?;
        }
        for (shards, _) in self.snapshots.values_mut() {
            shards
                .iter_mut()
                .try_for_each(|shard| moved(shard, weights))?;
        }
        self.offloaded = Offloaded(residency);
        if residency != Residency::Device {
            self.rope = RopeTables::default();
            shim::release_memory();
        }
        Ok(())
    }

    fn memory(&self) -> MemoryReport {
        let floats = self.units.all.iter().map(|u| u.len() as u64 * 4).sum();
        MemoryReport {
            parameters: floats,
            gradients: if self.units.has_gradients() {
                floats
            } else {
                0
            },
            optimizer: 2 * floats,
            snapshots: self.snapshots.len() as u64 * floats,
            ..MemoryReport::default()
        }
    }
}

fn pass<'a>(
    plan: &'a TrainPlan,
    group: &'a ShardGroup,
    options: Options,
    bias: &'a ExpertBias,
) -> Pass<'a> {
    Pass {
        model: &plan.model,
        group,
        prefetch: options.prefetch,
        reduce: true,
        recompute: plan.config.recompute.full_layers,
        logits_budget: plan.config.logits_budget_bytes,
        bias,
        frozen_router: plan.config.moe.frozen_router,
    }
}

/// The guard knows the tags.
fn unguarded(tag: &str) -> Error {
    Error::new(ErrorKind::Defect, "find_snapshot", "no such snapshot").with("tag", tag)
}

fn no_outputs(packed: &Packed, asked: &Asked, width: usize) -> TokenOutputs {
    let zeros = |width: usize| vec![0.0; packed.num_tokens * width];
    TokenOutputs {
        log_probs: zeros(1),
        entropy: asked.entropy.then(|| zeros(1)),
        log_probs_at: (width > 0).then(|| zeros(width)),
        values: None,
    }
}

fn token_gradients(
    packed: &Packed,
    value: &ObjectiveValue,
    width: usize,
) -> Result<TokenGradients> {
    TokenGradients::select(
        packed,
        &value.d_log_probs,
        value.d_entropy.as_deref(),
        value.d_log_probs_at.as_deref().map(|d| (d, width)),
    )
    .map_err(torch("forward_backward"))
}
