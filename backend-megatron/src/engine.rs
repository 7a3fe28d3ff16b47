//! One rank's engine: the step, readable from top to bottom.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use drivetrain_core::{
    DType, Error, ErrorKind, Result,
    batch::{Batch, BatchTotals},
    checkpoint::{SaveHandle, StateReader, StateWriter},
    communicator::Communicator,
    engine::{
        Engine, ForwardBackwardReport, MemoryReport, OptimReport, ScoreRequest, StepOptions,
        WeightInit, Weights,
    },
    moe::{ExpertBias, RouterLosses, no_expert_tokens},
    objective::{Objective, TokenOutputs},
    optim,
    plan::{Holdings, PipelineSchedule, TrainPlan},
    weights::{SeededWeights, WeightSink, WeightSource},
};
use drivetrain_kernels::Processor;

use crate::{
    checkpoint,
    data_parallel::{DataParallel, Gradients, Reduction, Slots},
    device,
    microbatch::{Goal, Microbatch},
    model::Model,
    modules::{HeadRequest, RopeTables, RouterGoal},
    optimizer::Optimizer,
    packed::Packed,
    pass::{Means, Pass},
    pipeline_parallel::PipelineShape,
    ranks::Ranks,
    score,
    weights::{self, Buffers, Policy},
    workspace::Workspace,
};

/// One rank.
#[derive(Debug)]
pub(crate) struct MegatronEngine {
    plan: TrainPlan,
    world: Arc<dyn Communicator>,
    ranks: Ranks,
    model: Model,
    processor: Processor,
    workspace: Workspace,
    rope: RopeTables,
    data: DataParallel,
    policy: Policy,
    grads: Gradients,
    /// Counted tokens of each expert in the open step, by layer.
    expert_tokens: Vec<Vec<u64>>,
    optimizer: Optimizer,
    snapshots: BTreeMap<String, Policy>,
}

impl MegatronEngine {
    /// Builds this rank's part. Collective over `world`.
    ///
    /// # Errors
    /// Those of reading weights and of the communicator.
    pub(crate) fn new(
        plan: &TrainPlan,
        processor: Processor,
        world: &Arc<dyn Communicator>,
        init: WeightInit<'_>,
    ) -> Result<Self> {
        let model = Model::new(plan, world.rank())?;
        let ranks = Ranks::new(&**world, plan)?;
        let data = DataParallel::new(&**world, &model.layout)?;
        let import = |source: &dyn WeightSource| weights::import(&model.layout, &processor, source);
        let params = match init {
            WeightInit::Seed(seed) => import(&SeededWeights::new(&plan.model, seed))?,
            WeightInit::Source(source) => import(source)?,
            WeightInit::Deferred => Buffers::zeros(&model.layout, &processor),
        };
        Ok(Self {
            workspace: Workspace::new(processor.clone()),
            rope: RopeTables::default(),
            grads: Gradients::new(&model.layout, &data, &processor),
            optimizer: Optimizer::new(&plan.config, &data, &processor),
            snapshots: BTreeMap::new(),
            plan: plan.clone(),
            world: world.clone(),
            ranks,
            policy: Policy {
                params,
                bias: ExpertBias::zeros(&plan.model),
            },
            expert_tokens: no_expert_tokens(&plan.model),
            model,
            data,
            processor,
        })
    }

    /// Every micro-batch forward and backward; gradients are reduced behind the last backward. At the end all ranks
    /// agree on the outcome.
    fn accumulate(
        &mut self,
        batch: &Batch,
        objective: &dyn Objective,
        totals: &BatchTotals,
    ) -> Result<ForwardBackwardReport> {
        let mut microbatches = self.microbatches(batch, Batch::scored);
        for microbatch in microbatches.iter_mut().filter(|m| m.active).skip(1) {
            microbatch.accumulate = true;
        }
        let PipelineShape { stage, stages, .. } = self.ranks.pipeline.shape;
        let count = microbatches.len();
        let schedule = PipelineSchedule::of(self.plan.schedule, stage, stages, count)?;
        let mut slots = Slots::new(&self.data);
        // A rank that is ahead waits for the others, so that gradients do not pile up. Not where there are stages: of a
        // tied embedding the other stage's part comes at the very end.
        let most = (stages == 1).then_some(2);
        let reduction = Reduction::new(
            &self.data,
            &self.model.layout,
            &self.grads.pool,
            &mut slots,
            most,
        );
        let losses = RouterLosses::new(&self.plan.config, &self.plan.model);
        let router = RouterGoal {
            model: &self.plan.model,
            losses: &losses,
            totals,
        };
        let goal = Goal {
            objective,
            totals,
            router,
        };
        let means = Means {
            model: &self.model,
            policy: &self.policy,
            cpu: self.processor.on(),
            workspace: &self.workspace,
            rope: &self.rope,
            ranks: &self.ranks,
        };
        let local = &mut self.grads.local;
        let outcome = Pass::new(means, goal, &microbatches, local, reduction).run(&schedule);
        let outcome = outcome?;
        self.grads.absorb(&self.processor, slots);
        let outcome = self.checked("forward_backward").and(outcome);
        let mut report = self.world.agree("forward_backward", outcome)?;
        self.ranks.all_reduce(&mut report)?;
        let counts = report.expert_tokens.iter().flatten();
        let sums = self.expert_tokens.iter_mut().flatten();
        sums.zip(counts).for_each(|(sum, n)| *sum += n);
        Ok(report)
    }

