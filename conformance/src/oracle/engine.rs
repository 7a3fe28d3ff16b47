//! The step, readable from top to bottom.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use drivetrain_core::{
    DType, Error, ErrorKind, Result,
    batch::{Batch, BatchTotals, Column, ColumnData, LOSS_MASK},
    checkpoint::{SaveHandle, StateReader, StateWriter},
    communicator::{Communicator, ReduceOp},
    engine::{
        Engine, ForwardBackwardReport, MemoryReport, OptimReport, ScoreRequest, StepOptions,
        Weights,
    },
    mesh::MeshAxis,
    moe::{LOAD_BALANCING_LOSS, ROUTER_Z_LOSS, RouterLosses, no_expert_tokens},
    objective::{Objective, TokenOutputs},
    optim::{self, Decision, LearningRate, clip_factor, is_trained},
    plan::TrainPlan,
    weights::{WeightSink, WeightSource},
};
use half::bf16;
use indexmap::IndexMap;

use super::{
    checkpoint,
    defect::Defect,
    matrix::Matrix,
    model::{Parameters, Policy},
    optimizer::{AdamW, StepSize},
    router::{self, Losses},
    score::{Scored, Wanted, accumulate, zeros_like},
    tape::Var,
    weights,
};

/// A metric of the oracle alone: how far the nearest choice of experts is from another.
pub(crate) const ROUTER_MARGIN: &str = "router_margin";

/// One rank: every rank holds all of the model and computes its share of the batch; peers that get the same share
/// compute the same.
#[derive(Debug)]
pub(super) struct ReferenceEngine {
    pub(super) plan: TrainPlan,
    pub(super) world: Arc<dyn Communicator>,
    /// The ranks with other shares.
    pub(super) data: Arc<dyn Communicator>,
    pub(super) policy: Policy,
    pub(super) snapshots: BTreeMap<String, Policy>,
    /// Of the open step, this rank's share.
    pub(super) gradients: Option<IndexMap<String, Matrix>>,
    /// Of the open step, over all ranks.
    expert_tokens: Vec<Vec<u64>>,
    /// Of the step before, for a defect that keeps them.
    stale: Option<IndexMap<String, Matrix>>,
    pub(super) optimizer: AdamW,
    pub(super) step: u64,
    pub(super) defect: Option<Defect>,
}

impl ReferenceEngine {
    pub(super) fn new(
        plan: TrainPlan,
        world: Arc<dyn Communicator>,
        policy: Policy,
        defect: Option<Defect>,
    ) -> Result<Self> {
        let data = match plan.mesh.data_size() == world.world_size() {
            true => world.clone(),
            false => {
                let axes = [MeshAxis::DataReplicate, MeshAxis::DataShard];
                world.subgroup(&plan.mesh.group(world.rank(), &axes)?, "data")?
            }
        };
        Ok(Self {
            optimizer: AdamW::new(&policy.weights),
            expert_tokens: no_expert_tokens(&plan.model),
            stale: None,
            data,
            plan,
            world,
            policy,
            snapshots: BTreeMap::new(),
            gradients: None,
            step: 0,
            defect,
        })
    }

    /// Whether this rank differs from the first on this axis alone, and by one.
    fn is_neighbour(&self, axis: MeshAxis) -> bool {
        let group = self.plan.mesh.group(0, &[axis]);
        group.is_ok_and(|ranks| ranks.get(1) == Some(&self.world.rank()))
    }

    pub(super) fn is(&self, defect: Defect) -> bool {
        self.defect == Some(defect)
    }

    pub(super) fn weights(&self, which: &Weights) -> Result<&Policy> {
        match which {
            Weights::Policy => Ok(&self.policy),
            Weights::Tag(_)
                if self.is(Defect::TagIgnored) || self.is(Defect::SnapshotFollowsPolicy) =>
            {
                Ok(&self.policy)
            }
            Weights::Tag(tag) => self.snapshots.get(tag).ok_or_else(|| {
                // The guard knows the tags.
                Error::new(ErrorKind::Defect, "find_snapshot", "no such snapshot").with("tag", tag)
            }),
        }
    }

