//! Weights that several axes share come out whole and in order.

use drivetrain_conformance::{fixture::dense, suite::Layout};
use drivetrain_core::model::Family;

use super::{Setting, assert_all_close, layout};

/// N31. Rows 0, 1, 2, 3 of an embedding on TP2 x DP2: imported, gathered after a step, and exported in that order.
#[test]
fn rows_that_tensor_and_data_ranks_share_keep_their_order() {
    let mut plain = dense(Family::Llama, 1);
    plain.vocab_size = 4;
    let d = plain.hidden_size;
    let mut setting = Setting::new(&plain, &[(5, 4), (7, 6), (3, 2), (9, 8)]);
    setting.change("model.embed_tokens.weight", |i, _| (i / d) as f64);
    setting.change("lm_head.weight", |i, _| 0.01 * (i / d) as f64);
    let ranks = layout(|p| {
        p.tensor_parallel_size = 2;
        p.data_parallel_size = 2;
    });
    let one = setting.first(Layout::default());
    for found in setting.run(ranks) {
        // The learning rate is 0: owners send their shares, unchanged.
        for (name, _, values) in setting.weights.iter() {
            assert_eq!(found.weights[name], values, "{name}");
        }
        let rows = &found.weights["model.embed_tokens.weight"];
        let firsts: Vec<_> = rows.iter().step_by(d).copied().collect();
        assert_eq!(firsts, [0.0, 1.0, 2.0, 3.0]);
        assert_all_close("gradient", &found.gradients, &one.gradients, 1e-5);
    }
}
