//! The built-in objectives as one closed set, chosen by the config.

use enum_dispatch::enum_dispatch;

use super::{Aggregation, Cispo, Clip, Dapo, Dpo, Grpo, Gspo, KlTerm, Nll, Ppo, Terms};
use crate::{
    Error, ErrorKind, Result,
    config::{KlEstimator, ObjectiveConfig, ObjectiveKind},
};

/// A built-in objective. A user's own is a `dyn Objective`.
#[enum_dispatch(Objective)]
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum BuiltinObjective {
    /// Negative log-likelihood.
    Nll,
    /// PPO's clipped surrogate.
    Ppo,
    /// Group-relative policy optimization.
    Grpo,
    /// GRPO with decoupled clips and token mean.
    Dapo,
    /// GRPO with sequence-level ratios.
    Gspo,
    /// Clipped importance weights.
    Cispo,
    /// Direct preference optimization.
    Dpo,
}

/// The objective that a config asks for; what it leaves unsaid is the objective's own default.
///
/// # Errors
/// `Config` naming a setting that is out of range. (`check` says more, and all faults at once.)
pub fn from_config(config: &ObjectiveConfig) -> Result<BuiltinObjective> {
    check_ranges(config)?;
    let terms = |default: Terms| terms(config, default);
    let clip = |default: Clip| Clip {
        low: config.clip_low.unwrap_or(default.low),
        high: config.clip_high.unwrap_or(default.high),
    };
    Ok(match config.kind {
        ObjectiveKind::Nll => Nll {
            terms: terms(Nll::default().terms),
        }
        .into(),
        ObjectiveKind::Ppo => Ppo {
            clip: clip(Ppo::default().clip),
            dual_clip: config.dual_clip,
            terms: terms(Ppo::default().terms),
        }
        .into(),
        ObjectiveKind::Grpo => Grpo {
            clip: clip(Grpo::default().clip),
            dual_clip: config.dual_clip,
            terms: terms(Grpo::default().terms),
        }
        .into(),
        ObjectiveKind::Dapo => Dapo {
            clip: clip(Dapo::default().clip),
            dual_clip: config.dual_clip,
            terms: terms(Dapo::default().terms),
        }
        .into(),
        ObjectiveKind::Gspo => Gspo {
            clip: clip(Gspo::default().clip),
            terms: terms(Gspo::default().terms),
        }
        .into(),
        ObjectiveKind::Cispo => Cispo {
            clip: clip(Cispo::default().clip),
            terms: terms(Cispo::default().terms),
        }
        .into(),
        ObjectiveKind::Dpo => Dpo {
            beta: config.beta.unwrap_or(Dpo::default().beta),
            label_smoothing: config.label_smoothing,
            temperature: config.temperature,
        }
        .into(),
    })
}

fn terms(config: &ObjectiveConfig, default: Terms) -> Terms {
    let kl = (config.kl_coefficient != 0.0).then_some(KlTerm {
        coefficient: config.kl_coefficient,
        estimator: config.kl_estimator.unwrap_or(KlEstimator::K3),
    });
    Terms {
        aggregation: Aggregation::from_config(config, default.aggregation),
        temperature: config.temperature,
        kl,
        entropy_coefficient: config.entropy_coefficient,
    }
}

fn check_ranges(config: &ObjectiveConfig) -> Result<()> {
    let above_0 = |x: f64| x > 0.0 && x.is_finite();
    let from_0 = |x: f64| x >= 0.0 && x.is_finite();
    let settings = [
        (
            "objective.temperature",
            Some(config.temperature),
            above_0(config.temperature),
            "above 0",
        ),
        (
            "objective.divisor",
            config.divisor,
            config.divisor.is_none_or(above_0),
            "above 0",
        ),
        (
            "objective.clip_low",
            config.clip_low,
            config.clip_low.is_none_or(from_0),
            "0 or above",
        ),
        (
            "objective.clip_high",
            config.clip_high,
            config.clip_high.is_none_or(from_0),
            "0 or above",
        ),
        (
            "objective.dual_clip",
            config.dual_clip,
            config.dual_clip.is_none_or(|c| c > 1.0 && c.is_finite()),
            "above 1",
        ),
        (
            "objective.kl_coefficient",
            Some(config.kl_coefficient),
            from_0(config.kl_coefficient),
            "0 or above",
        ),
        (
            "objective.entropy_coefficient",
            Some(config.entropy_coefficient),
            config.entropy_coefficient.is_finite(),
            "a finite number",
        ),
        (
            "objective.beta",
            config.beta,
            config.beta.is_none_or(above_0),
            "above 0",
        ),
        (
            "objective.label_smoothing",
            Some(config.label_smoothing),
            (0.0..0.5).contains(&config.label_smoothing),
            "from 0 up to 0.5",
        ),
    ];
    match settings.into_iter().find(|(_, _, sound, _)| !sound) {
        None => Ok(()),
        Some((key, found, _, expected)) => Err(Error::new(
            ErrorKind::Config,
            "build_objective",
            "a setting of the objective is out of range",
        )
        .with("key", key)
        .with("expected", expected)
        .with("found", found.unwrap_or(f64::NAN))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objective::Objective;

    #[test]
    fn the_config_overrides_each_default() {
        let config = ObjectiveConfig {
            kind: ObjectiveKind::Dapo,
            clip_high: Some(0.5),
            kl_coefficient: 0.1,
            entropy_coefficient: 0.2,
            temperature: 0.5,
            ..ObjectiveConfig::default()
        };
        let BuiltinObjective::Dapo(dapo) = from_config(&config).unwrap() else {
            panic!("dapo was asked for");
        };
        assert_eq!(
            dapo.clip,
            Clip {
                low: 0.2,
                high: 0.5
            }
        );
        assert_eq!(dapo.terms.aggregation, Aggregation::TokenMean);
        let requirements = dapo.requires();
        // One temperature for log-prob and entropy alike.
        assert_eq!(
            (requirements.temperature, requirements.entropy),
            (0.5, true)
        );
        assert_eq!(
            requirements.columns,
            ["advantages", "old_log_probs", "reference_log_probs"]
        );
    }

    #[test]
    fn a_temperature_of_zero_is_refused() {
        for temperature in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let config = ObjectiveConfig {
                temperature,
                ..ObjectiveConfig::default()
            };
            let error = from_config(&config).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert_eq!(error.context("key"), Some("objective.temperature"));
        }
    }
}
