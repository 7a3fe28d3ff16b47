//! Buffers for activations and scratch, reused between micro-batches and steps.
//!
//! A [`Buffer`] goes back to its workspace when it is dropped, so a saved activation lives exactly as long as
//! the struct that holds it, and a step of the same shapes as the one before allocates nothing.

use std::{
    collections::BTreeMap,
    fmt,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Free buffers of one rank, and a count of those in use.
#[derive(Debug, Clone, Default)]
pub(crate) struct Workspace(Arc<Mutex<Pool>>);

#[derive(Default)]
struct Pool {
    /// By capacity in elements.
    free: BTreeMap<usize, Vec<Vec<f32>>>,
    free_elements: usize,
    used_elements: usize,
    peak_elements: usize,
}

/// `len` elements on loan; their values are whatever was there before.
pub(crate) struct Buffer {
    data: Vec<f32>,
    len: usize,
    pool: Workspace,
}

impl Workspace {
    /// A buffer whose values are unspecified: write before reading.
    pub(crate) fn take(&self, len: usize) -> Buffer {
        let reused = self.lock().take(len);
        Buffer {
            data: reused.unwrap_or_else(|| vec![0.0; len]),
            len,
            pool: self.clone(),
        }
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
    pub(crate) fn adopt(&self, data: Vec<f32>) -> Buffer {
        let mut pool = self.lock();
        pool.used_elements += data.len();
        pool.peak_elements = pool.peak_elements.max(pool.used_elements);
        drop(pool);
        Buffer {
            len: data.len(),
            data,
            pool: self.clone(),
        }
    }

    /// Most bytes on loan at once.
    pub(crate) fn peak_bytes(&self) -> u64 {
        (self.lock().peak_elements * size_of::<f32>()) as u64
    }

    fn lock(&self) -> MutexGuard<'_, Pool> {
        // The pool holds plain memory: a panic elsewhere cannot have left it inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pool {
    /// The best fit among the free buffers; `None` asks the caller to allocate, after making room for it.
    fn take(&mut self, len: usize) -> Option<Vec<f32>> {
        let fit = self
            .free
            .range(len..=len + len / 2)
            .next()
            .map(|(&capacity, _)| capacity);
        let found = fit.and_then(|capacity| self.remove(capacity));
        self.used_elements += found.as_ref().map_or(len, Vec::len);
        self.peak_elements = self.peak_elements.max(self.used_elements);
        if found.is_none() {
            self.trim();
        }
        found
    }

    fn remove(&mut self, capacity: usize) -> Option<Vec<f32>> {
        let list = self.free.get_mut(&capacity)?;
        let data = list.pop()?;
        if list.is_empty() {
            self.free.remove(&capacity);
        }
        self.free_elements -= capacity;
        Some(data)
    }

    fn give(&mut self, data: Vec<f32>) {
        self.used_elements -= data.len();
        self.free_elements += data.len();
        self.free.entry(data.len()).or_default().push(data);
    }

    /// Ragged micro-batches ask for ever new sizes: keeps used and free buffers within 5/4 of the peak use.
    fn trim(&mut self) {
        let limit = self.peak_elements + self.peak_elements / 4;
        while self.used_elements + self.free_elements > limit {
            let Some(largest) = self.free.last_key_value().map(|(&capacity, _)| capacity) else {
                break;
            };
            self.remove(largest);
        }
    }
}

impl Buffer {
    /// The elements, which leave the workspace.
    pub(crate) fn into_vec(mut self) -> Vec<f32> {
        let mut data = std::mem::take(&mut self.data);
        self.pool.lock().used_elements -= data.len();
        data.truncate(self.len);
        data
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
        self.pool.lock().give(data);
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
    use super::*;

    #[test]
    fn a_dropped_buffer_is_used_again() {
        let workspace = Workspace::default();
        let first = workspace.take(1000);
        let address = first.as_ptr();
        drop(first);
        let second = workspace.take(900);
        assert_eq!((second.as_ptr(), second.len()), (address, 900));
        assert_eq!(workspace.peak_bytes(), 4000);
    }

    #[test]
    fn free_buffers_stay_within_the_peak() {
        let workspace = Workspace::default();
        for len in (1..40).map(|n| n * 100) {
            drop(workspace.take(len));
        }
        let pool = workspace.lock();
        assert_eq!(pool.used_elements, 0);
        assert!(pool.free_elements <= pool.peak_elements + pool.peak_elements / 4);
    }
}
