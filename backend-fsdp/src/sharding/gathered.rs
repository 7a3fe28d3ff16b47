//! A unit made whole for a while.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use drivetrain_core::Result;
use tch::Tensor;

use super::UnitLayout;
use crate::{
    error::{Torch, torch},
    shim,
};

/// How many gathered units a rank holds, and the most it held at once. A unit counts from the start of its gather.
#[derive(Debug, Default)]
pub(crate) struct Residents {
    units: AtomicUsize,
    bytes: AtomicU64,
    peak_units: AtomicUsize,
    peak_bytes: AtomicU64,
    #[cfg(test)]
    events: std::sync::Mutex<Vec<(Event, usize)>>,
}

/// What a rank does to a unit, for tests of the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// Its all-gather starts.
    Gather,
    /// It was waited for.
    Gathered,
    /// It was computed.
    Forward,
    /// It was computed backward.
    Backward,
    /// Its reduction starts.
    Reduce,
    /// It was waited for.
    Reduced,
}

impl Residents {
    /// Notes what has happened to a unit.
    #[cfg_attr(not(test), allow(clippy::unused_self))]
    pub(crate) fn note(&self, event: Event, unit: usize) {
        #[cfg(test)]
        self.events.lock().unwrap().push((event, unit));
        #[cfg(not(test))]
        let _ = (event, unit);
    }
}

#[cfg(test)]
impl Residents {
    /// What happened, in its order.
    pub(crate) fn events(&self) -> Vec<(Event, usize)> {
        self.events.lock().unwrap().clone()
    }

    /// Units gathered now.
    pub(crate) fn units(&self) -> usize {
        self.units.load(Ordering::Relaxed)
    }

    /// The most units gathered at once.
    pub(crate) fn peak_units(&self) -> usize {
        self.peak_units.load(Ordering::Relaxed)
    }

    /// The most bytes gathered at once.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak_bytes.load(Ordering::Relaxed)
    }
}

/// Counts a unit as gathered for as long as it lives.
#[derive(Debug)]
pub(super) struct Resident {
    residents: Arc<Residents>,
    bytes: u64,
}

impl Resident {
    pub(super) fn new(residents: &Arc<Residents>, bytes: usize) -> Self {
        let bytes = bytes as u64;
        let units = residents.units.fetch_add(1, Ordering::Relaxed) + 1;
        let held = residents.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        residents.peak_units.fetch_max(units, Ordering::Relaxed);
        residents.peak_bytes.fetch_max(held, Ordering::Relaxed);
        Self {
            residents: residents.clone(),
            bytes,
        }
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        self.residents.units.fetch_sub(1, Ordering::Relaxed);
        self.residents
            .bytes
            .fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A unit's whole parameters, leaves of an autograd graph that may outlive their memory: [`Self::free`] empties
/// the storage they share, and filling it again makes the graph valid for backward.
#[derive(Debug)]
pub(crate) struct Gathered {
    pub(super) flat: Tensor,
    parameters: Vec<Tensor>,
    pub(super) memory: Memory,
    /// This rank's part of what was freed, where its group keeps that.
    pub(super) part: Option<Tensor>,
}

/// Whose memory a gathered unit lies in.
#[derive(Debug)]
pub(super) enum Memory {
    /// Its own.
    Own(#[expect(dead_code, reason = "counts for as long as it lives")] Resident),
    /// None.
    Freed,
    /// The shard's, which is the whole unit where there is one rank, and is never freed.
    Shard,
}

impl Gathered {
    /// Whole parameters.
    pub(super) fn new(flat: Tensor, layout: &UnitLayout, memory: Memory) -> Torch<Self> {
        Ok(Self {
            parameters: leaves(&flat, layout)?,
            flat,
            memory,
            part: None,
        })
    }

    /// The parameters, in the layout's order and with their shapes.
    pub(crate) fn parameters(&self) -> &[Tensor] {
        &self.parameters
    }

    /// Gives the memory back; the graph keeps naming it.
    pub(super) fn free(&mut self) -> Result<()> {
        if matches!(self.memory, Memory::Own(_)) {
            shim::resize_storage(&self.flat, 0).map_err(torch("free_unit"))?;
            self.memory = Memory::Freed;
        }
        Ok(())
    }

    /// Takes memory again, to be filled.
    pub(super) fn allocate(&mut self, resident: Resident) -> Torch<()> {
        shim::resize_storage(&self.flat, resident.bytes as usize)?;
        self.memory = Memory::Own(resident);
        Ok(())
    }
}

fn leaves(flat: &Tensor, layout: &UnitLayout) -> Torch<Vec<Tensor>> {
    layout
        .specs()
        .iter()
        .enumerate()
        .map(|(parameter, spec)| {
            let range = layout.full(parameter);
            let shape: Vec<i64> = spec.shape.iter().map(|&n| n as i64).collect();
            flat.f_narrow(0, range.start as i64, range.len() as i64)?
                .f_view(shape.as_slice())?
                .f_detach()?
                .f_set_requires_grad(true)
        })
        .collect()
}
