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
    objective::{Objective, TokenOutputs},
    optim,
    plan::{PipelineAction, PipelineSchedule, TrainPlan},
    weights::{SeededWeights, WeightSink, WeightSource},
};
use drivetrain_kernels::Cpu;

use crate::{
    checkpoint,
    data_parallel::{DataParallel, Gradients, Reduction, Slot},
    microbatch::{self, OpenMicrobatch},
    model::Model,
    modules::{Context, HeadRequest, RopeTables},
    optimizer::Optimizer,
    packed::Packed,
    weights::{self, Buffers},
    workspace::Workspace,
};

/// One rank.
#[derive(Debug)]
pub(crate) struct MegatronEngine {
    plan: TrainPlan,
    world: Arc<dyn Communicator>,
    model: Model,
    cpu: Cpu,
    workspace: Workspace,
    rope: RopeTables,
    data: DataParallel,
    params: Buffers,
    grads: Gradients,
    optimizer: Optimizer,
    snapshots: BTreeMap<String, Buffers>,
}

impl MegatronEngine {
    /// Builds this rank's part. Collective over `world`.
    ///
    /// # Errors
    /// Those of reading weights and of the communicator.
    pub(crate) fn new(
        plan: &TrainPlan,
        world: &Arc<dyn Communicator>,
        init: WeightInit<'_>,
    ) -> Result<Self> {
        let model = Model::new(&plan.model, plan.config.logits_budget_bytes)?;
        let data = DataParallel::new(&**world, &plan.mesh, &model.layout)?;
        let params = match init {
            WeightInit::Seed(seed) => {
                weights::import(&model.layout, &SeededWeights::new(&plan.model, seed))?
            }
            WeightInit::Source(source) => weights::import(&model.layout, source)?,
            WeightInit::Deferred => Buffers::zeros(&model.layout),
        };
        Ok(Self {
            cpu: Cpu::new(plan.config.parallel.threads(world.world_size())),
            workspace: Workspace::default(),
            rope: RopeTables::default(),
            grads: Gradients::new(&model.layout, &data),
            optimizer: Optimizer::new(&plan.config, &data),
            snapshots: BTreeMap::new(),
            plan: plan.clone(),
            world: world.clone(),
            params,
            model,
            data,
        })
    }

    /// Every micro-batch forward and backward, in the order of the schedule; gradients are reduced behind
    /// the last backward. A rank whose objective fails goes on with empty micro-batches, so that the others do
    /// not wait for it; at the end all ranks agree.
    fn accumulate(
        &mut self,
        batch: &Batch,
        objective: &dyn Objective,
        totals: &BatchTotals,
    ) -> Result<ForwardBackwardReport> {
        let mut report = ForwardBackwardReport::default();
        let mut outcome = Ok(());
        let mut open = BTreeMap::new();
        let parts: Vec<Batch> = batch.iter_microbatches().collect();
        let schedule = PipelineSchedule::of(self.plan.schedule, 0, 1, parts.len())?;
        for action in schedule.actions {
            match action {
                PipelineAction::Forward { microbatch, .. } => {
                    let mut saved = OpenMicrobatch::default();
                    if outcome.is_ok() {
                        outcome = self
                            .forward_microbatch(&parts[microbatch], objective, totals, &mut report)
                            .map(|forwarded| saved = forwarded);
                    }
                    open.insert(microbatch, saved);
                }
                PipelineAction::Backward { microbatch, .. } => {
                    if let Some(saved) = open.remove(&microbatch) {
                        self.backward_microbatch(saved, microbatch + 1 == parts.len())?;
                    }
                }
                PipelineAction::ReceiveActivation { .. }
                | PipelineAction::SendActivation { .. }
                | PipelineAction::ReceiveGradient { .. }
                | PipelineAction::SendGradient { .. } => {
                    let message = "one stage has nobody to talk to";
                    return Err(Error::new(ErrorKind::Defect, "run_schedule", message));
                }
            }
        }
        self.world.agree("forward_backward", outcome)?;
        self.data.all_reduce(&mut report)?;
        Ok(report)
    }

    fn forward_microbatch(
        &mut self,
        part: &Batch,
        objective: &dyn Objective,
        totals: &BatchTotals,
        report: &mut ForwardBackwardReport,
    ) -> Result<OpenMicrobatch> {
        let packed = Packed::new(part, &part.scored());
        self.rope.cover(&self.plan.model, packed.max_length());
        let accumulate = packed.num_scored() > 0 && self.grads.start_microbatch();
        let cx = Context {
            cpu: self.cpu,
            workspace: &self.workspace,
            packed: &packed,
            rope: &self.rope,
            accumulate,
        };
        let (params, grads) = (&self.params, &mut self.grads.local);
        let (state, value) =
            microbatch::forward(&self.model, &cx, params, grads, part, objective, totals)?;
        report.loss += value.loss;
        report.metrics.merge(&value.metrics);
        Ok(OpenMicrobatch {
            packed,
            accumulate,
            state,
        })
    }

