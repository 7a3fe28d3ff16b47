//! Which rank computes which sequences, in which micro-batch: a pure function of all the lengths.

use serde::{Deserialize, Serialize};

use crate::{Error, ErrorKind, Result, batch::Batch};

/// How much one micro-batch may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MicrobatchLimit {
    /// Everything a rank has.
    All,
    /// This many sequences (rounded up to whole groups).
    Sequences(usize),
    /// This many tokens; a group that is longer is a micro-batch of its own.
    Tokens(usize),
}

impl MicrobatchLimit {
    /// What a job's `batch` section says; tokens where both are given.
    pub fn from_config(batch: &crate::config::BatchConfig) -> Self {
        match (batch.micro_batch_tokens, batch.micro_batch_size) {
            (Some(tokens), _) => Self::Tokens(tokens),
            (None, Some(sequences)) => Self::Sequences(sequences),
            (None, None) => Self::All,
        }
    }
}

/// Sequence indices of the global batch: `[rank][microbatch][..]`. Every rank has the same number of
/// micro-batches; some may be empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MicrobatchPlan {
    ranks: Vec<Vec<Vec<usize>>>,
}

/// Cuts a global batch for `data_ranks` data-parallel ranks.
///
/// Groups are never split. By sequences, groups go to ranks in order, in runs as even as can be; by tokens,
/// the longest groups go first, each to the rank with the fewest tokens so far, so that ranks are balanced,
/// and micro-batches are then filled in the original order. Their number is filled up with empty ones to a
/// multiple of `multiple_of` ([`PipelineKind::multiple_of`](super::PipelineKind::multiple_of)).
///
/// # Errors
/// `Config` if `data_ranks`, the limit or `multiple_of` is 0.
pub fn plan_microbatches(
    lengths: &[usize],
    groups: &[usize],
    data_ranks: usize,
    limit: MicrobatchLimit,
    multiple_of: usize,
) -> Result<MicrobatchPlan> {
    let limit_value = match limit {
        MicrobatchLimit::All => 1,
        MicrobatchLimit::Sequences(n) | MicrobatchLimit::Tokens(n) => n,
    };
    if data_ranks == 0 || limit_value == 0 || multiple_of == 0 {
        return Err(Error::new(
            ErrorKind::Config,
            "plan_microbatches",
            "ranks, limit and multiple must be above 0",
        )
        .with("data_ranks", data_ranks)
        .with("limit", format!("{limit:?}"))
        .with("multiple_of", multiple_of));
    }
    let groups: Vec<_> = groups
        .windows(2)
        .map(|w| w[0]..w[1])
        .filter(|g| !g.is_empty())
        .collect();
    let tokens = |g: &std::ops::Range<usize>| lengths[g.clone()].iter().sum::<usize>();
    let shares: Vec<Vec<_>> = match limit {
        MicrobatchLimit::Tokens(_) => balance(&groups, tokens, data_ranks),
        _ => (0..data_ranks)
            .map(|r| {
                let bound = |r: usize| groups.len() * r / data_ranks;
                groups[bound(r)..bound(r + 1)].to_vec()
            })
            .collect(),
    };
    let mut ranks: Vec<Vec<Vec<usize>>> = shares
        .into_iter()
        .map(|share| {
            let mut cut: Vec<Vec<usize>> = Vec::new();
            let mut size = 0;
            for group in share {
                let (weight, most) = match limit {
                    MicrobatchLimit::All => (0, usize::MAX),
                    MicrobatchLimit::Sequences(n) => (group.len(), n),
                    MicrobatchLimit::Tokens(n) => (tokens(&group), n),
                };
                match cut.last_mut() {
                    Some(last) if size + weight <= most => {
                        size += weight;
                        last.extend(group);
                    }
                    _ => {
                        size = weight;
                        cut.push(group.collect());
                    }
                }
            }
            cut
        })
        .collect();
    let count = ranks.iter().map(Vec::len).max().unwrap_or(0).max(1);
    let count = count.next_multiple_of(multiple_of);
    for rank in &mut ranks {
        rank.resize(count, Vec::new());
    }
    Ok(MicrobatchPlan { ranks })
}

fn balance(
    groups: &[std::ops::Range<usize>],
    tokens: impl Fn(&std::ops::Range<usize>) -> usize,
    data_ranks: usize,
) -> Vec<Vec<std::ops::Range<usize>>> {
    let mut order: Vec<_> = (0..groups.len()).collect();
    order.sort_by_key(|&g| (std::cmp::Reverse(tokens(&groups[g])), g));
    let mut shares = vec![(0, Vec::new()); data_ranks];
    for g in order {
        let least = (0..data_ranks)
            .min_by_key(|&r| (shares[r].0, r))
            .unwrap_or(0);
        shares[least].0 += tokens(&groups[g]);
        shares[least].1.push(g);
    }
    shares
        .into_iter()
        .map(|(_, mut share)| {
            share.sort_unstable();
            share.into_iter().map(|g| groups[g].clone()).collect()
        })
        .collect()
}

