//! Every derivative against central differences of the loss, in f64.

use proptest::prelude::*;

use super::*;

const STEP: f64 = 1e-6;

/// Compares a derivative with the differences of a loss at -h, 0 and +h.
///
/// The gap between the two one-sided differences is `h` times the curvature where the loss is smooth, and the
/// whole jump of the slope at a kink, where either slope is right.
fn assert_derivative(what: &str, derivative: f64, losses: [f64; 3]) {
    let [below, at, above] = losses;
    let (left, right) = ((at - below) / STEP, (above - at) / STEP);
    let difference = (derivative - 0.5 * (left + right)).abs();
    let tolerance = 1e-7 + (right - left).abs();
    assert!(
        difference <= tolerance,
        "{what}: {derivative}, but the loss's slope is {left} .. {right}"
    );
}

/// Moves a token's log-prob. CISPO's ratio is held: its derivative stops there.
fn moved(case: &Case, objective: &dyn Objective, slot: usize, by: f64) -> Case {
    let mut case = case.clone();
    case.outputs.log_probs[slot] += by;
    if objective.name() == "cispo" {
        case.edit(OLD_LOG_PROBS, |old| old[slot] += by);
    }
    case
}

fn check(case: &Case, objective: &dyn Objective) {
    let value = case.evaluate(objective).unwrap();
    assert_eq!(value.d_log_probs.len(), case.batch.num_tokens());
    let loss = |case: Case| case.evaluate(objective).unwrap().loss;
    for (slot, scored) in case.batch.scored().into_iter().enumerate() {
        let what = format!("{objective:?}, d log_prob {slot}");
        let losses = [
            loss(moved(case, objective, slot, -STEP)),
            value.loss,
            loss(moved(case, objective, slot, STEP)),
        ];
        assert_derivative(&what, value.d_log_probs[slot], losses);
        assert!(
            scored || value.d_log_probs[slot] == 0.0,
            "{what}: not scored"
        );
        let Some(d_entropy) = &value.d_entropy else {
            assert!(!objective.requires().entropy, "{what}: no d_entropy");
            continue;
        };
        let entropy_moved = |by: f64| {
            let mut case = case.clone();
            case.outputs.entropy.as_mut().unwrap()[slot] += by;
            loss(case)
        };
        let losses = [entropy_moved(-STEP), value.loss, entropy_moved(STEP)];
        assert_derivative(
            &format!("{objective:?}, d entropy {slot}"),
            d_entropy[slot],
            losses,
        );
        assert!(scored || d_entropy[slot] == 0.0, "{what}: not scored");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn derivatives_are_the_slopes_of_the_loss(case in cases()) {
        for objective in objectives() {
            check(&case, &objective);
        }
    }

    #[test]
    fn a_known_derivative_does_not_read_the_outputs(case in cases()) {
        for objective in objectives().iter().filter(|o| o.derivative_known()) {
            let mut blank = case.clone();
            blank.outputs.log_probs.fill(0.0);
            blank.outputs.entropy = None;
            let (with, without) = (case.evaluate(objective).unwrap(), blank.evaluate(objective).unwrap());
            prop_assert_eq!(with.d_log_probs, without.d_log_probs);
        }
    }
}

#[test]
fn only_the_plain_likelihood_claims_a_known_derivative() {
    for objective in objectives() {
        let plain = objective.name() == "nll" && !objective.requires().entropy;
        assert_eq!(objective.derivative_known(), plain, "{objective:?}");
    }
}