    fn backward_microbatch(&mut self, open: OpenMicrobatch, last: bool) -> Result<()> {
        let cx = Context {
            cpu: self.cpu,
            workspace: &self.workspace,
            packed: &open.packed,
            rope: &self.rope,
            accumulate: open.accumulate,
        };
        if last {
            self.grads.settle();
        }
        let (params, grads) = (&self.params, &mut self.grads.local);
        if !last {
            return microbatch::backward(
                &self.model,
                &cx,
                params,
                grads,
                open.state,
                |_, _| Ok(()),
            );
        }
        let mut slots = Slot::all(&self.data, &self.workspace);
        let mut reduction = Reduction::new(&self.data, &mut slots);
        let done = |bucket, grads: &mut Buffers| reduction.start(bucket, grads);
        let reduced = microbatch::backward(&self.model, &cx, params, grads, open.state, done)
            .and_then(|()| reduction.finish());
        self.grads.absorb(self.cpu, slots, reduced)
    }

    fn weights(&self, which: &Weights) -> Result<&Buffers> {
        match which {
            Weights::Policy => Ok(&self.params),
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
            Err(_) => self.grads.clear(),
        }
        outcome
    }

    fn forward(&mut self, batch: &Batch, request: &ScoreRequest) -> Result<TokenOutputs> {
        let wanted = HeadRequest {
            temperature: request.temperature,
            entropy: request.entropy,
        };
        let mut outputs = TokenOutputs::default();
        for part in batch.iter_microbatches() {
            let packed = Packed::new(&part, &part.predicted());
            self.rope.cover(&self.plan.model, packed.max_length());
            let cx = Context {
                cpu: self.cpu,
                workspace: &self.workspace,
                packed: &packed,
                rope: &self.rope,
                accumulate: false,
            };
            let params = self.weights(&request.weights)?;
            let scores = microbatch::score(&self.model, &cx, params, wanted);
            outputs.append(scores.spread(&packed));
        }
        Ok(outputs)
    }

    fn optim_step(&mut self, options: &StepOptions) -> Result<OptimReport> {
        let report = self.optimizer.update(
            self.cpu,
            &*self.world,
            (&self.model.layout, &self.data),
            &mut self.params,
            &self.grads,
            options,
        )?;
        self.grads.clear();
        if !report.skipped {
            let gathered = self.data.gather(&self.workspace, &mut self.params);
            optim::committed(report.step, gathered)?;
        }
        Ok(report)
    }

    fn zero_grad(&mut self) -> Result<()> {
        self.grads.clear();
        Ok(())
    }

    fn step(&self) -> u64 {
        self.optimizer.step
    }

    fn export_weights(&mut self, which: &Weights, sink: &mut dyn WeightSink) -> Result<()> {
        let export = self.plan.config.precision.export;
        weights::export(
            &self.model.layout,
            self.weights(which)?,
            self.optimizer.step,
            |spec| export.unwrap_or(spec.dtype),
            sink,
        )
    }

    fn export_gradients(&mut self, sink: &mut dyn WeightSink) -> Result<()> {
        let (layout, step) = (&self.model.layout, self.optimizer.step);
        if self.data.size() == 1 {
            return weights::export(layout, &self.grads.local, step, |_| DType::F32, sink);
        }
        let mut whole = Buffers::zeros(layout);
        for bucket in 0..self.data.num_buckets() {
            let share = self.grads.own(&self.data, bucket);
            whole.bucket_mut(bucket)[self.data.own(bucket)].copy_from_slice(share);
        }
        self.data.gather(&self.workspace, &mut whole)?;
        weights::export(layout, &whole, step, |_| DType::F32, sink)
    }

    fn import_weights(&mut self, which: &Weights, source: &dyn WeightSource) -> Result<()> {
        let read = weights::import(&self.model.layout, source);
        let read = self.world.agree("import_weights", read)?;
        match which {
            Weights::Policy => self.params = read,
            Weights::Tag(tag) => {
                self.snapshots.insert(tag.clone(), read);
            }
        }
        Ok(())
    }

    fn save_state(&mut self, mut writer: Box<dyn StateWriter>) -> Result<SaveHandle> {
        checkpoint::save(
            &self.model.layout,
            &self.data,
            &self.params,
            &self.optimizer,
            &mut *writer,
        )?;
        Ok(SaveHandle::pending(move || writer.finish()))
    }

    fn load_state(&mut self, reader: &dyn StateReader) -> Result<()> {
        let loaded = checkpoint::load(&self.model.layout, &self.data, reader)?;
        self.grads.clear();
        self.params = loaded.params;
        self.optimizer.moments = loaded.moments;
        self.optimizer.step = loaded.step;
        Ok(())
    }

    fn snapshot(&mut self, tag: &str) -> Result<()> {
        self.snapshots.insert(tag.to_owned(), self.params.clone());
        Ok(())
    }

    fn drop_snapshot(&mut self, tag: &str) -> Result<()> {
        self.snapshots.remove(tag);
        Ok(())
    }

    fn memory(&self) -> MemoryReport {
        MemoryReport {
            parameters: self.params.num_bytes(),
            gradients: self.grads.num_bytes(),
            optimizer: self.optimizer.num_bytes(),
            snapshots: self.snapshots.values().map(Buffers::num_bytes).sum(),
            peak_activations: self.workspace.peak_bytes(),
        }
    }
}
