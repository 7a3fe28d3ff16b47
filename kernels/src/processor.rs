//! Where ops run: this CPU, or a device whose memory both sides address.

use std::fmt;
use std::ops::{Deref, DerefMut};

use crate::Cpu;
use crate::cuda::{CudaError, Unified, UnifiedBuffer};

/// Where an op runs. Every op takes what becomes one: a [`Cpu`], a [`Unified`] by reference, a [`Processor`].
#[derive(Debug, Clone, Copy)]
pub enum On<'a> {
    /// On this CPU.
    Cpu(Cpu),
    /// On a device. Slices of its unified memory are taken by address, others are copied there and back.
    Device(&'a Unified),
}

/// Where a rank computes, and where its memory comes from.
#[derive(Debug, Clone)]
pub enum Processor {
    /// This CPU and its memory.
    Cpu(Cpu),
    /// A device and its unified memory.
    Device(Unified),
}

impl From<Cpu> for On<'_> {
    fn from(cpu: Cpu) -> Self {
        Self::Cpu(cpu)
    }
}

impl<'a> From<&'a Unified> for On<'a> {
    fn from(unified: &'a Unified) -> Self {
        Self::Device(unified)
    }
}

impl<'a> From<&'a Processor> for On<'a> {
    fn from(processor: &'a Processor) -> Self {
        processor.on()
    }
}

impl From<Cpu> for Processor {
    fn from(cpu: Cpu) -> Self {
        Self::Cpu(cpu)
    }
}

impl Processor {
    /// For ops.
    pub fn on(&self) -> On<'_> {
        match self {
            Self::Cpu(cpu) => On::Cpu(*cpu),
            Self::Device(unified) => On::Device(unified),
        }
    }

    /// `len` elements of unspecified values.
    pub fn memory(&self, len: usize) -> Memory {
        match self {
            Self::Cpu(_) => vec![0.0; len].into(),
            Self::Device(unified) => Memory(Place::Unified(unified.buffer(len))),
        }
    }

    /// `len` zeros.
    pub fn zeros(&self, len: usize) -> Memory {
        let mut zeros = self.memory(len);
        if let Self::Device(_) = self {
            zeros.fill(0.0);
        }
        zeros
    }

    /// What holds these elements here: on the CPU the vector itself, elsewhere a copy.
    pub fn adopt(&self, data: Vec<f32>) -> Memory {
        match self {
            Self::Cpu(_) => data.into(),
            Self::Device(_) => {
                let mut memory = self.memory(data.len());
                memory.copy_from_slice(&data);
                memory
            }
        }
    }

    /// The first fault of the device. Since it, ops have done nothing.
    ///
    /// # Errors
    /// That fault; a CPU has none.
    pub fn check(&self) -> Result<(), CudaError> {
        match self {
            Self::Cpu(_) => Ok(()),
            Self::Device(unified) => unified.check(),
        }
    }
}

/// Elements in the memory of a [`Processor`]: a slice to the host, reached without a copy by the ops there.
pub struct Memory(Place);

enum Place {
    Host(Vec<f32>),
    Unified(UnifiedBuffer<f32>),
}

impl Memory {
    /// The elements as a vector: the host's own, or a copy.
    pub fn into_vec(self) -> Vec<f32> {
        match self.0 {
            Place::Host(data) => data,
            Place::Unified(data) => data.to_vec(),
        }
    }
}

impl From<Vec<f32>> for Memory {
    fn from(data: Vec<f32>) -> Self {
        Self(Place::Host(data))
    }
}

/// Nothing.
impl Default for Memory {
    fn default() -> Self {
        Vec::new().into()
    }
}

impl Clone for Memory {
    fn clone(&self) -> Self {
        Self(match &self.0 {
            Place::Host(data) => Place::Host(data.clone()),
            Place::Unified(data) => Place::Unified(data.clone()),
        })
    }
}

impl PartialEq for Memory {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Deref for Memory {
    type Target = [f32];

    #[inline]
    fn deref(&self) -> &[f32] {
        match &self.0 {
            Place::Host(data) => data,
            Place::Unified(data) => data,
        }
    }
}

impl DerefMut for Memory {
    #[inline]
    fn deref_mut(&mut self) -> &mut [f32] {
        match &mut self.0 {
            Place::Host(data) => data,
            Place::Unified(data) => data,
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("len", &self.len()).finish()
    }
}
