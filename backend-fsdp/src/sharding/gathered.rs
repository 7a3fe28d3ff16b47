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

/// How many gathered units a rank holds, and the most it held at once.
#[derive(Debug, Default)]
pub(crate) struct Residents {
    units: AtomicUsize,
    bytes: AtomicU64,
    peak_units: AtomicUsize,
    peak_bytes: AtomicU64,
}

impl Residents {
    /// Units gathered now.
    #[cfg(test)]
    pub(crate) fn units(&self) -> usize {
        self.units.load(Ordering::Relaxed)
    }

    /// The most units gathered at once.
    #[cfg(test)]
    pub(crate) fn peak_units(&self) -> usize {
        self.peak_units.load(Ordering::Relaxed)
    }

    /// The most bytes gathered at once.
    #[cfg(test)]
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak_bytes.load(Ordering::Relaxed)
    }

    fn enter(&self, bytes: u64) {
        let units = self.units.fetch_add(1, Ordering::Relaxed) + 1;
        let bytes = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak_units.fetch_max(units, Ordering::Relaxed);
        self.peak_bytes.fetch_max(bytes, Ordering::Relaxed);
    }

    fn leave(&self, bytes: u64) {
        self.units.fetch_sub(1, Ordering::Relaxed);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// A unit's whole parameters, leaves of an autograd graph that may outlive their memory: [`Self::free`] empties
/// the storage they share, and filling it again makes the graph valid for backward.
#[derive(Debug)]
pub(crate) struct Gathered {
    pub(super) flat: Tensor,
    parameters: Vec<Tensor>,
    bytes: u64,
    live: bool,
    /// `None` where the memory is the shard's own (one rank), which is never freed.
    residents: Option<Arc<Residents>>,
}

impl Gathered {
    /// Whole parameters in memory of their own.
    pub(super) fn owned(
        flat: Tensor,
        layout: &UnitLayout,
        residents: &Arc<Residents>,
    ) -> Torch<Self> {
        let bytes = (layout.full_len() * size_of::<f32>()) as u64;
        residents.enter(bytes);
        Ok(Self {
            parameters: leaves(&flat, layout)?,
            flat,
            bytes,
            live: true,
            residents: Some(residents.clone()),
        })
    }

    /// The shard itself, which is the whole unit where there is one rank.
    pub(super) fn alias(shard: &Tensor, layout: &UnitLayout) -> Torch<Self> {
        Ok(Self {
            parameters: leaves(shard, layout)?,
            flat: shard.shallow_clone(),
            bytes: 0,
            live: true,
            residents: None,
        })
    }

    /// The parameters, in the layout's order and with their shapes.
    pub(crate) fn parameters(&self) -> &[Tensor] {
        &self.parameters
    }

    /// Gives the memory back; the graph keeps naming it.
    pub(crate) fn free(&mut self) -> Result<()> {
        if let (Some(residents), true) = (&self.residents, self.live) {
            shim::resize_storage(&self.flat, 0).map_err(torch("free_unit"))?;
            residents.leave(self.bytes);
            self.live = false;
        }
        Ok(())
    }

    /// Takes memory again, unfilled. Returns whether it has to be filled.
    pub(super) fn allocate(&mut self) -> Torch<bool> {
        match &self.residents {
            Some(residents) if !self.live => {
                shim::resize_storage(&self.flat, self.bytes as usize)?;
                residents.enter(self.bytes);
                self.live = true;
                Ok(true)
            }
            _ => Ok(false),
        }
    }
}

impl Drop for Gathered {
    fn drop(&mut self) {
        if let (Some(residents), true) = (&self.residents, self.live) {
            residents.leave(self.bytes);
        }
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
