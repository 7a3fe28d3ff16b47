//! Buffers for activations and scratch, reused between micro-batches and steps.
//!
//! A [`Buffer`] goes back to its workspace when it is dropped, so a saved activation lives exactly as long as
//! the struct that holds it, and a step of the same shapes as the one before allocates nothing.
//!
//! Sizes are rounded up to the next of eight between two powers of two, and a buffer serves requests of its size only:
//! what a step has asked for is then there when the next one asks for the same, in whatever order, and micro-batches
//! of nearly the same length share buffers. A larger one where there is none of the size would be missed later.

use std::{
    collections::BTreeMap,
    fmt,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytemuck::Pod;
use drivetrain_core::{
    View,
    communicator::{Input, Shared, SharedBuffer},
};
use drivetrain_kernels::{Memory, Processor};

/// Free buffers of one rank, and a count of those in use.
#[derive(Debug, Clone)]
pub(crate) struct Workspace {
    processor: Processor,
    pool: Arc<Mutex<Pool>>,
}

#[derive(Default)]
struct Pool {
    /// By size in elements; of each size the one unused for longest first.
    free: BTreeMap<usize, Vec<Idle>>,
    /// Buffers given back so far.
    given: u64,
    /// How many had been when the last pass began, and this one.
    passes: [u64; 2],
    free_elements: usize,
    used_elements: usize,
    /// Of those that other ranks may still read: they are back soon, but when is not this rank's to say.
    shared_elements: usize,
    sizes: BTreeMap<usize, Size>,
    peak_elements: usize,
    saved_elements: usize,
}

/// Buffers of one size.
#[derive(Default)]
struct Size {
    /// All of them.
    total: usize,
    /// On loan, but for those that are shared.
    used: usize,
    /// Most of these at once, in the last pass and in this one.
    most_used: [usize; 2],
    /// Whether any was ever shared.
    shared: bool,
}

/// How many shared buffers of a size may be away when this rank is done with them: one for each group that it goes
/// through, since a group's next operation begins when all are done with the one before. Rows of experts go through two.
const AWAY: usize = 2;

struct Idle {
    data: Memory,
    /// How many had been given back when it was.
    since: u64,
}

/// `len` elements on loan; their values are whatever was there before.
pub(crate) struct Buffer {
    /// Empty where there are no elements, and where it has left: such is none of the pool's.
    data: Memory,
    len: usize,
    pool: Workspace,
    shared: bool,
}

impl Workspace {
    /// Of a processor's memory.
    pub(crate) fn new(processor: Processor) -> Self {
        Self {
            processor,
            pool: Arc::default(),
        }
    }

    /// A buffer whose values are unspecified: write before reading.
    pub(crate) fn take(&self, len: usize) -> Buffer {
        let size = size_of_request(len);
        if size == 0 {
            return self.buffer(Memory::default(), 0);
        }
        let (reused, spares) = self.lock().take(size);
        self.add_spares(size, spares);
        let data = reused.unwrap_or_else(|| self.processor.memory(size));
        #[allow(unused_mut)] // but in tests
        let mut buffer = self.buffer(data, len);
        // Whoever reads what nobody wrote shows in tests.
        #[cfg(test)]
        buffer.data.fill(f32::NAN);
        buffer
    }

    fn buffer(&self, data: Memory, len: usize) -> Buffer {
        Buffer {
            data,
            len,
            pool: self.clone(),
            shared: false,
        }
    }

    /// Numbers of another type, of unspecified values: write before reading.
    pub(crate) fn take_of<T: Pod>(&self, len: usize) -> Lent<T> {
        let elements = (len * size_of::<T>()).div_ceil(size_of::<f32>());
        let mut buffer = self.take(elements);
        // Allocators give more alignment than is asked for; where one should not, the memory is the host's own.
        let fits = bytemuck::try_cast_slice_mut::<f32, T>(&mut buffer).is_ok();
        let place = match fits {
            true => Place::Pool(buffer),
            false => Place::Host(vec![T::zeroed(); len]),
        };
        Lent { place, len }
    }

    /// A buffer of zeros.
    pub(crate) fn zeros(&self, len: usize) -> Buffer {
        let mut buffer = self.take(len);
        buffer.fill(0.0);
        buffer
    }

    /// A copy.
    pub(crate) fn copy(&self, source: &[f32]) -> Buffer {
        let mut buffer = self.take(source.len());
        buffer.copy_from_slice(source);
        buffer
    }

    /// A buffer that came from elsewhere: it goes back to this workspace.
    pub(crate) fn adopt(&self, mut data: Vec<f32>) -> Buffer {
        let len = data.len();
        if len == 0 {
            return self.take(0);
        }
        // Out of another rank's workspace it has the room.
        data.resize(size_of_request(len), 0.0);
        let data = self.processor.adopt(data);
        let mut pool = self.lock();
        pool.sizes.entry(data.len()).or_default().total += 1;
        pool.lend(data.len());
        drop(pool);
        self.buffer(data, len)
    }

    /// Begins a pass over micro-batches: what it and the one before it have used is likely to be asked for again.
    pub(crate) fn begin_pass(&self) {
        let mut pool = self.lock();
        pool.passes = [pool.passes[1], pool.given];
        pool.sizes.retain(|_, size| size.total > 0);
        for size in pool.sizes.values_mut() {
            size.most_used = [size.most_used[1], size.used];
        }
    }

    fn add_spares(&self, size: usize, spares: usize) {
        for _ in 0..spares {
            let spare = self.processor.memory(size);
            let mut pool = self.lock();
            pool.sizes.entry(size).or_default().total += 1;
            pool.add_free(spare);
        }
    }

    /// Most bytes on loan at once.
    pub(crate) fn peak_bytes(&self) -> u64 {
        (self.lock().peak_elements * size_of::<f32>()) as u64
    }

    /// Elements on loan, but for those that other ranks may still read.
    pub(crate) fn loaned(&self) -> usize {
        self.lock().kept_elements()
    }

    /// Notes what layers that have made `output` keep on loan beside it, `before` having been on loan before them.
    pub(crate) fn note_saved(&self, before: usize, output: &Buffer) {
        let mut pool = self.lock();
        let saved = pool.kept_elements() - before - output.data.len();
        pool.saved_elements = pool.saved_elements.max(saved);
    }

    /// Most bytes so noted.
    pub(crate) fn saved_bytes(&self) -> u64 {
        (self.lock().saved_elements * size_of::<f32>()) as u64
    }

    fn lock(&self) -> MutexGuard<'_, Pool> {
        // The pool holds plain memory: a panic elsewhere cannot have left it inconsistent.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Elements of the buffer for `len`: at most an eighth more.
fn size_of_request(len: usize) -> usize {
    match len {
        0..16 => len,
        _ => len.next_multiple_of(1 << (len.ilog2() - 3)),
    }
}

impl Pool {
    /// A free buffer of this size, and how many spares to allocate; `None` asks the caller to allocate it too, after
    /// making room for it.
    fn take(&mut self, size: usize) -> (Option<Memory>, usize) {
        let found = self.free.get_mut(&size).and_then(Vec::pop);
        if found.is_some() {
            self.free_elements -= size;
        }
        self.lend(size);
        if found.is_none() {
            self.sizes.entry(size).or_default().total += 1;
            self.trim();
        }
        (found.map(|idle| idle.data), self.spares(size))
    }

    fn lend(&mut self, size: usize) {
        self.used_elements += size;
        self.peak_elements = self.peak_elements.max(self.used_elements);
        let of_size = self.sizes.entry(size).or_default();
        of_size.used += 1;
        of_size.most_used[1] = of_size.most_used[1].max(of_size.used);
    }

    /// What is missing of a size for nobody to wait, nor to allocate, whenever the other ranks give back what they read:
    /// how soon they do is theirs, how much this rank uses at once is not.
    fn spares(&self, size: usize) -> usize {
        let of_size = self.sizes.get(&size).filter(|of_size| of_size.shared);
        of_size.map_or(0, |of_size| {
            let [last, this] = of_size.most_used;
            (last.max(this) + AWAY).saturating_sub(of_size.total)
        })
    }

    /// How many spares to allocate.
    fn share(&mut self, size: usize) -> usize {
        self.shared_elements += size;
        let of_size = self.sizes.entry(size).or_default();
        of_size.used -= 1;
        of_size.shared = true;
        self.spares(size)
    }

    fn kept_elements(&self) -> usize {
        self.used_elements - self.shared_elements
    }

    fn add_free(&mut self, data: Memory) {
        let (size, since) = (data.len(), self.given);
        self.free_elements += size;
        self.free
            .entry(size)
            .or_default()
            .push(Idle { data, since });
    }

    fn give(&mut self, data: Memory, shared: bool) {
        let size = data.len();
        self.used_elements -= size;
        match shared {
            true => self.shared_elements -= size,
            false => self.sizes.entry(size).or_default().used -= 1,
        }
        self.given += 1;
        self.add_free(data);
    }

    /// Ragged micro-batches ask for ever new sizes: keeps used and free buffers within 3/2 of the peak use, and lets go
    /// of those that nobody has asked for longest. What the last pass used stays up to twice that: the parts of a layer
    /// have sizes of their own, which together may be more than 3/2 of what is on loan at once where layers keep little.
    fn trim(&mut self) {
        let limit = self.peak_elements + self.peak_elements / 2;
        loop {
            let held = self.used_elements + self.free_elements;
            let idle = self.free.iter().filter(|(_, list)| !list.is_empty());
            let longest = idle.map(|(&size, list)| (list[0].since, size)).min();
            let Some((since, size)) = longest.filter(|_| held > limit) else {
                break;
            };
            if since > self.passes[0] && held <= 2 * limit {
                break;
            }
            if let Some(list) = self.free.get_mut(&size) {
                list.remove(0);
                self.free_elements -= size;
                self.sizes.entry(size).or_default().total -= 1;
            }
        }
        self.free.retain(|_, list| !list.is_empty());
    }
}

impl Buffer {
    /// For an operation to hold; it goes back to its workspace when no rank needs it any more. That may be a little
    /// after this rank is done, so of each size that is ever shared there are spares.
    pub(crate) fn share(mut self) -> Arc<Self> {
        self.mark_shared();
        Arc::new(self)
    }

    fn mark_shared(&mut self) {
        let size = self.data.len();
        if size == 0 {
            return;
        }
        self.shared = true;
        let spares = self.pool.lock().share(size);
        self.pool.add_spares(size, spares);
    }

    /// As an operation's input.
    pub(crate) fn give(self) -> Input<'static> {
        Input::Shared(Shared::new(self.share()))
    }

    /// The elements, which leave the workspace.
    pub(crate) fn into_vec(mut self) -> Vec<f32> {
        // Never one that is shared: that is not owned any more.
        let mut data = std::mem::take(&mut self.data).into_vec();
        if data.is_empty() {
            return data;
        }
        let mut pool = self.pool.lock();
        pool.used_elements -= data.len();
        let of_size = pool.sizes.entry(data.len()).or_default();
        of_size.used -= 1;
        of_size.total -= 1;
        drop(pool);
        data.truncate(self.len);
        data
    }
}

/// Numbers of another type than f32, on loan.
#[derive(Debug)]
pub(crate) struct Lent<T> {
    place: Place<T>,
    len: usize,
}

#[derive(Debug)]
enum Place<T> {
    Pool(Buffer),
    Host(Vec<T>),
}

impl<T: Pod> Deref for Lent<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.place {
            Place::Pool(buffer) => &bytemuck::cast_slice(buffer)[..self.len],
            Place::Host(values) => values,
        }
    }
}

