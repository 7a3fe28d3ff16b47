//! What a backend does not claim it refuses as `Unsupported`, and what nobody may do is refused by everyone.

use drivetrain_core::{
    Error, ErrorKind, Result,
    batch::{Batch, BatchBuilder, BatchTotals, Column, ColumnData},
    engine::{Capability, Engine, Residency, ScoreRequest, StepOptions, Weights},
    model::ModelSpec,
    objective::Nll,
    weights::MemoryWeights,
};

use super::{
    engine_state::{equal, not_refused},
    step::Setting,
};
use crate::{
    fixture::{batches, models},
    objective::{IDS, Polynomial, WEIGHTS},
    state::MemoryState,
    suite::{Case, Findings, Needs, Rank, Subject},
    train::weights,
};

type Call = fn(&mut Rank, &Batch) -> Result<()>;

/// A request, and whether a capability claims it.
struct Request {
    name: &'static str,
    claimed: fn(&Capability) -> bool,
    call: Call,
}

const REQUESTS: [Request; 9] = [
    Request {
        name: "entropy_scores",
        claimed: |c| c.entropy,
        call: |rank, batch| {
            let request = ScoreRequest {
                entropy: true,
                ..ScoreRequest::default()
            };
            rank.engine.forward(batch, &request).map(drop)
        },
    },
    Request {
        name: "entropy_objective",
        claimed: |c| c.entropy,
        call: |rank, batch| train(rank, batch, true, false),
    },
    Request {
        name: "ids_scores",
        claimed: |c| c.log_probs_at,
        call: |rank, batch| {
            let request = ScoreRequest {
                log_probs_at: Some(IDS.to_owned()),
                ..ScoreRequest::default()
            };
            rank.engine.forward(batch, &request).map(drop)
        },
    },
    Request {
        name: "ids_objective",
        claimed: |c| c.log_probs_at,
        call: |rank, batch| train(rank, batch, false, true),
    },
    Request {
        name: "snapshot",
        claimed: |c| c.snapshots,
        call: |rank, _| rank.engine.snapshot("x"),
    },
    Request {
        name: "imported_snapshot",
        claimed: |c| c.snapshots,
        call: |rank, _| {
            let mut sink = MemoryWeights::new();
            rank.engine.export_weights(&Weights::Policy, &mut sink)?;
            let tag = Weights::Tag("x".to_owned());
            rank.engine.import_weights(&tag, &sink)
        },
    },
    Request {
        name: "save_state",
        claimed: |c| c.checkpoints,
        call: |rank, _| {
            rank.engine
                .save_state(MemoryState::new().writer())?
                .finish()
        },
    },
    Request {
        name: "export_gradients",
        claimed: |c| c.export_gradients,
        call: |rank, _| rank.engine.export_gradients(&mut MemoryWeights::new()),
    },
    Request {
        name: "offload",
        claimed: |c| c.offload,
        call: |rank, _| rank.engine.set_residency(Residency::Offloaded),
    },
];

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for Request {
        name,
        claimed,
        call,
    } in REQUESTS
    {
        let needs = Needs {
            lacks: Some((name, claimed)),
            ..Needs::default()
        };
        cases.push(Case::new(format!("refusals/{name}"), needs, move |s, f| {
            refuses(call, ErrorKind::Unsupported, s, f)
        }));
    }
    let everyone: [(&str, ErrorKind, Call); 8] = [
        ("temperature_0", ErrorKind::Config, |rank, batch| {
            let request = ScoreRequest {
                temperature: 0.0,
                ..ScoreRequest::default()
            };
            rank.engine.forward(batch, &request).map(drop)
        }),
        (
            "temperature_0_objective",
            ErrorKind::Config,
            |rank, batch| {
                let mut objective = Nll::default();
                objective.terms.temperature = 0.0;
                let totals = BatchTotals::count(batch);
                rank.engine
                    .forward_backward(batch, &objective, &totals)
                    .map(drop)
            },
        ),
        ("unknown_snapshot", ErrorKind::Config, |rank, batch| {
            let request = ScoreRequest {
                weights: Weights::Tag("nobody".to_owned()),
                ..ScoreRequest::default()
            };
            rank.engine.forward(batch, &request).map(drop)
        }),
        (
            "token_outside_the_vocabulary",
            ErrorKind::Data,
            |rank, _| {
                let mut builder = BatchBuilder::new();
                builder.push(&[1, 97], None)?;
                rank.engine
                    .forward(&builder.build()?, &ScoreRequest::default())
                    .map(drop)
            },
        ),
        ("sequence_over_the_limit", ErrorKind::Data, |rank, _| {
            let mut builder = BatchBuilder::new();
            builder.push(&[1; 129], None)?;
            rank.engine
                .forward(&builder.build()?, &ScoreRequest::default())
                .map(drop)
        }),
        ("missing_column", ErrorKind::Data, |rank, _| {
            let mut builder = BatchBuilder::new();
            builder.push(&[1, 2, 3], None)?;
            train(rank, &builder.build()?, false, false)
        }),
        (
            "optim_step_without_gradients",
            ErrorKind::CallOrder,
            |rank, _| rank.engine.optim_step(&StepOptions::default()).map(drop),
        ),
        ("import_of_another_shape", ErrorKind::File, |rank, _| {
            let mut sink = MemoryWeights::new();
            rank.engine.export_weights(&Weights::Policy, &mut sink)?;
            let mut other = MemoryWeights::new();
            for (name, shape, values) in sink.iter() {
                let mut shape = shape.to_vec();
                if name == "model.norm.weight" {
                    shape.push(1);
                }
                let dtype = drivetrain_core::DType::F32;
                other.insert(name, &shape, dtype, values.to_vec())?;
            }
            rank.engine.import_weights(&Weights::Policy, &other)
        }),
    ];
    for (name, kind, call) in everyone {
        let full = format!("refusals/{name}");
        cases.push(Case::new(full, Needs::default(), move |s, f| {
            refuses(call, kind, s, f)
        }));
    }
    let ids = Needs {
        log_probs_at: true,
        ..Needs::default()
    };
    for (name, column) in [
        ("ids_missing", None),
        (
            "ids_of_f32",
            Some(Column::per_token(ColumnData::F32(vec![1.0; 2]))),
        ),
        (
            "ids_by_sequence",
            Some(Column::per_sequence(ColumnData::I64(vec![1]))),
        ),
        (
            "ids_below_0",
            Some(Column::per_token(ColumnData::I64(vec![0, -1]))),
        ),
        (
            "ids_outside",
            Some(Column::per_token(ColumnData::I64(vec![0, 97]))),
        ),
    ] {
        let full = format!("refusals/{name}");
        cases.push(Case::new(full, ids.clone(), move |s, f| {
            let call = |rank: &mut Rank, _: &Batch| bad_ids(rank, column.clone());
            refuses(call, ErrorKind::Data, s, f)
        }));
    }
    cases
}