    fn microbatch(
        &mut self,
        batch: &Batch,
        objective: &dyn Objective,
        totals: &BatchTotals,
        report: &mut ForwardBackwardReport,
    ) -> Result<()> {
        let needs = objective.requires();
        let wanted = Wanted {
            temperature: needs.temperature,
            entropy: needs.entropy,
            log_probs_at: needs.log_probs_at.as_deref(),
        };
        let mut asked = batch.clone();
        if self.is(Defect::MaskMultiplies) {
            let all = Column::per_token(ColumnData::U8(vec![1; batch.num_tokens()]));
            asked.set_column(LOSS_MASK, all)?;
        }
        let scored = asked.scored();
        let pass = Scored::new(
            &self.plan.model,
            &self.policy,
            batch,
            &scored,
            &wanted,
            self.defect,
        )?;
        let mut value = objective.evaluate(&asked, &pass.outputs(), totals)?;
        if self.is(Defect::MaskMultiplies) {
            let mask = batch.scored();
            let masked = value.d_log_probs.iter_mut().zip(&mask);
            masked.for_each(|(d, &m)| *d *= f64::from(u8::from(m)));
            value.loss = objective.evaluate(batch, &pass.outputs(), totals)?.loss;
        }
        if self.is(Defect::EntropyGradientDropped) {
            value.d_entropy = None;
        }
        let round = self.rounding();
        if let Some(round) = round
            && self.is(Defect::SavedChangesLoss)
        {
            value.loss = round(value.loss);
        }
        report.loss += value.loss;
        report.metrics.merge(&value.metrics);
        let seeds = self.router(&pass, batch, totals, report)?;
        let gradients = pass.backward(&value, seeds, round);
        if self.is(Defect::GradientsOverwritten) {
            self.gradients = None;
        }
        accumulate(&mut self.gradients, gradients);
        Ok(())
    }

    /// What becomes of the values that are kept for backward.
    fn rounding(&self) -> Option<fn(f64) -> f64> {
        let truncated = |x: f64| f64::from(f32::from_bits((x as f32).to_bits() & 0xffff_0000));
        match self.plan.config.precision.saved_activations {
            Some(DType::Bf16) if self.is(Defect::SavedTruncated) => Some(truncated),
            Some(DType::Bf16) => Some(|x| bf16::from_f64(x).to_f64()),
            _ => None,
        }
    }

    /// The router's losses of a pass into the report, and their derivatives. Collective.
    fn router(
        &self,
        pass: &Scored<'_>,
        batch: &Batch,
        totals: &BatchTotals,
        report: &mut ForwardBackwardReport,
    ) -> Result<Vec<(Var, Matrix)>> {
        let losses = Losses {
            losses: RouterLosses::new(&self.plan.config, &self.plan.model),
            totals,
            world: &*self.data,
            defect: self.defect,
        };
        let (tape, routed) = pass.routing();
        let counted = router::counted(batch, self.defect);
        let terms = losses.terms(tape, routed, &counted)?;
        router::count(routed, &counted, &mut report.expert_tokens);
        for layer in routed {
            // Of no tokens there is none.
            if layer.margin.is_finite() {
                report.metrics.min(ROUTER_MARGIN, layer.margin);
            }
        }
        if losses.losses.balancing.is_some() {
            report.metrics.sum(LOAD_BALANCING_LOSS, terms.balancing);
        }
        if losses.losses.z_coefficient != 0.0 {
            report.metrics.sum(ROUTER_Z_LOSS, terms.z);
        }
        if self.is(Defect::RouterLossesReported) {
            report.loss += losses.losses.balancing_coefficient * terms.balancing;
        }
        Ok(terms.seeds)
    }

    /// The open step's gradients over all ranks, in the order of the parameters.
    pub(super) fn reduced_gradients(&self) -> Result<IndexMap<String, Matrix>> {
        let mut sum = match &self.gradients {
            Some(gradients) => gradients.clone(),
            None => zeros_like(&self.policy.weights),
        };
        let rounds = match self.defect {
            Some(Defect::ReducedTwice) => 2,
            Some(Defect::NotReduced) => 0,
            _ => 1,
        };
        let ranks = match self.is(Defect::PeersAdded) {
            true => &self.world,
            false => &self.data,
        };
        for (name, gradient) in &mut sum {
            for _ in 0..rounds {
                let buffer = (&mut gradient.data).into();
                ranks.all_reduce(buffer, ReduceOp::Sum)?.wait()?;
            }
            if self.is(Defect::AveragedOverRanks) {
                *gradient = gradient.map(|g| g / ranks.world_size() as f64);
            }
            if self.is(Defect::ParameterFrozen) && name == "model.norm.weight" {
                *gradient = gradient.map(|_| 0.0);
            }
        }
        for spec in &self.plan.parameters {
            let gradient = &mut sum[&spec.name];
            if !is_trained(&self.plan.config, spec) {
                *gradient = gradient.map(|_| 0.0);
            }
            if let Some(stale) = &self.stale
                && spec.expert.is_some()
                && squares(gradient) == 0.0
            {
                *gradient = stale[&spec.name].clone();
            }
        }
        Ok(sum)
    }

