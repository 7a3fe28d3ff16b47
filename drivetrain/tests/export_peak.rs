//! An export streams: whatever the engine, the ranks and the dtype, a rank holds at most two buckets and the largest
//! tensor beyond what it held before, and ranks that are threads the copy of a shard that their transport makes.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        Barrier,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use drivetrain::{
    conformance::{
        fixture::dense,
        suite::{Settings, Subject, Transport},
    },
    core::{
        DType, Result,
        config::MoeConfig,
        engine::{Engine, WeightInit, Weights},
        model::Family,
        weights::{DiscardingSink, SinkLayout, TensorSlice, WeightManifest, WeightSink},
    },
};

const BUCKET: usize = 64 << 10;
/// Names, shapes and slices of all tensors.
const BOOKKEEPING: usize = 32 << 10;

/// Bytes that the process holds, and the most it has held.
static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn grow(bytes: usize) {
    let now = HELD.fetch_add(bytes, SeqCst) + bytes;
    MOST.fetch_max(now, SeqCst);
}

fn shrink(bytes: usize) {
    HELD.fetch_sub(bytes, SeqCst);
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        shrink(layout.size());
        // SAFETY: as in `alloc`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        grow(size.saturating_sub(layout.size()));
        shrink(layout.size().saturating_sub(size));
        // SAFETY: as in `alloc`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Wants small buckets and keeps nothing but their sizes.
#[derive(Debug, Default)]
struct Small {
    buckets: usize,
    largest: usize,
    total: usize,
}

impl WeightSink for Small {
    fn layout(&self) -> SinkLayout {
        SinkLayout {
            bucket_bytes: BUCKET,
            ..SinkLayout::default()
        }
    }

    fn begin(&mut self, _: &WeightManifest) -> Result<()> {
        Ok(())
    }

    fn bucket(&mut self, tensors: &[TensorSlice<'_>]) -> Result<()> {
        let bytes: usize = tensors.iter().map(|t| t.data.num_bytes()).sum();
        assert!(
            bytes <= BUCKET || tensors.len() == 1,
            "{bytes} in a bucket of {}",
            tensors.len()
        );
        self.buckets += 1;
        self.largest = self.largest.max(bytes);
        self.total += bytes;
        Ok(())
    }

    fn commit(&mut self) -> Result<()> {
        Ok(())
    }

    fn abort(&mut self) {}
}

#[test]
fn the_extra_peak_is_two_buckets_and_the_largest_tensor() {
    let mut model = dense(Family::Llama, 8);
    model.vocab_size = 1 << 13;
    let parameters = model.parameters();
    let bytes = |dtype: DType| {
        let sizes = parameters.iter().map(|p| p.num_elements() * dtype.size());
        (sizes.clone().max().unwrap(), sizes.sum::<usize>())
    };
    // In the masters' dtype, which a tensor is gathered in.
    let (largest, all) = bytes(DType::F32);
    let most = 2 * BUCKET + largest + BOOKKEEPING;
    assert!(
        largest > 4 * BUCKET && 2 * all > 3 * most,
        "{largest} of {all}"
    );

    let engines = drivetrain::backends().into_iter().filter(|b| !b.is_exact());
    let mut runs = 0;
    for backend in engines {
        let subject = Subject {
            backend,
            settings: Settings::default(),
            moe: MoeConfig::default(),
            transport: Transport::default(),
        };
        for (ranks, dtype) in [
            (1, DType::F32),
            (2, DType::F32),
            (1, DType::Bf16),
            (2, DType::Bf16),
        ] {
            let mut job = subject.job(&model);
            job.config.parallel.data_parallel_size = ranks;
            job.config.precision.export = Some(dtype);
            let (barrier, shard) = (Barrier::new(ranks), largest / ranks * (ranks - 1));
            let most = ranks * (most + shard);
            let sent = subject.run(
                &job,
                || WeightInit::Seed(1),
                |rank| {
                    let mut sink = Small::default();
                    barrier.wait();
                    let before = HELD.load(SeqCst);
                    MOST.store(before, SeqCst);
                    barrier.wait();
                    match rank.data_index {
                        0 => rank.engine.export_weights(&Weights::Policy, &mut sink)?,
                        _ => rank
                            .engine
                            .export_weights(&Weights::Policy, &mut DiscardingSink)?,
                    }
                    barrier.wait();
                    Ok((MOST.load(SeqCst) - before, sink))
                },
            );
            let sent = sent.unwrap();
            let (name, (peak, sink)) = (subject.backend.name(), &sent[0]);
            println!("{name}, {ranks} ranks, {dtype}: {peak} of {most} bytes");
            assert!(*peak <= most, "{name}, {ranks} ranks, {dtype}: {peak}");
            assert_eq!((sink.largest, sink.total), bytes(dtype), "{name}");
            assert!(sink.buckets > 3, "{name}: {} buckets", sink.buckets);
            runs += 1;
        }
    }
    assert!(runs > 0, "a build without an engine tests nothing");
}