/// Scoring and training at these ids, two tokens of one sequence.
fn bad_ids(rank: &mut Rank, column: Option<Column>) -> Result<()> {
    let mut builder = BatchBuilder::new();
    builder.push(&[1, 2], None)?;
    let weights = Column::per_token(ColumnData::F64(vec![1.0; 2]));
    builder.column(WEIGHTS, weights);
    if let Some(column) = column {
        builder.column(IDS, column);
    }
    let batch = builder.build()?;
    let request = ScoreRequest {
        log_probs_at: Some(IDS.to_owned()),
        ..ScoreRequest::default()
    };
    match rank.engine.forward(&batch, &request) {
        Err(error) if error.kind() == ErrorKind::Data => train(rank, &batch, false, true),
        Err(error) => Err(error),
        Ok(_) => Ok(()),
    }
}

fn train(rank: &mut Rank, batch: &Batch, entropy: bool, at_ids: bool) -> Result<()> {
    let objective = Polynomial {
        temperature: 1.0,
        entropy,
        at_ids,
    };
    let totals = BatchTotals::count(batch);
    rank.engine
        .forward_backward(batch, &objective, &totals)
        .map(drop)
}

/// The call fails with this kind, and the engine trains on as if it had not been made.
fn refuses(
    call: impl Fn(&mut Rank, &Batch) -> Result<()> + Sync,
    kind: ErrorKind,
    subject: &Subject,
    findings: &mut Findings,
) -> Result<()> {
    let model = any_model(subject)?;
    let setting = Setting::new(&model, subject.settings.seed)?;
    let batch = batches::plain(model.vocab_size, subject.settings.seed)?;
    let batch = batches::with_columns(batch, model.vocab_size, subject.settings.seed)?;
    let totals = BatchTotals::count(&batch);
    let job = subject.job(&model);
    let run = |asked: bool| {
        subject.run_from(&job, &setting.weights, |rank| {
            let refused = if asked {
                call(rank, &batch).err()
            } else {
                None
            };
            rank.engine
                .forward_backward(&batch, &Nll::default(), &totals)?;
            rank.engine.optim_step(&StepOptions::default())?;
            let end = weights(&mut rank.engine, &Weights::Policy)?;
            Ok((refused, end))
        })
    };
    let (mut asked, plain) = (run(true)?, run(false)?);
    let (refused, end) = asked.swap_remove(0);
    let error = refused.ok_or_else(|| not_refused("the request"))?;
    if error.kind() != kind {
        let message = format!("refused as {:?} and not as {kind:?}: {error}", error.kind());
        return Err(Error::new(ErrorKind::Parity, "conformance", message));
    }
    equal(findings, "weights after the refusal", &end, &plain[0].1);
    Ok(())
}

/// The first fixture that the backend trains.
pub(super) fn any_model(subject: &Subject) -> Result<ModelSpec> {
    let trains = |model: &ModelSpec| Needs::model(model).unmet(&subject.backend).is_none();
    let mut all = models().into_iter().map(|f| f.model);
    all.find(trains).ok_or_else(|| {
        Error::new(
            ErrorKind::Parity,
            "conformance",
            "the backend trains none of the fixtures",
        )
    })
}
