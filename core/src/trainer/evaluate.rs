//! Validation: the mean NLL over scored tokens, however the data is cut.

use crate::{
    Result,
    batch::Batch,
    communicator::Communicator,
    engine::{Engine, ScoreRequest},
};

/// Mean negative log-likelihood over the scored tokens of all ranks' shares; 0 where nothing is scored.
/// Every rank gives the same number of shares (an empty one is legal).
///
/// # Errors
/// Those of engine and communicator.
pub fn mean_nll(
    engine: &mut dyn Engine,
    shares: &[Batch],
    temperature: f64,
    data_group: &dyn Communicator,
) -> Result<f64> {
    let request = ScoreRequest {
        temperature,
        ..ScoreRequest::default()
    };
    let mut sums = [0.0, 0.0];
    for share in shares {
        let outputs = engine.forward(share, &request)?;
        for (log_prob, _) in outputs
            .log_probs
            .iter()
            .zip(share.scored())
            .filter(|(_, s)| *s)
        {
            sums[0] -= log_prob;
            sums[1] += 1.0;
        }
    }
    data_group.sum_f64(&mut sums)?;
    Ok(if sums[1] == 0.0 {
        0.0
    } else {
        sums[0] / sums[1]
    })
}