    /// The step's commit point, and what divides the gradients.
    fn decide(
        &self,
        gradients: &IndexMap<String, Matrix>,
        options: &StepOptions,
        step: u64,
    ) -> Result<(Decision, f64)> {
        let mut options = options.clone();
        if self.is(Defect::DivisorIgnored) {
            options.gradient_divisor = None;
        }
        let divisor = options.gradient_divisor.unwrap_or(1.0);
        // Every rank holds all of the gradient: rank 0 answers for it.
        let mut own = gradients.values().map(squares).sum::<f64>();
        if self.world.rank() > 0 {
            own *= 0.0;
        }
        if self.is(Defect::ReplicatedCountedTwice) && self.is_neighbour(MeshAxis::Tensor) {
            let replicated = self.plan.parameters.iter().filter(|p| p.shape.len() == 1);
            own += replicated
                .map(|p| squares(&gradients[&p.name]))
                .sum::<f64>();
        }
        if self.is(Defect::TiedCountedTwice)
            && self.plan.model.tied_embeddings
            && self.is_neighbour(MeshAxis::Pipeline)
        {
            own += squares(&gradients[&self.plan.parameters[0].name]);
        }
        let schedule = LearningRate::new(&self.plan.config);
        let max = self.plan.config.optimizer.max_grad_norm;
        let mut decision = optim::decide(&*self.world, Ok(own), step, &schedule, max, &options)?;
        let report = &mut decision.report;
        if self.is(Defect::ScheduleOneAhead) && options.learning_rate.is_none() {
            report.learning_rate = schedule.at(step + 1);
        }
        if self.is(Defect::NonFiniteApplied) && report.skipped {
            (report.grad_norm, report.skipped) = (1.0, false);
        }
        if self.is(Defect::SkipDecidedAlone) {
            let own = self.gradients.iter().flat_map(IndexMap::values);
            report.skipped = !own.map(squares).sum::<f64>().is_finite();
        }
        if !report.skipped {
            report.clip_factor = match self.is(Defect::NotClipped) {
                true => 1.0,
                false => clip_factor(report.grad_norm, max),
            };
        }
        decision.gradient_scale = (!report.skipped).then_some(report.clip_factor / divisor);
        Ok((decision, divisor))
    }

    fn update(
        &mut self,
        gradients: &IndexMap<String, Matrix>,
        scale: f64,
        divisor: f64,
        learning_rate: f64,
    ) {
        let optimizer = self.plan.config.optimizer;
        for spec in &self.plan.parameters {
            if !is_trained(&self.plan.config, spec) && !self.is(Defect::FrozenRouterDecays) {
                continue;
            }
            let gradient = &gradients[&spec.name];
            let mut own = scale;
            if self.is(Defect::PeerKeepsNorms)
                && spec.shape.len() == 1
                && !self.plan.mesh.is_data_leader(self.world.rank())
            {
                continue;
            }
            if self.defect == Some(Defect::ClippedPerTensor) {
                let norm = squares(gradient).sqrt() / divisor;
                own = clip_factor(norm, optimizer.max_grad_norm) / divisor;
            }
            let mut size = StepSize::new(&optimizer, spec, learning_rate, self.step + 1);
            if self.defect == Some(Defect::OneDimDecays) {
                size.weight_decay = optimizer.weight_decay;
            }
            let clipped = gradient.map(|g| g * own);
            let weight = Arc::make_mut(&mut self.policy.weights[&spec.name]);
            self.optimizer
                .update(&spec.name, weight, &clipped, &size, self.defect);
        }
    }
}

impl Engine for ReferenceEngine {
    fn forward_backward(
        &mut self,
        batch: &Batch,
        objective: &dyn Objective,
        totals: &BatchTotals,
    ) -> Result<ForwardBackwardReport> {
        let began = Instant::now();
        let mut report = ForwardBackwardReport {
            expert_tokens: no_expert_tokens(&self.plan.model),
            ..ForwardBackwardReport::default()
        };
        let mut outcome = Ok(());
        for mut microbatch in batch.iter_microbatches() {
            // A rank that failed goes on with nothing, since the others may wait for it.
            if outcome.is_err() {
                microbatch = microbatch.select(&[]);
            }
            let mut totals = totals.clone();
            if self.is(Defect::NormalisedPerMicrobatch) {
                totals = BatchTotals::count(&microbatch);
                totals.tokens = totals.tokens.max(1) * batch.num_microbatches() as u64;
                totals.sequences = totals.sequences.max(1) * batch.num_microbatches() as u64;
            }
            let ended = self.microbatch(&microbatch, objective, &totals, &mut report);
            outcome = outcome.and(ended);
        }
        let outcome = self.world.agree("forward_backward", outcome);
        outcome.inspect_err(|_| self.gradients = None)?;
        if self.gradients.is_none() {
            self.gradients = Some(zeros_like(&self.policy.weights));
        }
        let (own, alone) = (report.loss, report.expert_tokens.clone());
        report.all_reduce(&*self.data)?;
        let counts = match self.is(Defect::BiasUpdatedAlone) {
            true => alone,
            false => report.expert_tokens.clone(),
        };
        let sums = self.expert_tokens.iter_mut().flatten();
        sums.zip(counts.iter().flatten())
            .for_each(|(sum, n)| *sum += n);
        if self.is(Defect::LossNotReduced) {
            report.loss = own;
        }
        if self.is(Defect::LossOnOnePeer) && !self.plan.mesh.is_data_leader(self.world.rank()) {
            report.loss = 0.0;
        }
        report.seconds = began.elapsed().as_secs_f64();
        Ok(report)
    }