impl Lent<f64> {
    /// As an operation's input.
    pub(crate) fn give(mut self) -> Input<'static> {
        if let Place::Pool(buffer) = &mut self.place {
            buffer.mark_shared();
        }
        Input::Shared(Shared::new(Arc::new(self)))
    }
}

impl SharedBuffer for Lent<f64> {
    fn as_view(&self) -> View<'_> {
        (&**self).into()
    }
}

impl<T: Pod> DerefMut for Lent<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.place {
            Place::Pool(buffer) => &mut bytemuck::cast_slice_mut(buffer)[..self.len],
            Place::Host(values) => values,
        }
    }
}

impl SharedBuffer for Buffer {
    fn as_view(&self) -> View<'_> {
        (&**self).into()
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.data[..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.data[..self.len]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let data = std::mem::take(&mut self.data);
        if !data.is_empty() {
            self.pool.lock().give(data, self.shared);
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish()
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("used_elements", &self.used_elements)
            .field("free_elements", &self.free_elements)
            .field("peak_elements", &self.peak_elements)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use drivetrain_kernels::Cpu;

    use super::*;

    #[test]
    fn a_dropped_buffer_is_used_again() {
        let workspace = Workspace::new(Cpu::new(1).into());
        let first = workspace.take(1000);
        let address = first.as_ptr();
        drop(first);
        let second = workspace.take(970);
        assert_eq!((second.as_ptr(), second.len()), (address, 970));
        assert_eq!(workspace.peak_bytes(), 4 * 1024);
        // Not for one that is much smaller.
        drop(second);
        assert_eq!(workspace.take(900).data.len(), 960);
    }

    #[test]
    fn numbers_of_other_types_lie_in_the_pool_too() {
        let workspace = Workspace::new(Processor::from(Cpu::new(1)));
        for len in [0, 1, 3, 1000] {
            let mut wide = workspace.take_of::<f64>(len);
            let mut ids = workspace.take_of::<u32>(len);
            wide.fill(1e300);
            ids.fill(7);
            assert_eq!((wide.len(), ids.len()), (len, len));
            assert!(wide.iter().all(|&v| v == 1e300) && ids.iter().all(|&v| v == 7));
            if len > 0 {
                assert!(matches!(wide.place, Place::Pool(_)));
            }
        }
        assert_eq!(workspace.loaned(), 0);
    }

    #[test]
    fn sizes_are_at_most_an_eighth_above_the_request() {
        assert_eq!(
            [0, 1, 15, 16, 17, 1 << 18].map(size_of_request),
            [0, 1, 15, 16, 18, 1 << 18]
        );
        for len in 1..5000 {
            let size = size_of_request(len);
            assert!(size >= len && 8 * (size - len) <= len, "{len}: {size}");
            assert_eq!(size_of_request(size), size);
        }
    }

    #[test]
    fn free_buffers_stay_within_the_peak() {
        let workspace = Workspace::new(Cpu::new(1).into());
        for len in (1..40).map(|n| n * 100) {
            workspace.begin_pass();
            drop(workspace.take(len));
        }
        let held = |workspace: &Workspace| {
            let pool = workspace.lock();
            let all: usize = pool.free.iter().map(|(size, l)| size * l.len()).sum();
            assert_eq!((pool.used_elements, pool.free_elements), (0, all));
            all
        };
        // What the last two passes used may be more than 3/2 of the peak, but no more than that is kept.
        let sizes = [3700, 3800, 3900].map(size_of_request);
        assert!(held(&workspace) <= sizes.iter().sum());
        // Two passes later it goes when another size is asked for.
        workspace.begin_pass();
        workspace.begin_pass();
        drop(workspace.take(50));
        assert!(2 * held(&workspace) <= 3 * size_of_request(3900));
        // The size that was asked for last before is still there.
        let before = held_free(&workspace);
        let last = workspace.take(3900);
        assert_eq!(before - held_free(&workspace), size_of_request(3900));
        drop(last);
    }

    #[test]
    fn what_the_last_pass_used_is_still_there() {
        let workspace = Workspace::new(Cpu::new(1).into());
        // In turn, so that three sizes are held where one is used; the first pass allocates.
        let pass = || {
            workspace.begin_pass();
            [1024, 896, 768].map(|len| workspace.take(len).as_ptr())
        };
        let first = pass();
        assert_eq!(pass(), first);
        assert_eq!(pass(), first);
        // But not any number of sizes.
        workspace.begin_pass();
        for len in (1..40).map(|n| n * 25) {
            drop(workspace.take(len));
        }
        assert!(held_free(&workspace) <= 3 * 1024);
    }

    /// However late the other ranks give back what they read, the second pass allocates nothing.
    #[test]
    fn a_late_reader_makes_nobody_allocate() {
        let workspace = Workspace::new(Cpu::new(1).into());
        let mut away = Vec::new();
        // What was shared before goes back when the next is, at the latest.
        let pass = |away: &mut Vec<Arc<Buffer>>, late: bool| {
            workspace.begin_pass();
            for _ in 0..3 {
                let kept = [(); 3].map(|()| workspace.take(512));
                let shared = workspace.take(512).share();
                away.clear();
                if late {
                    away.push(shared);
                }
                drop((workspace.take(512), kept));
            }
        };
        pass(&mut away, false);
        let total = |workspace: &Workspace| workspace.lock().sizes[&512].total;
        let held = total(&workspace);
        for late in [true, false, true, true] {
            pass(&mut away, late);
            assert_eq!(total(&workspace), held);
        }
        assert_eq!(held, 4 + AWAY);
    }

    /// An expert without tokens, rows of which a rank has none: no size of zero grows with them.
    #[test]
    fn what_is_empty_is_none_of_the_pools() {
        let workspace = Workspace::new(Cpu::new(1).into());
        for _ in 0..3 {
            workspace.begin_pass();
            assert!(workspace.take(0).into_vec().is_empty());
            assert_eq!(workspace.take(100).into_vec().len(), 100);
            drop(workspace.take(0).share());
            drop(workspace.take_of::<f64>(0).give());
            drop(workspace.adopt(Vec::new()));
        }
        let pool = workspace.lock();
        assert!(pool.free.is_empty() && pool.sizes.values().all(|size| size.total == 0));
        assert_eq!((pool.used_elements, pool.shared_elements), (0, 0));
    }

    fn held_free(workspace: &Workspace) -> usize {
        workspace.lock().free_elements
    }
}
