//! The step, readable from top to bottom. The guard in core refuses everything that the backend does not
//! claim before it gets here.

use std::{sync::Arc, time::Instant};

use drivetrain_core::{
    DType, Result,
    batch::{Batch, BatchTotals},
    communicator::Communicator,
    engine::{
        Engine, ForwardBackwardReport, MemoryReport, OptimReport, ScoreRequest, StepOptions,
        Weights,
    },
    model::ParameterSpec,
    objective::{Objective, TokenOutputs},
    optim::{self, AdamwStep, LearningRate, adamw_reference},
    plan::TrainPlan,
    weights::{Streamer, WeightSink, WeightSource},
};

use crate::model::{Bigram, Tensors};

/// One rank, and the only one; what it does with `world` is what several would do.
#[derive(Debug)]
pub(crate) struct BigramEngine {
    plan: TrainPlan,
    world: Arc<dyn Communicator>,
    model: Bigram,
    gradients: Option<Bigram>,
    exp_avg: Bigram,
    exp_avg_sq: Bigram,
    step: u64,
}

impl BigramEngine {
    pub(crate) fn new(plan: TrainPlan, world: Arc<dyn Communicator>, model: Bigram) -> Self {
        Self {
            model,
            gradients: None,
            exp_avg: Bigram::zeros(&plan),
            exp_avg_sq: Bigram::zeros(&plan),
            plan,
            world,
            step: 0,
        }
    }

    fn microbatch(
        &mut self,
        batch: &Batch,
        objective: &dyn Objective,
        totals: &BatchTotals,
        report: &mut ForwardBackwardReport,
    ) -> Result<()> {
        let temperature = objective.requires().temperature;
        let (tokens, scored) = (batch.tokens(), batch.scored());
        let mut outputs = TokenOutputs {
            log_probs: vec![0.0; tokens.len()],
            ..TokenOutputs::default()
        };
        let mut saved = Vec::new();
        for t in (0..tokens.len()).filter(|&t| scored[t]) {
            let forward = self.model.forward(tokens[t - 1], temperature);
            outputs.log_probs[t] = forward.log_probs[tokens[t] as usize];
            saved.push((t, forward));
        }
        let value = objective.evaluate(batch, &outputs, totals)?;
        let zeros = || Bigram::zeros(&self.plan);
        let gradients = self.gradients.get_or_insert_with(zeros);
        for (t, forward) in saved {
            let pair = (tokens[t - 1], tokens[t]);
            let d = value.d_log_probs[t];
            self.model
                .backward(pair, &forward, d, temperature, gradients);
        }
        report.loss += value.loss;
        report.metrics.merge(&value.metrics);
        Ok(())
    }

    fn update(&mut self, gradients: &Tensors, scale: f64, learning_rate: f64) {
        let optimizer = self.plan.config.optimizer;
        for spec in &self.plan.parameters {
            let step = AdamwStep::new(&optimizer, spec, self.step, learning_rate, scale);
            let gradient = wide(&gradients[&spec.name]);
            let state = [&mut self.model, &mut self.exp_avg, &mut self.exp_avg_sq];
            let state = state.map(|s| &mut s.tensors[&spec.name]);
            let [mut w, mut m, mut v] = [0, 1, 2].map(|i| wide(state[i]));
            adamw_reference(&step, &mut w, &gradient, &mut m, &mut v);
            for (values, updated) in state.into_iter().zip([w, m, v]) {
                *values = updated.into_iter().map(|x| x as f32).collect();
            }
        }
    }

    fn export(&self, tensors: &Tensors, sink: &mut dyn WeightSink) -> Result<()> {
        let spec = |spec: &ParameterSpec| ParameterSpec {
            dtype: DType::F32,
            ..spec.clone()
        };
        let specs = self.plan.parameters.iter().map(spec).collect();
        let mut stream = Streamer::begin(sink, specs, self.step);
        for spec in &self.plan.parameters {
            stream.push(tensors[&spec.name].as_slice());
        }
        let sent = stream.flush();
        stream.finish(sent)
    }
}

impl Engine for BigramEngine {
    fn forward_backward(
        &mut self,
        batch: &Batch,
        objective: &dyn Objective,
        totals: &BatchTotals,
    ) -> Result<ForwardBackwardReport> {
        let began = Instant::now();
        let mut report = ForwardBackwardReport::default();
        let outcome = batch
            .iter_microbatches()
            .try_for_each(|part| self.microbatch(&part, objective, totals, &mut report));
        self.world.agree("forward_backward", outcome)?;
        report.all_reduce(&*self.world)?;
        report.seconds = began.elapsed().as_secs_f64();
        Ok(report)
    }

    fn forward(&mut self, batch: &Batch, request: &ScoreRequest) -> Result<TokenOutputs> {
        let tokens = batch.tokens();
        let mut log_probs = vec![0.0; tokens.len()];
        for s in 0..batch.num_sequences() {
            for t in batch.sequence(s).skip(1) {
                let forward = self.model.forward(tokens[t - 1], request.temperature);
                log_probs[t] = forward.log_probs[tokens[t] as usize];
            }
        }
        Ok(TokenOutputs {
            log_probs,
            ..TokenOutputs::default()
        })
    }

    fn optim_step(&mut self, options: &StepOptions) -> Result<OptimReport> {
        let zeros = || Bigram::zeros(&self.plan);
        let gradients = self.gradients.take().unwrap_or_else(zeros).tensors;
        let squares = gradients.values().flatten().map(|&g| f64::from(g).powi(2));
        let decision = optim::decide(
            &*self.world,
            Ok(squares.sum()),
            self.step,
            &LearningRate::new(&self.plan.config),
            self.plan.config.optimizer.max_grad_norm,
            options,
        )?;
        if let Some(scale) = decision.gradient_scale {
            self.update(&gradients, scale, decision.report.learning_rate);
        }
        self.step = decision.report.step;
        Ok(decision.report)
    }

    fn zero_grad(&mut self) -> Result<()> {
        self.gradients = None;
        Ok(())
    }

    fn step(&self) -> u64 {
        self.step
    }

    fn export_weights(&mut self, _weights: &Weights, sink: &mut dyn WeightSink) -> Result<()> {
        self.export(&self.model.tensors, sink)
    }

    fn export_gradients(&mut self, sink: &mut dyn WeightSink) -> Result<()> {
        match &self.gradients {
            Some(gradients) => self.export(&gradients.tensors, sink),
            None => self.export(&Bigram::zeros(&self.plan).tensors, sink),
        }
    }

    fn import_weights(&mut self, _weights: &Weights, source: &dyn WeightSource) -> Result<()> {
        let read = Bigram::read(&self.plan, source);
        self.model = self.world.agree("import_weights", read)?;
        Ok(())
    }

    fn memory(&self) -> MemoryReport {
        let elements: usize = self.model.tensors.values().map(Vec::len).sum();
        let bytes = 4 * elements as u64;
        MemoryReport {
            parameters: bytes,
            gradients: self.gradients.as_ref().map_or(0, |_| bytes),
            optimizer: 2 * bytes,
            ..MemoryReport::default()
        }
    }
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v.into()).collect()
}
