//! The order of an epoch: a pure function of seed, epoch and size, the same on every machine.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A permutation of `0..size`: sorted by a hash of (seed, epoch, index).
pub(super) fn shuffled(size: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let key = |index: usize| {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&epoch.to_le_bytes());
        bytes[8..].copy_from_slice(&(index as u64).to_le_bytes());
        xxh3_64_with_seed(&bytes, seed)
    };
    let mut keyed: Vec<(u64, usize)> = (0..size).map(|index| (key(index), index)).collect();
    keyed.sort_unstable();
    keyed.into_iter().map(|(_, index)| index).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_fixed_for_all_time() {
        // These values are part of the checkpoint format: a resumed job must see them again.
        assert_eq!(shuffled(8, 7, 0), FIRST);
        assert_eq!(shuffled(8, 7, 1), SECOND);
    }

    const FIRST: [usize; 8] = [3, 5, 7, 0, 1, 6, 2, 4];
    const SECOND: [usize; 8] = [0, 3, 2, 4, 6, 5, 1, 7];

    #[test]
    fn every_index_comes_once_and_orders_differ() {
        let orders: Vec<_> = [(1, 0), (1, 1), (2, 0)]
            .map(|(s, e)| shuffled(1000, s, e))
            .into();
        for order in &orders {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..1000).collect::<Vec<_>>());
            let fixed = order.iter().enumerate().filter(|&(a, &b)| a == b).count();
            assert!(fixed < 12, "{fixed} of 1000 stayed in place");
        }
        assert_ne!(orders[0], orders[1]);
        assert_ne!(orders[0], orders[2]);
    }
}
