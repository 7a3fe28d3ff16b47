//! A device whose memory the host addresses too: the ops of [`crate::ops`] run on it with slices.
//!
//! What an engine keeps lies in [`UnifiedBuffer`]s: one address for both sides (CUDA's managed memory; on a GPU
//! pages move to whoever touches them). An op takes a slice of it by its address. Any other slice (token ids,
//! positions, small vectors of the host) is copied to the device for the op, and back if the op writes it.
//!
//! An op has ended when its function returns: each waits for the stream. So nothing is written behind the back of
//! a `&mut [f32]`, and the host may read any result at once. The price is that the host's work (starting the next
//! kernel, a few microseconds of each op) is not hidden behind the device's, and that pages which the host writes
//! between two kernels move over the bus. Correct first; leaving out the waits is for whoever can measure it.
//!
//! The first fault of the device stays: ops after it do nothing, so that a rank goes on to talk to the others, and
//! [`Unified::check`] says it where the engine asks.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::buffer::Element;
use super::call::Call;
use super::{CudaError, Device};

/// A handle on a device, its stream and its unified memory. Clones share all three.
#[derive(Debug, Clone)]
pub struct Unified(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    device: Device,
    /// Bytes of each buffer, by its address.
    buffers: Mutex<BTreeMap<u64, u64>>,
    failed: Mutex<Option<CudaError>>,
}

impl Unified {
    /// Over a device.
    pub fn new(device: Device) -> Self {
        Self(Arc::new(Shared {
            device,
            buffers: Mutex::default(),
            failed: Mutex::default(),
        }))
    }

    /// The first fault of the device. Since it, ops have done nothing.
    ///
    /// # Errors
    /// That fault.
    pub fn check(&self) -> Result<(), CudaError> {
        lock(&self.0.failed).clone().map_or(Ok(()), Err)
    }

    /// `len` elements of unspecified values. Where there is no room for them, that is the device's fault, and they
    /// lie in memory of the host.
    pub fn buffer<T: Element + Default>(&self, len: usize) -> UnifiedBuffer<T> {
        let outside = |elements| UnifiedBuffer {
            unified: self.clone(),
            elements,
        };
        if len == 0 {
            return outside(Elements::Host(Vec::new()));
        }
        let address = match self.0.device.allocate_unified::<T>(len) {
            Ok(address) => address,
            Err(error) => {
                self.fail(error);
                return outside(Elements::Host(vec![T::default(); len]));
            }
        };
        let Some(start) = NonNull::new(address as *mut T) else {
            unreachable!("memory that was allocated lies somewhere")
        };
        lock(&self.0.buffers).insert(address, (len * size_of::<T>()) as u64);
        outside(Elements::Unified { start, len })
    }

    /// Runs an op: nothing, if one has failed before. Returns when the device is done.
    pub(crate) fn run<'s>(&self, op: impl FnOnce(&mut Call<'_, 's>) -> Result<(), CudaError>) {
        if lock(&self.0.failed).is_some() {
            return;
        }
        let mut call = Call::new(self);
        let outcome = op(&mut call).and_then(|()| call.finish());
        // Nothing that the op has started may outlive the borrow of its slices.
        let ended = self.0.device.synchronize();
        if let Err(error) = outcome.and(ended) {
            self.fail(error);
        }
    }

    pub(super) fn device(&self) -> &Device {
        &self.0.device
    }

    /// Whether these bytes lie in one buffer of this memory.
    pub(super) fn holds(&self, start: u64, bytes: usize) -> bool {
        let buffers = lock(&self.0.buffers);
        let before = buffers.range(..=start).next_back();
        before.is_some_and(|(&buffer, &size)| start + bytes as u64 <= buffer + size)
    }

    fn fail(&self, error: CudaError) {
        lock(&self.0.failed).get_or_insert(error);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A map and an error: a panic elsewhere cannot have left them half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Elements that a device and the host address alike, given back when dropped.
pub struct UnifiedBuffer<T: Element + Default> {
    unified: Unified,
    elements: Elements<T>,
}

enum Elements<T> {
    Unified {
        start: NonNull<T>,
        len: usize,
    },
    /// None, or those that the device has no room for.
    Host(Vec<T>),
}

// SAFETY: it owns its elements, as a Vec does; elements are plain numbers, and device and maps are behind locks.
unsafe impl<T: Element + Default> Send for UnifiedBuffer<T> {}
// SAFETY: as above; `&UnifiedBuffer` only reads.
unsafe impl<T: Element + Default> Sync for UnifiedBuffer<T> {}

impl<T: Element + Default> Deref for UnifiedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.elements {
            // SAFETY: `len` elements lie there that have some value, and no kernel outlives its op.
            Elements::Unified { start, len } => unsafe {
                std::slice::from_raw_parts(start.as_ptr(), *len)
            },
            Elements::Host(elements) => elements,
        }
    }
}

impl<T: Element + Default> DerefMut for UnifiedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.elements {
            // SAFETY: as above; `&mut self` is exclusive.
            Elements::Unified { start, len } => unsafe {
                std::slice::from_raw_parts_mut(start.as_ptr(), *len)
            },
            Elements::Host(elements) => elements,
        }
    }
}

impl<T: Element + Default> Clone for UnifiedBuffer<T> {
    fn clone(&self) -> Self {
        let mut copy = self.unified.buffer(self.len());
        copy.copy_from_slice(self);
        copy
    }
}

impl<T: Element + Default> Drop for UnifiedBuffer<T> {
    fn drop(&mut self) {
        if let Elements::Unified { start, .. } = &self.elements {
            let address = start.as_ptr() as u64;
            lock(&self.unified.0.buffers).remove(&address);
            // SAFETY: allocated by this device; nobody borrows the buffer any more, and no kernel outlives its op.
            unsafe { self.unified.0.device.free_unified(address) };
        }
    }
}

impl<T: Element + Default> fmt::Debug for UnifiedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("UnifiedBuffer");
        debug.field("len", &self.len()).finish()
    }
}
