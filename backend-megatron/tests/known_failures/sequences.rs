//! Sequences that ranks share, of any length. Rows are never padded here: no multiple is asked of a length.

use drivetrain_conformance::{fixture::model, suite::Layout};
use drivetrain_core::plan::MicrobatchLimit;

use super::{Setting, assert_all_close, assert_close, layout};

fn grid(context: usize, tensor: usize, sequence: bool) -> Layout {
    layout(|p| {
        p.context_parallel_size = context;
        p.tensor_parallel_size = tensor;
        p.sequence_parallel = sequence && tensor > 1;
    })
}

/// Nine heads for three tensor ranks, else four.
fn fixture(tensor: usize) -> drivetrain_core::model::ModelSpec {
    model(if tensor.is_multiple_of(3) {
        "odd_heads"
    } else {
        "dense"
    })
}

/// N25. Sequences shorter than the grid of ranks and of no round length: as on one rank. (8, 24 and 8 are the
/// multiples that padding to the grids (2, 4), (4, 3) and (4, 2) would need.)
#[test]
fn sequences_may_be_shorter_than_the_ranks_are_many() {
    for (context, tensor) in [(4, 2), (2, 4), (4, 3)] {
        let setting = Setting::new(&fixture(tensor), &[(2, 1), (17, 16)]);
        let one = setting.first(Layout::default());
        for sequence in [false, true] {
            for layout in [
                grid(context, tensor, sequence),
                grid(context, tensor, sequence).sequences(1),
            ] {
                let found = setting.first(layout);
                assert_eq!(found.log_probs.len(), 19);
                assert_close("log-probs", &found.log_probs, &one.log_probs, 1e-5);
                assert_all_close("gradient", &found.gradients, &one.gradients, 1e-5);
            }
        }
    }
}

/// G07. TP 1, 2, 3 by CP 1, 2, lengths 3 to 17, packed: every token comes back in its place.
#[test]
fn packed_tokens_come_back_in_their_places() {
    let shape: Vec<_> = (3..=17).map(|n| (n, n - 1)).collect();
    for tensor in [1, 2, 3] {
        let setting = Setting::new(&fixture(tensor), &shape);
        let one = setting.first(Layout::default().sequences(1));
        for context in [1, 2] {
            for sequence in [false, true] {
                let packed = MicrobatchLimit::Tokens(24);
                let found = setting.first(grid(context, tensor, sequence).limit(packed));
                assert_eq!(found.log_probs.len(), setting.batch.num_tokens());
                assert_close("log-probs", &found.log_probs, &one.log_probs, 1e-5);
                assert_all_close("gradient", &found.gradients, &one.gradients, 1e-5);
            }
        }
    }
}
