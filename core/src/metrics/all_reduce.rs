//! Combining metrics over ranks.

use super::{Metric, Metrics, Reduce};
use crate::{Error, ErrorKind, Result, communicator::Communicator};

/// What travels: exact bits, since JSON has no NaN.
type Entry = (String, u64, u64, Reduce);

impl Metrics {
    /// Combines the metrics of all members, which need not have recorded the same names: parts are merged in
    /// rank order, so every member ends with the same bits in the same order.
    ///
    /// # Errors
    /// The communicator's; `Defect` if ranks combine one name in different ways.
    pub fn all_reduce(&mut self, communicator: &dyn Communicator) -> Result<()> {
        let mine = encode(self)?;
        let mut sizes = vec![0_i64; communicator.world_size()];
        let ones = vec![1; sizes.len()];
        let size = [mine.len() as i64];
        communicator
            .all_gather((&size[..]).into(), (&mut sizes).into(), &ones)?
            .wait()?;
        let counts: Vec<usize> = sizes.iter().map(|&n| n as usize).collect();
        let mut all = vec![0_u8; counts.iter().sum()];
        communicator
            .all_gather((&mine).into(), (&mut all).into(), &counts)?
            .wait()?;
        let mut merged = Self::default();
        let mut rest = all.as_slice();
        for (rank, &count) in counts.iter().enumerate() {
            let (part, tail) = rest.split_at(count);
            merge_part(&mut merged, part).map_err(|error| error.with("from_rank", rank))?;
            rest = tail;
        }
        *self = merged;
        Ok(())
    }
}

fn encode(metrics: &Metrics) -> Result<Vec<u8>> {
    let entries: Vec<Entry> = metrics
        .iter()
        .map(|(name, m)| {
            (
                name.to_owned(),
                m.sum.to_bits(),
                m.weight.to_bits(),
                m.reduce,
            )
        })
        .collect();
    serde_json::to_vec(&entries).map_err(|e| defect("metrics cannot be encoded").caused_by(e))
}

fn merge_part(merged: &mut Metrics, part: &[u8]) -> Result<()> {
    let entries: Vec<Entry> = serde_json::from_slice(part)
        .map_err(|e| defect("a rank's metrics cannot be decoded").caused_by(e))?;
    for (name, sum, weight, reduce) in entries {
        if let Some(known) = merged.0.get(&name)
            && known.reduce != reduce
        {
            return Err(defect("ranks combine a metric in different ways")
                .with("metric", name)
                .with("expected", format!("{:?}", known.reduce))
                .with("found", format!("{reduce:?}")));
        }
        let metric = Metric {
            sum: f64::from_bits(sum),
            weight: f64::from_bits(weight),
            reduce,
        };
        merged.record(&name, metric);
    }
    Ok(())
}

fn defect(message: &str) -> Error {
    Error::new(ErrorKind::Defect, "all_reduce_metrics", message)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::launch::run_ranks;

    fn reduced(record: impl Fn(usize, &mut Metrics) + Sync) -> Result<Vec<Metrics>> {
        run_ranks(3, Duration::from_secs(10), |communicator| {
            let mut metrics = Metrics::default();
            record(communicator.rank(), &mut metrics);
            metrics.all_reduce(&*communicator)?;
            Ok(metrics)
        })
    }

    #[test]
    fn ranks_with_different_names_end_alike() {
        let ranks = reduced(|rank, metrics| {
            let r = rank as f64;
            if rank == 1 {
                metrics.max("only_one", -5.0);
            }
            metrics.mean("mean", 0.1 * r, r);
            if rank > 0 {
                metrics.min("min", r);
                metrics.sum("sum", 0.1);
            }
        })
        .unwrap();
        for metrics in &ranks {
            assert_eq!(metrics, &ranks[0]);
            assert_eq!(metrics.value("only_one"), Some(-5.0));
            assert_eq!(metrics.value("mean"), Some((0.1 + 0.2) / 3.0));
            assert_eq!(metrics.value("min"), Some(1.0));
            assert_eq!(metrics.value("sum"), Some(0.2));
        }
        let names: Vec<_> = ranks[0].iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["mean", "only_one", "min", "sum"]);
    }

    #[test]
    fn a_nan_arrives_as_one() {
        let ranks = reduced(|rank, metrics| {
            metrics.max("max", if rank == 2 { f64::NAN } else { 1.0 });
            metrics.sum("sum", if rank == 0 { f64::INFINITY } else { 1.0 });
        })
        .unwrap();
        for metrics in ranks {
            assert!(metrics.value("max").unwrap().is_nan());
            assert_eq!(metrics.value("sum"), Some(f64::INFINITY));
        }
    }

    #[test]
    fn different_reductions_of_one_name_are_refused() {
        let error = reduced(|rank, metrics| match rank {
            0 => metrics.sum("x", 1.0),
            _ => metrics.max("x", 1.0),
        })
        .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Defect);
        assert_eq!(error.context("metric"), Some("x"));
    }
}