    /// Drops the open step.
    fn clear(&mut self) {
        self.grads.clear();
        self.expert_tokens = no_expert_tokens(&self.plan.model);
    }

    /// The share's micro-batches, of each the tokens that `scored` says.
    fn microbatches(&mut self, batch: &Batch, scored: fn(&Batch) -> Vec<bool>) -> Vec<Microbatch> {
        let (context, tensor) = (self.ranks.context.shape, self.ranks.tensor.shape);
        batch
            .iter_microbatches()
            .map(|batch| {
                let packed = Packed::new(&batch, &scored(&batch), context, tensor.size);
                self.rope
                    .cover(&self.processor, &self.plan.model, packed.num_positions());
                Microbatch {
                    // Whoever has experts may be waited for by those who have none of their own.
                    active: packed.any_scored || self.ranks.experts.is_some(),
                    accumulate: false,
                    batch,
                    packed,
                }
            })
            .collect()
    }

    /// Nothing that the device computed is of any use once it has failed.
    ///
    /// # Errors
    /// The device's.
    fn checked(&self, operation: &'static str) -> Result<()> {
        device::check(&self.processor, operation)
    }

    /// As [`Self::checked`], the same on every rank: none goes on alone to wait for the others.
    ///
    /// # Errors
    /// Any device's; the communicator's.
    fn agreed(&self, operation: &'static str) -> Result<()> {
        match &self.processor {
            Processor::Cpu(_) => Ok(()),
            Processor::Device(_) => self.world.agree(operation, self.checked(operation)),
        }
    }

    fn holdings(&self) -> Holdings<'_> {
        Holdings::new(&self.plan.model, &self.plan.mesh, &self.plan.stages)
    }

    fn policy(&self, which: &Weights) -> Result<&Policy> {
        match which {
            Weights::Policy => Ok(&self.policy),
            Weights::Tag(tag) => self.snapshots.get(tag).ok_or_else(|| {
                // The guard knows the tags.
                Error::new(ErrorKind::Defect, "find_snapshot", "no such snapshot").with("tag", tag)
            }),
        }
    }
}

impl Engine for MegatronEngine {
    fn forward_backward(
        &mut self,
        batch: &Batch,
        objective: &dyn Objective,
        totals: &BatchTotals,
    ) -> Result<ForwardBackwardReport> {
        let started = Instant::now();
        let mut outcome = self.accumulate(batch, objective, totals);
        match &mut outcome {
            Ok(report) => report.seconds = started.elapsed().as_secs_f64(),
            Err(_) => self.clear(),
        }
        outcome
    }

    fn forward(&mut self, batch: &Batch, request: &ScoreRequest) -> Result<TokenOutputs> {
        let wanted = HeadRequest {
            temperature: request.temperature,
            entropy: request.entropy,
        };
        let microbatches = self.microbatches(batch, Batch::predicted);
        let means = Means {
            model: &self.model,
            policy: self.policy(&request.weights)?,
            cpu: self.processor.on(),
            workspace: &self.workspace,
            rope: &self.rope,
            ranks: &self.ranks,
        };
        let PipelineShape { stage, stages, .. } = self.ranks.pipeline.shape;
        let count = microbatches.len();
        let schedule = PipelineSchedule::forward_only(self.plan.schedule, stage, stages, count)?;
        let outputs = score::score(means, &microbatches, &schedule, wanted)?;
        self.agreed("forward")?;
        Ok(outputs)
    }

