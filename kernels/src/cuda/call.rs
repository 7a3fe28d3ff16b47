//! The slices of one op on their way to a device.

use super::buffer::{Element, Rows, RowsMut, View, ViewMut};
use super::{CudaError, Device, Unified};

/// One op: its slices of the host that had to be copied, and what is to be copied back.
pub(crate) struct Call<'u, 's> {
    unified: &'u Unified,
    /// Copies that the op reads.
    inputs: Vec<Box<dyn std::any::Any>>,
    /// Copies that it writes, back to where they came from.
    outputs: Vec<Box<dyn FnOnce() -> Result<(), CudaError> + 's>>,
}

impl<'u, 's> Call<'u, 's> {
    pub(super) fn new(unified: &'u Unified) -> Self {
        Self {
            unified,
            inputs: Vec::new(),
            outputs: Vec::new(),
        }
    }

    pub(crate) fn device(&self) -> &'u Device {
        self.unified.device()
    }

    /// What the op reads.
    pub(crate) fn input<T: Element>(&mut self, slice: &'s [T]) -> Result<View<'s, T>, CudaError> {
        if self.lies_there(slice) {
            return Ok(View::of(slice));
        }
        let copy = self.device().upload(slice)?;
        let view = View::at(copy.address(), slice.len());
        self.inputs.push(Box::new(copy));
        Ok(view)
    }

    /// What the op writes; it may also read it.
    pub(crate) fn output<T: Element>(
        &mut self,
        slice: &'s mut [T],
    ) -> Result<ViewMut<'s, T>, CudaError> {
        if self.lies_there(slice) {
            return Ok(ViewMut::of(slice));
        }
        let copy = self.device().upload(slice)?;
        let view = ViewMut::at(copy.address(), slice.len());
        self.outputs.push(Box::new(move || copy.read_into(slice)));
        Ok(view)
    }

    /// Rows that the op reads.
    pub(crate) fn rows(&mut self, rows: crate::Rows<'s>) -> Result<Rows<'s>, CudaError> {
        let shape = (rows.rows(), rows.width(), rows.stride());
        let data = self.input(rows.data())?;
        Ok(Rows::at(data.address(), shape))
    }

    /// Rows that the op writes; it may also read them. What lies between the rows stays as it is.
    pub(crate) fn rows_mut(&mut self, rows: crate::RowsMut<'s>) -> Result<RowsMut<'s>, CudaError> {
        let shape = (rows.rows(), rows.width(), rows.stride());
        let bytes = rows.extent() * size_of::<f32>();
        if bytes == 0 || self.unified.holds(rows.start() as u64, bytes) {
            return Ok(RowsMut::at(rows.start() as u64, shape));
        }
        let mut all = vec![0.0_f32; rows.extent()];
        let mut rows = rows;
        for row in 0..rows.rows() {
            all[row * rows.stride()..][..rows.width()].copy_from_slice(rows.row(row));
        }
        let copy = self.device().upload(&all)?;
        let view = RowsMut::at(copy.address(), shape);
        self.outputs.push(Box::new(move || {
            copy.read_into(&mut all)?;
            for row in 0..rows.rows() {
                let found = &all[row * rows.stride()..][..rows.width()];
                rows.row(row).copy_from_slice(found);
            }
            Ok(())
        }));
        Ok(view)
    }

    fn lies_there<T>(&self, slice: &[T]) -> bool {
        let bytes = std::mem::size_of_val(slice);
        bytes == 0 || self.unified.holds(slice.as_ptr() as u64, bytes)
    }

    /// Copies back what the op wrote, which waits for it.
    pub(super) fn finish(&mut self) -> Result<(), CudaError> {
        self.outputs.drain(..).try_for_each(|output| output())
    }
}