    fn forward(&mut self, batch: &Batch, request: &ScoreRequest) -> Result<TokenOutputs> {
        if self.is(Defect::ForwardDropsGradients) {
            self.gradients = None;
        }
        let selected = batch.predicted();
        let wanted = Wanted {
            temperature: request.temperature,
            entropy: request.entropy,
            log_probs_at: request.log_probs_at.as_deref(),
        };
        let policy = self.weights(&request.weights)?;
        let spec = &self.plan.model;
        let mut outputs =
            Scored::new(spec, policy, batch, &selected, &wanted, self.defect)?.outputs();
        if self.is(Defect::OutputsOnOnePeer) && !self.plan.mesh.is_data_leader(self.world.rank()) {
            outputs.log_probs.fill(0.0);
        }
        Ok(outputs)
    }

    fn optim_step(&mut self, options: &StepOptions) -> Result<OptimReport> {
        let early = u64::from(self.is(Defect::CountedBeforeCommit));
        self.step += early;
        let gradients = self.reduced_gradients()?;
        let (decision, divisor) = self.decide(&gradients, options, self.step - early)?;
        self.step -= early;
        self.gradients = None;
        let mut report = decision.report;
        if let Some(scale) = decision.gradient_scale {
            self.update(&gradients, scale, divisor, report.learning_rate);
            let rate = self.plan.config.moe.bias_update_rate;
            self.policy.bias.update(rate, &self.expert_tokens);
        }
        self.expert_tokens = no_expert_tokens(&self.plan.model);
        if self.is(Defect::IdleExpertsStale) {
            self.stale = Some(gradients);
        }
        if !report.skipped || self.is(Defect::SkippedStepCounts) {
            self.step += 1;
        }
        report.step = self.step;
        Ok(report)
    }

    fn zero_grad(&mut self) -> Result<()> {
        if !self.is(Defect::AbortKeepsGradients) {
            self.gradients = None;
            self.expert_tokens = no_expert_tokens(&self.plan.model);
        }
        Ok(())
    }

    fn step(&self) -> u64 {
        self.step
    }

    fn export_weights(&mut self, which: &Weights, sink: &mut dyn WeightSink) -> Result<()> {
        weights::export(self, which, sink)
    }

    fn export_gradients(&mut self, sink: &mut dyn WeightSink) -> Result<()> {
        weights::export_gradients(self, sink)
    }

    fn import_weights(&mut self, which: &Weights, source: &dyn WeightSource) -> Result<()> {
        weights::import(self, which, source)
    }

    fn save_state(&mut self, writer: Box<dyn StateWriter>) -> Result<SaveHandle> {
        checkpoint::save(self, writer)
    }

    fn load_state(&mut self, reader: &dyn StateReader) -> Result<()> {
        checkpoint::load(self, reader)
    }

    fn snapshot(&mut self, tag: &str) -> Result<()> {
        self.snapshots.insert(tag.to_owned(), self.policy.clone());
        Ok(())
    }

    fn drop_snapshot(&mut self, tag: &str) -> Result<()> {
        self.snapshots.remove(tag);
        Ok(())
    }

    fn memory(&self) -> MemoryReport {
        let bytes = |p: &Parameters| p.values().map(|w| 8 * w.data.len() as u64).sum::<u64>();
        let parameters = bytes(&self.policy.weights);
        MemoryReport {
            parameters,
            gradients: self.gradients.as_ref().map_or(0, |_| parameters),
            optimizer: 2 * parameters,
            snapshots: self.snapshots.values().map(|p| bytes(&p.weights)).sum(),
            ..MemoryReport::default()
        }
    }
}

fn squares(gradient: &Matrix) -> f64 {
    gradient.data.iter().map(|g| g * g).sum()
}
