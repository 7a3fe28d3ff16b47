//! Outputs of a global batch, in its own order, however it was cut over the ranks.

use super::MicrobatchPlan;
use crate::{
    Error, ErrorKind, Result,
    batch::Batch,
    communicator::{Communicator, ReduceOp},
    mesh::DeviceMesh,
    objective::TokenOutputs,
};

impl MicrobatchPlan {
    /// Every token's outputs of `global` on every rank, from each rank's outputs of its own share, whose bits
    /// they have. Collective over `world`, the mesh's ranks.
    ///
    /// # Errors
    /// `Defect` on every rank if one's outputs are not those of its share; communicator errors.
    pub fn gather(
        &self,
        global: &Batch,
        own: &TokenOutputs,
        mesh: &DeviceMesh,
        world: &dyn Communicator,
    ) -> Result<TokenOutputs> {
        let sequences = self.sequences(mesh.data_index(world.rank()));
        let num_own = sequences.iter().map(|&s| global.sequence(s).len()).sum();
        world.agree("gather_outputs", fits(own, num_own))?;

        // A rank without a token does not know how many numbers the others have of each.
        let parts = [
            Some(&own.log_probs),
            own.entropy.as_ref(),
            own.log_probs_at.as_ref(),
            own.values.as_ref(),
        ];
        let mut widths = parts.map(|part| part.map_or(0, |p| (p.len() / num_own.max(1)) as i64));
        world
            .all_reduce(widths.as_mut_slice().into(), ReduceOp::Max)?
            .wait()?;

        let num_tokens = global.num_tokens();
        let sizes = widths.map(|width| width as usize * num_tokens);
        let mut all = vec![0.0; sizes.iter().sum()];
        // Model-parallel peers have the same outputs: one of them gives them to the sum, so that bits stay.
        if mesh.is_data_leader(world.rank()) {
            let mut rest = all.as_mut_slice();
            for ((part, width), size) in parts.into_iter().zip(widths).zip(sizes) {
                let (whole, behind) = rest.split_at_mut(size);
                rest = behind;
                place(whole, part, width as usize, global, &sequences);
            }
        }
        world.sum_f64(&mut all)?;

        let mut rest = all.into_iter();
        let mut part = |n: usize| {
            let values: Vec<f64> = rest.by_ref().take(sizes[n]).collect();
            (widths[n] > 0).then_some(values)
        };
        Ok(TokenOutputs {
            log_probs: part(0).unwrap_or_default(),
            entropy: part(1),
            log_probs_at: part(2),
            values: part(3),
        })
    }
}

/// Whether there is a log-prob for each token, and whole rows of the rest.
fn fits(own: &TokenOutputs, num_tokens: usize) -> Result<()> {
    let even = |part: &Option<Vec<f64>>| {
        part.as_ref()
            .is_none_or(|p| p.len().is_multiple_of(num_tokens) || p.is_empty())
    };
    let rest = [&own.entropy, &own.log_probs_at, &own.values];
    if own.log_probs.len() == num_tokens && rest.into_iter().all(even) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Defect,
        "gather_outputs",
        "a rank's outputs are not those of its share",
    )
    .with("expected", format!("{num_tokens} tokens"))
    .with("found", format!("{} log-probs", own.log_probs.len())))
}

/// Copies the share's rows to where its sequences lie in the global batch.
fn place(
    whole: &mut [f64],
    part: Option<&Vec<f64>>,
    width: usize,
    global: &Batch,
    sequences: &[usize],
) {
    let mut rows = part.map(Vec::as_slice).unwrap_or_default();
    for &sequence in sequences {
        let range = global.sequence(sequence);
        let (here, behind) = rows.split_at((range.len() * width).min(rows.len()));
        rows = behind;
        whole[range.start * width..][..here.len()].copy_from_slice(here);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        batch::BatchBuilder,
        launch::run_ranks,
        plan::{MicrobatchLimit, plan_microbatches},
    };

    fn mesh(data: usize, tensor: usize) -> DeviceMesh {
        DeviceMesh {
            pipeline: 1,
            data_replicate: 1,
            data_shard: data,
            context: 1,
            tensor,
            expert: 1,
            expert_tensor: 1,
        }
    }

    /// What an engine would give for each token: numbers that tell tokens apart.
    fn outputs(batch: &Batch, width: usize) -> TokenOutputs {
        let tokens = batch.tokens().iter().map(|&t| f64::from(t) + 0.1);
        let rows = |n: usize| {
            let row = move |t: f64| (0..n).map(move |i| t + 100.0 * i as f64);
            tokens.clone().flat_map(row).collect::<Vec<f64>>()
        };
        TokenOutputs {
            log_probs: rows(1),
            entropy: None,
            log_probs_at: (!batch.tokens().is_empty()).then(|| rows(width)),
            values: Some(rows(1)),
        }
    }

    #[test]
    fn outputs_come_back_in_the_batchs_order_on_every_rank() {
        for (lengths, limit) in [
            (vec![3, 1, 4, 2, 5], MicrobatchLimit::Sequences(2)),
            (vec![3, 9, 4, 2, 5, 1], MicrobatchLimit::Tokens(8)),
            (vec![2], MicrobatchLimit::All),
            (vec![], MicrobatchLimit::All),
        ] {
            let mut builder = BatchBuilder::new();
            let mut next = 0..;
            for &length in &lengths {
                let tokens: Vec<u32> = next.by_ref().take(length).collect();
                builder.push(&tokens, None).unwrap();
            }
            let global = builder.build().unwrap();
            for (data, tensor) in [(1, 1), (2, 1), (3, 2)] {
                let mesh = mesh(data, tensor);
                let (lengths, groups) = (global.lengths(), global.groups());
                let plan = plan_microbatches(&lengths, groups, data, limit, 1).unwrap();
                let all = run_ranks(mesh.world_size(), Duration::from_secs(20), |world| {
                    let share = plan.share(&global, mesh.data_index(world.rank()))?;
                    plan.gather(&global, &outputs(&share, 3), &mesh, &*world)
                })
                .unwrap();
                let mut expected = outputs(&global, 3);
                expected.values = expected.values.filter(|v| !v.is_empty());
                assert_eq!(all, vec![expected; mesh.world_size()]);
            }
        }
    }

    #[test]
    fn outputs_of_another_share_fail_on_every_rank() {
        let mut builder = BatchBuilder::new();
        builder.push(&[1, 2, 3], None).unwrap();
        let global = builder.build().unwrap();
        let plan = plan_microbatches(&[3], &[0, 1], 2, MicrobatchLimit::All, 1).unwrap();
        let kinds = run_ranks(2, Duration::from_secs(20), |world| {
            let share = plan.share(&global, world.rank())?;
            let mut own = outputs(&share, 1);
            if world.rank() == 1 {
                own.log_probs.pop();
            }
            if world.rank() == 0 {
                own.log_probs.push(0.0);
            }
            let outcome = plan.gather(&global, &own, &mesh(2, 1), &*world);
            Ok(outcome.err().map(|e| e.kind()))
        });
        assert_eq!(kinds.unwrap(), [Some(ErrorKind::Defect); 2]);
    }
}
