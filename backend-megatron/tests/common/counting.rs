//! Counts what the process allocates: a global allocator for the tests that include it.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    backtrace::Backtrace,
    cell::Cell,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
};

use drivetrain_core::Result;

/// Allocations of this many bytes count.
const LARGE: usize = 64 << 10;

/// Bytes that the process holds, and the most it has held since a count began.
static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);
static COUNTING: AtomicBool = AtomicBool::new(false);
/// Large allocations of the count, and who made them.
static MADE: Mutex<Vec<(usize, Backtrace)>> = Mutex::new(Vec::new());

thread_local! {
    /// Whether this thread is taking down an allocation, which allocates.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

fn grow(bytes: usize) {
    let now = HELD.fetch_add(bytes, SeqCst) + bytes;
    MOST.fetch_max(now, SeqCst);
    if bytes >= LARGE && COUNTING.load(SeqCst) && !BUSY.replace(true) {
        let made = (bytes, Backtrace::force_capture());
        MADE.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(made);
        BUSY.set(false);
    }
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

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), SeqCst);
        // SAFETY: as in `alloc`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // A copy is held beside the old memory for a while.
        grow(size);
        HELD.fetch_sub(layout.size(), SeqCst);
        // SAFETY: as in `alloc`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// What a count found.
pub(crate) struct Count {
    /// Most bytes held beyond what was held before.
    pub(crate) peak: usize,
    /// Large allocations, and who made them.
    pub(crate) made: Vec<(usize, String)>,
}

impl Count {
    /// Begins to count; what is held now, for [`Self::end`].
    pub(crate) fn start() -> usize {
        MADE.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let held = HELD.load(SeqCst);
        MOST.store(held, SeqCst);
        COUNTING.store(true, SeqCst);
        held
    }

    /// What was found since.
    pub(crate) fn end(held_before: usize) -> Self {
        COUNTING.store(false, SeqCst);
        let peak = MOST.load(SeqCst) - held_before;
        let made = std::mem::take(&mut *MADE.lock().unwrap_or_else(PoisonError::into_inner));
        let made = made
            .into_iter()
            .map(|(n, at)| (n, at.to_string()))
            .collect();
        Self { peak, made }
    }

    /// What a piece of work on one thread allocates.
    pub(crate) fn of<T>(work: impl FnOnce() -> Result<T>) -> Result<(Self, T)> {
        let before = Self::start();
        let done = work()?;
        Ok((Self::end(before), done))
    }

    /// Bytes of the largest.
    pub(crate) fn largest(&self) -> usize {
        self.made.iter().map(|(n, _)| *n).max().unwrap_or(0)
    }
}

/// Counts are of the whole process: one test at a time.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