    fn optim_step(&mut self, options: &StepOptions) -> Result<OptimReport> {
        self.policy.params.settle_all()?;
        let report = self.optimizer.update(
            &self.processor,
            &*self.world,
            (&self.model.layout, &self.data),
            &mut self.policy.params,
            &self.grads,
            options,
        )?;
        if !report.skipped {
            let (params, step) = (&mut self.policy.params, report.step);
            let share = |region| self.grads.give(&self.data, region);
            let gathered = self.data.gather(params, Some(step), share);
            let gathered = gathered.and(self.checked("optim_step"));
            optim::committed(step, gathered)?;
            let rate = self.plan.config.moe.bias_update_rate;
            self.policy.bias.update(rate, &self.expert_tokens);
        }
        self.clear();
        Ok(report)
    }

    fn zero_grad(&mut self) -> Result<()> {
        self.clear();
        Ok(())
    }

    fn step(&self) -> u64 {
        self.optimizer.step
    }

    fn export_weights(&mut self, which: &Weights, sink: &mut dyn WeightSink) -> Result<()> {
        self.agreed("export_weights")?;
        let export = self.plan.config.precision.export;
        self.policy(which)?.params.settle_all()?;
        weights::export(
            (&self.model.layout, self.holdings()),
            &*self.world,
            &self.policy(which)?.params,
            self.optimizer.step,
            |spec| export.unwrap_or(spec.dtype),
            sink,
        )
    }

    fn export_gradients(&mut self, sink: &mut dyn WeightSink) -> Result<()> {
        self.agreed("export_gradients")?;
        let (layout, step) = (&self.model.layout, self.optimizer.step);
        let mut whole = Buffers::zeros(layout, &self.processor);
        for region in 0..self.data.num_regions() {
            let share = self.grads.own(region);
            let bucket = self.data.region(region).bucket;
            whole.bucket_mut(bucket)[self.data.own(region)].copy_from_slice(share);
        }
        let pool = &self.grads.pool;
        let share = |region| pool.take(self.data.own(region).len());
        self.data.gather(&mut whole, None, share)?;
        whole.settle_all()?;
        let from = (layout, self.holdings());
        weights::export(from, &*self.world, &whole, step, |_| DType::F32, sink)
    }

    fn import_weights(&mut self, which: &Weights, source: &dyn WeightSource) -> Result<()> {
        let read = weights::import(&self.model.layout, &self.processor, source);
        let read = Policy {
            params: self.world.agree("import_weights", read)?,
            bias: ExpertBias::zeros(&self.plan.model),
        };
        match which {
            Weights::Policy => self.policy = read,
            Weights::Tag(tag) => {
                self.snapshots.insert(tag.clone(), read);
            }
        }
        Ok(())
    }

    fn save_state(&mut self, mut writer: Box<dyn StateWriter>) -> Result<SaveHandle> {
        self.policy.params.settle_all()?;
        self.agreed("save_state")?;
        checkpoint::save(
            &self.model.layout,
            &self.data,
            &self.policy,
            &self.optimizer,
            &mut *writer,
        )?;
        writer.finish()
    }

    fn load_state(&mut self, reader: &dyn StateReader) -> Result<()> {
        let (layout, to) = (&self.model.layout, (&self.data, &self.processor));
        let loaded = checkpoint::load((&self.plan.model, layout), to, reader)?;
        self.clear();
        self.policy = loaded.policy;
        self.optimizer.moments = loaded.moments;
        self.optimizer.step = loaded.step;
        Ok(())
    }

    fn snapshot(&mut self, tag: &str) -> Result<()> {
        self.policy.params.settle_all()?;
        let copy = self.policy.duplicate();
        self.snapshots.insert(tag.to_owned(), copy);
        Ok(())
    }

    fn drop_snapshot(&mut self, tag: &str) -> Result<()> {
        self.snapshots.remove(tag);
        Ok(())
    }

    fn memory(&self) -> MemoryReport {
        MemoryReport {
            parameters: self.policy.params.num_bytes(),
            gradients: self.grads.num_bytes(),
            optimizer: self.optimizer.num_bytes(),
            snapshots: self.snapshots.values().map(|p| p.params.num_bytes()).sum(),
            peak_activations: self.workspace.peak_bytes(),
            saved_activations: self.workspace.saved_bytes(),
        }
    }
}
