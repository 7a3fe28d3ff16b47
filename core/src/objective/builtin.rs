//! The built-in objectives as one closed set, chosen by the config.

use enum_dispatch::enum_dispatch;

use super::{Aggregation, Cispo, Clip, ClippedSurrogate, Dpo, Gspo, KlTerm, Nll, Terms};
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
    /// PPO, GRPO and DAPO.
    ClippedSurrogate,
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
    let surrogate = |default: ClippedSurrogate| ClippedSurrogate {
        clip: clip(default.clip),
        dual_clip: config.dual_clip,
        terms: terms(default.terms),
        ..default
    };
    Ok(match config.kind {
        ObjectiveKind::Nll => Nll {
            terms: terms(Nll::default().terms),
        }
        .into(),
        ObjectiveKind::Ppo => surrogate(ClippedSurrogate::ppo()).into(),
        ObjectiveKind::Grpo => surrogate(ClippedSurrogate::grpo()).into(),
        ObjectiveKind::Dapo => surrogate(ClippedSurrogate::dapo()).into(),
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

/// A number of the config, and where it may lie.
#[derive(Debug)]
pub(crate) struct Setting {
    /// Under `objective`.
    pub(crate) key: &'static str,
    pub(crate) value: f64,
    pub(crate) sound: bool,
    /// Where it may lie, in words.
    pub(crate) range: &'static str,
}

/// Every number that the config gives.
pub(crate) fn settings(config: &ObjectiveConfig) -> impl Iterator<Item = Setting> {
    let above_0 = |x: f64| x > 0.0 && x.is_finite();
    let from_0 = |x: f64| x >= 0.0 && x.is_finite();
    let to_1 = |x: f64| (0.0..=1.0).contains(&x);
    type Check = fn(f64) -> bool;
    // CISPO's lower bound may be 0, so any `low` does.
    let (low, low_words): (Check, _) = match config.kind {
        ObjectiveKind::Cispo => (from_0, "0 or above"),
        _ => (to_1, "from 0 to 1"),
    };
    let table: [(_, _, Check, _); 9] = [
        ("temperature", Some(config.temperature), above_0, "above 0"),
        ("divisor", config.divisor, above_0, "above 0"),
        ("clip_low", config.clip_low, low, low_words),
        ("clip_high", config.clip_high, from_0, "0 or above"),
        (
            "dual_clip",
            config.dual_clip,
            |x| x > 1.0 && x.is_finite(),
            "above 1, such as 3",
        ),
        (
            "kl_coefficient",
            Some(config.kl_coefficient),
            from_0,
            "0 or above",
        ),
        (
            "entropy_coefficient",
            Some(config.entropy_coefficient),
            f64::is_finite,
            "that is finite",
        ),
        ("beta", config.beta, above_0, "above 0, such as 0.1"),
        (
            "label_smoothing",
            Some(config.label_smoothing),
            |x| (0.0..0.5).contains(&x),
            "in [0, 0.5)",
        ),
    ];
    table.into_iter().filter_map(|(key, value, sound, range)| {
        value.map(|value| Setting {
            key,
            value,
            sound: sound(value),
            range,
        })
    })
}

fn check_ranges(config: &ObjectiveConfig) -> Result<()> {
    match settings(config).find(|s| !s.sound) {
        None => Ok(()),
        Some(setting) => Err(Error::new(
            ErrorKind::Config,
            "build_objective",
            "a setting of the objective is out of range",
        )
        .with("key", format!("objective.{}", setting.key))
        .with("expected", format!("a number {}", setting.range))
        .with("found", setting.value)),
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
        let BuiltinObjective::ClippedSurrogate(dapo) = from_config(&config).unwrap() else {
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
