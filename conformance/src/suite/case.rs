//! A case: a name, what it needs, and what it does.

use std::{fmt, sync::Arc};

use drivetrain_core::{
    Result, Severity,
    config::{MoeConfig, check_job},
    engine::{Backend, Capability},
    model::ModelSpec,
};

use super::{findings::Findings, layout::Layout, subject::Subject};
use crate::fixture::{self, ModelFixture};

type Run = Arc<dyn Fn(&Subject, &mut Findings) -> Result<()> + Send + Sync>;

/// Whether a capability claims something.
pub type Claims = fn(&Capability) -> bool;

/// A case of the suite.
#[derive(Clone)]
pub struct Case {
    /// `group/fixture/what`.
    pub name: String,
    /// What a backend must claim for it.
    pub needs: Needs,
    /// Whether it is one of many, of which a run takes a sample unless it is asked for all.
    pub sampled: bool,
    run: Run,
}

/// What a case needs of a backend.
#[derive(Debug, Clone, Default)]
pub struct Needs {
    /// The models that it runs.
    pub models: Vec<ModelSpec>,
    /// How its work is laid out.
    pub layout: Layout,
    /// And other layouts that it runs.
    pub also: Vec<Layout>,
    /// What its jobs say of experts.
    pub moe: MoeConfig,
    /// Entropy, forward and backward.
    pub entropy: bool,
    /// Log-probs at given ids.
    pub log_probs_at: bool,
    /// Snapshots.
    pub snapshots: bool,
    /// State that moves to host memory.
    pub offload: bool,
    /// Saving and loading state.
    pub checkpoints: bool,
    /// Exporting gradients.
    pub export_gradients: bool,
    /// A backend that it is not for: the one that another is compared with.
    pub not: Option<String>,
    /// What it must not claim: a name, and whether a capability claims it.
    pub lacks: Option<(&'static str, Claims)>,
}

impl Needs {
    /// Only that it trains this model.
    pub fn model(model: &ModelSpec) -> Self {
        Self {
            models: vec![model.clone()],
            ..Self::default()
        }
    }

    /// Why a backend is not asked to pass the case; `None` if it is.
    pub fn unmet(&self, backend: &Arc<dyn Backend>) -> Option<String> {
        let claims = backend.capability();
        if self.not.as_deref() == Some(backend.name()) {
            return Some("is not compared with itself".to_owned());
        }
        if self.models.is_empty() {
            let any = |m: ModelFixture| Self::model(&m.model).unmet(backend).is_none();
            if !fixture::models().into_iter().any(any) {
                return Some("trains none of the fixtures".to_owned());
            }
        }
        self.unclaimed(&claims).or_else(|| self.refused(backend))
    }

    fn unclaimed(&self, claims: &Capability) -> Option<String> {
        if let Some((what, claimed)) = self.lacks
            && claimed(claims)
        {
            return Some(format!("claims what {what} needs, so refuses nothing"));
        }
        let model = |m: &ModelSpec| !claims.families.contains(&m.family);
        if let Some(model) = self.models.iter().find(|m| model(m)) {
            return Some(format!("does not claim the family {:?}", model.family));
        }
        [
            (self.entropy, claims.entropy, "entropy"),
            (self.log_probs_at, claims.log_probs_at, "log_probs_at"),
            (self.snapshots, claims.snapshots, "snapshots"),
            (self.offload, claims.offload, "offload"),
            (self.checkpoints, claims.checkpoints, "checkpoints"),
            (
                self.export_gradients,
                claims.export_gradients,
                "export_gradients",
            ),
        ]
        .into_iter()
        .find(|&(needed, claimed, _)| needed && !claimed)
        .map(|(_, _, what)| format!("does not claim {what}"))
    }

    /// The layout may be beyond what the backend claims, and it may refuse a model by a rule of its own.
    fn refused(&self, backend: &Arc<dyn Backend>) -> Option<String> {
        let subject = Subject {
            backend: backend.clone(),
            settings: super::Settings::default(),
            moe: self.moe,
            transport: super::Transport::default(),
        };
        let layouts = || std::iter::once(&self.layout).chain(&self.also);
        let jobs = self.models.iter().flat_map(|model| {
            layouts().map(|layout| {
                let mut job = subject.job(model);
                layout.lay_out(&mut job);
                job
            })
        });
        jobs.into_iter().find_map(|job| {
            let faults = check_job(&job, &**backend);
            let fault = faults.iter().find(|d| d.severity == Severity::Error)?;
            Some(format!("its check says {}: {}", fault.rule, fault.found))
        })
    }
}

impl Case {
    /// A case.
    pub fn new(
        name: impl Into<String>,
        needs: Needs,
        run: impl Fn(&Subject, &mut Findings) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            needs,
            sampled: false,
            run: Arc::new(run),
        }
    }

    /// As one of many.
    #[must_use]
    pub fn sampled(self) -> Self {
        Self {
            sampled: true,
            ..self
        }
    }

    /// Runs it; the verdict is in the findings, unless something failed before there was one.
    ///
    /// # Errors
    /// What the backend returned where it should not have, or `Parity`.
    pub fn run(&self, subject: &Subject, findings: &mut Findings) -> Result<()> {
        (self.run)(&subject.with_moe(self.needs.moe), findings)?;
        findings.verdict()
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case")
            .field("name", &self.name)
            .field("needs", &self.needs)
            .finish_non_exhaustive()
    }
}