impl MicrobatchPlan {
    /// Micro-batches of every rank.
    pub fn num_microbatches(&self) -> usize {
        self.ranks.first().map_or(0, Vec::len)
    }

    /// The sequence indices of a rank, in the order its share has them.
    pub fn sequences(&self, rank: usize) -> Vec<usize> {
        self.ranks[rank].concat()
    }

    /// A rank's share of the global batch, cut into its micro-batches.
    ///
    /// # Errors
    /// `Defect` if the plan was made for another batch.
    pub fn share(&self, global: &Batch, rank: usize) -> Result<Batch> {
        let mut cuts = vec![0];
        for microbatch in &self.ranks[rank] {
            cuts.push(cuts[cuts.len() - 1] + microbatch.len());
        }
        global.select(&self.sequences(rank)).with_microbatches(cuts)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn singles(n: usize) -> Vec<usize> {
        (0..=n).collect()
    }

    #[test]
    fn ranks_get_equal_counts_even_when_sequences_run_out() {
        let plan = plan_microbatches(
            &[3, 7, 12, 5, 4],
            &singles(5),
            2,
            MicrobatchLimit::Sequences(1),
            1,
        )
        .unwrap();
        assert_eq!(plan.num_microbatches(), 3);
        assert_eq!(plan.ranks[0], [vec![0], vec![1], vec![]]);
        assert_eq!(plan.ranks[1], [vec![2], vec![3], vec![4]]);
        let none = plan_microbatches(&[], &[0], 2, MicrobatchLimit::All, 1).unwrap();
        assert_eq!(none.ranks, [[Vec::<usize>::new()], [Vec::new()]]);
    }

    #[test]
    fn tokens_balance_ranks() {
        let lengths = [512, 60, 130, 300, 90, 220, 40, 180];
        let plan =
            plan_microbatches(&lengths, &singles(8), 2, MicrobatchLimit::Tokens(600), 1).unwrap();
        let load = |r| plan.sequences(r).iter().map(|&s| lengths[s]).sum::<usize>();
        assert!(load(0).abs_diff(load(1)) <= 40, "{} {}", load(0), load(1));
    }

    #[test]
    fn zero_is_refused() {
        assert!(plan_microbatches(&[1], &[0, 1], 0, MicrobatchLimit::All, 1).is_err());
        assert!(plan_microbatches(&[1], &[0, 1], 1, MicrobatchLimit::All, 0).is_err());
        assert!(plan_microbatches(&[1], &[0, 1], 1, MicrobatchLimit::Tokens(0), 1).is_err());
    }

    proptest! {
        #[test]
        fn every_sequence_once_and_no_group_split(
            sizes in proptest::collection::vec(1usize..4, 0..12),
            lengths in proptest::collection::vec(1usize..40, 48),
            ranks in 1usize..5,
            multiple_of in 1usize..5,
            limit in prop_oneof![
                Just(MicrobatchLimit::All),
                (1usize..5).prop_map(MicrobatchLimit::Sequences),
                (1usize..90).prop_map(MicrobatchLimit::Tokens),
            ],
        ) {
            let mut groups = vec![0];
            for size in &sizes { groups.push(groups[groups.len() - 1] + size); }
            let n = groups[groups.len() - 1];
            let plan = plan_microbatches(&lengths[..n], &groups, ranks, limit, multiple_of).unwrap();
            prop_assert!(plan.num_microbatches().is_multiple_of(multiple_of));
            let fewest = plan_microbatches(&lengths[..n], &groups, ranks, limit, 1).unwrap();
            prop_assert!(plan.num_microbatches() < fewest.num_microbatches() + multiple_of);
            let mut seen: Vec<usize> = (0..ranks).flat_map(|r| plan.sequences(r)).collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..n).collect::<Vec<_>>());
            for rank in &plan.ranks {
                prop_assert_eq!(rank.len(), plan.num_microbatches());
                for microbatch in rank {
                    for g in groups.windows(2) {
                        let inside = (g[0]..g[1]).filter(|s| microbatch.contains(s)).count();
                        prop_assert!(inside == 0 || inside == g[1] - g[0]);
                    }
                }
            }
        }
    }
}
