//! The distributed optimizer (Megatron's; ZeRO stage 1 of Rajbhandari et al. 2020, with gradients
//! reduce-scattered), over whatever ranks hold the same elements.
//!
//! A region's replicas are data and context ranks, for norms and routers tensor ranks too, for a tied embedding
//! the first and the last stage. Each computes a part of the sum that is the gradient; of each region a rank
//! owns a share: it receives the sum of that share's gradients, updates it with moments that only it holds, and
//! sends the new weights to all. So every element is owned once: it enters the norm once, is saved once, and
//! its replicas have the same bits. Shares are cuts of the flat region, uneven or empty where it does not
//! divide: there is no padding to enter a norm or an export.

mod gradients;
mod reduction;

pub(crate) use gradients::Gradients;
pub(crate) use reduction::{Reduction, Slots};

use std::{ops::Range, sync::Arc};

use drivetrain_core::{
    Result,
    communicator::{Communicator, Shared},
    plan::share,
};

use crate::{
    weights::{Buffers, Layout, Region},
    workspace::Buffer,
};

/// The replicas of each region and what each owns.
#[derive(Debug)]
pub(crate) struct DataParallel {
    groups: Vec<Arc<dyn Communicator>>,
    regions: Vec<Region>,
    /// Regions of each bucket.
    buckets: Vec<Range<usize>>,
}

/// Elements of each rank's share of `len`, as even as can be.
pub(crate) fn share_counts(len: usize, ranks: usize) -> Vec<usize> {
    (0..ranks).map(|r| share(len, ranks, r).len()).collect()
}

impl DataParallel {
    /// The groups of this rank. Collective over `world`.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn new(world: &dyn Communicator, layout: &Layout) -> Result<Self> {
        let groups = layout
            .groups()
            .iter()
            .map(|ranks| world.subgroup(ranks, "replicas"))
            .collect::<Result<_>>()?;
        let regions = layout.regions().to_vec();
        let buckets = (0..layout.buckets().len())
            .map(|b| {
                let start = regions.partition_point(|r| r.bucket < b);
                start..regions.partition_point(|r| r.bucket <= b)
            })
            .collect();
        Ok(Self {
            groups,
            regions,
            buckets,
        })
    }

    /// Number of regions.
    pub(crate) fn num_regions(&self) -> usize {
        self.regions.len()
    }

    /// A region.
    pub(crate) fn region(&self, region: usize) -> &Region {
        &self.regions[region]
    }

    /// Whether no other rank holds a region.
    pub(crate) fn is_alone(&self, region: usize) -> bool {
        self.group(region).world_size() == 1
    }

    /// What this rank owns of a region, as a range of its bucket.
    pub(crate) fn own(&self, region: usize) -> Range<usize> {
        let (group, range) = (self.group(region), &self.regions[region].range);
        let own = share(range.len(), group.world_size(), group.rank());
        range.start + own.start..range.start + own.end
    }

    /// Starts to send every owner's values to the region's replicas; `share` lends the memory in which a region's
    /// leave. Each bucket settles when it is needed: the forward of the first layers does not wait for the last.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn gather(
        &self,
        values: &mut Buffers,
        committed: Option<u64>,
        mut share: impl FnMut(usize) -> Buffer,
    ) -> Result<()> {
        for (bucket, regions) in self.buckets.iter().enumerate() {
            let mut parts = Vec::with_capacity(regions.len());
            for region in regions.clone().filter(|&r| !self.is_alone(r)) {
                let mut own = share(region);
                own.copy_from_slice(&values.bucket(bucket)[self.own(region)]);
                let (group, counts) = (self.group(region), self.counts(region));
                let work = group.all_gather_shared(Shared::new(Arc::new(own)), &counts)?;
                parts.push((self.regions[region].range.clone(), work));
            }
            if !parts.is_empty() {
                values.receive(bucket, parts, committed);
            }
        }
        Ok(())
    }

    fn group(&self, region: usize) -> &dyn Communicator {
        &*self.groups[self.regions[region].group]
    }

    fn counts(&self, region: usize) -> Vec<usize> {
        let ranks = self.group(region).world_size();
        share_counts(self.regions[region].range.len(), ranks)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::mpsc::{Receiver, Sender, channel},
        sync::{Mutex, atomic::AtomicUsize, atomic::Ordering},
        time::Duration,
    };

    use drivetrain_conformance::{fixture::model, suite::Subject};
    use drivetrain_core::{
        communicator::{Intercept, Intercepted},
        engine::Backend,
        launch::run_ranks,
    };
    use drivetrain_kernels::{Cpu, Processor};

    use super::*;
    use crate::{Megatron, model::Model, workspace::Workspace};

    #[test]
    fn shares_cover_even_what_does_not_divide() {
        assert_eq!(share_counts(97, 4), [24, 24, 24, 25]);
        assert_eq!(share_counts(1, 3), [0, 0, 1]);
        assert_eq!(share_counts(0, 2), [0, 0]);
    }

    /// Lets one all-gather through, and the next only when told to.
    #[derive(Debug)]
    struct Hold {
        started: AtomicUsize,
        go: Option<Mutex<Receiver<()>>>,
    }

    impl Intercept for Hold {
        fn before(&self, _: &dyn Communicator, operation: &'static str, _: usize) -> Result<()> {
            let first =
                operation != "all_gather" || self.started.fetch_add(1, Ordering::SeqCst) != 1;
            if let (false, Some(go)) = (first, &self.go) {
                let told = go.lock().unwrap().recv_timeout(Duration::from_secs(20));
                told.expect("rank 0 uses the first bucket before rank 1 sends the second");
            }
            Ok(())
        }
    }

    /// The forward of the first layers does not wait for the weights of the last.
    #[test]
    fn a_bucket_is_there_before_the_next_is_sent() {
        let mut job = Subject::new(Megatron).job(&model("dense"));
        job.config.parallel.data_parallel_size = 2;
        let plan = Megatron.plan(&job).unwrap();
        let (tell, go): (Sender<()>, _) = channel();
        let go = Mutex::new(Some(go));
        run_ranks(2, Duration::from_secs(30), |world| {
            let rank = world.rank();
            let held = go.lock().unwrap().take_if(|_| rank == 1);
            let hold = Hold {
                started: AtomicUsize::new(0),
                go: held.map(Mutex::new),
            };
            let world: Arc<dyn Communicator> = Arc::new(Intercepted::new(world, Arc::new(hold)));
            let layout = Model::new(&plan, rank)?.layout;
            let data = DataParallel::new(&*world, &layout)?;
            let processor = Processor::from(Cpu::new(1));
            let pool = Workspace::new(processor.clone());
            let mut values = Buffers::zeros(&layout, &processor);
            for region in 0..data.num_regions() {
                let bucket = data.region(region).bucket;
                values.bucket_mut(bucket)[data.own(region)].fill(rank as f32 + 1.0);
            }
            let share = |region| pool.take(data.own(region).len());
            data.gather(&mut values, Some(1), share)?;
            values.settle(0)?;
            if rank == 0 {
                tell.send(()).unwrap();
            }
            values.settle_all()?;
            for region in 0..data.num_regions() {
                let Region { bucket, range, .. } = data.region(region);
                let own = share_counts(range.len(), 2);
                let found = &values.bucket(*bucket)[range.clone()];
                assert!(found[..own[0]].iter().all(|&v| v == 1.0));
                assert!(found[own[0]..].iter().all(|&v| v == 2.0));
            }
            Ok(())
        })
        .unwrap();
    }
}
