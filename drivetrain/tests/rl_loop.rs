//! The RL loop of `examples/` learns, and under every engine alike.

#[path = "../examples/rl_loop.rs"]
mod rl_loop;

/// Steps before rounding can have changed a sampled answer.
const ALIKE: usize = 5;

#[test]
fn every_engine_learns_and_learns_the_same() {
    let runs: Vec<_> = drivetrain::backends()
        .iter()
        .map(|backend| {
            let ranks = if backend.name() == "reference" { 1 } else { 2 };
            rl_loop::train(backend.name(), ranks, 60).expect("the loop runs")
        })
        .collect();
    let mean = |rewards: &[f64]| rewards.iter().sum::<f64>() / rewards.len() as f64;
    for rewards in &runs {
        let (first, last) = (mean(&rewards[..5]), mean(&rewards[55..]));
        assert!(first < 0.4, "chance is 0.125: {rewards:?}");
        assert!(last > 0.7, "{rewards:?}");
        assert_eq!(rewards[..ALIKE], runs[0][..ALIKE]);
    }
}
