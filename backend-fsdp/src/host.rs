//! Host slices of CPU tensors: how a tensor meets a communicator, a reader or a writer.

use drivetrain_core::{DType, View, ViewMut, communicator::SharedBuffer};
use half::bf16;
use tch::{Device, Kind, TchError, Tensor};

use crate::error::Torch;

/// The elements of a contiguous f32 tensor in host memory.
pub(crate) fn floats(tensor: &Tensor) -> Torch<&[f32]> {
    let memory = Memory::of(tensor)?.expect(DType::F32)?;
    // SAFETY: the tensor keeps the storage alive, and this crate resizes or writes a storage only where no such
    // slice is held (each rank's tensors are used by its own thread alone).
    Ok(unsafe { memory.slice() })
}

/// The elements of a contiguous f32 tensor in host memory, to be written. Moves no version counter.
pub(crate) fn floats_mut(tensor: &mut Tensor) -> Torch<&mut [f32]> {
    let memory = Memory::of(tensor)?.expect(DType::F32)?;
    // SAFETY: as in `floats`; and no other slice of this storage is held: the callers write buffers that they
    // made, or that they alone hold between two uses by libtorch.
    Ok(unsafe { memory.slice_mut() })
}

/// The bytes of a contiguous tensor in host memory, to be written. Moves no version counter.
pub(crate) fn bytes_mut(tensor: &mut Tensor) -> Torch<&mut [u8]> {
    let mut memory = Memory::of(tensor)?;
    memory.len *= memory.dtype.size();
    // SAFETY: as in `floats_mut`; every element is that many bytes, and any bytes are an f32 or a bf16.
    Ok(unsafe { memory.slice_mut() })
}

/// A tensor's elements for a communicator to write, for as long as it likes.
///
/// # Safety
/// The tensor's memory is neither freed, read nor written before the operation that gets the view has ended.
pub(crate) unsafe fn output(tensor: &mut Tensor) -> Torch<ViewMut<'static>> {
    let memory = Memory::of(tensor)?;
    // SAFETY: the caller's promise, and the dtype was looked at.
    Ok(unsafe {
        match memory.dtype {
            DType::Bf16 => ViewMut::Bf16(memory.slice_mut()),
            _ => ViewMut::F32(memory.slice_mut()),
        }
    })
}

/// A tensor in host memory that other ranks read for as long as they need.
#[derive(Debug)]
pub(crate) struct SharedTensor {
    memory: Memory,
    /// Keeps the memory.
    _tensor: Tensor,
}

impl SharedTensor {
    /// Shares a tensor.
    ///
    /// # Safety
    /// Its memory is not written while any rank may read it: until a later operation of the same ranks has ended that
    /// each of them starts only when it is done reading, or for good.
    pub(crate) unsafe fn new(tensor: Tensor) -> Torch<Self> {
        Ok(Self {
            memory: Memory::of(&tensor)?,
            _tensor: tensor,
        })
    }
}

// SAFETY: through a shared reference the memory is read only, which nobody writes (`SharedTensor::new`); the tensor is
// used by nobody until it is dropped, and libtorch counts references atomically.
unsafe impl Sync for SharedTensor {}
// SAFETY: a tensor may be dropped on any thread; the rest is a plain address.
unsafe impl Send for SharedTensor {}

impl SharedBuffer for SharedTensor {
    fn as_view(&self) -> View<'_> {
        // SAFETY: the tensor keeps the memory, which nobody writes; its dtype was looked at.
        unsafe {
            match self.memory.dtype {
                DType::Bf16 => View::Bf16(self.memory.slice::<bf16>()),
                _ => View::F32(self.memory.slice::<f32>()),
            }
        }
    }
}

/// Where a contiguous f32 or bf16 tensor lies in host memory.
#[derive(Debug, Clone, Copy)]
struct Memory {
    dtype: DType,
    pointer: *mut std::ffi::c_void,
    len: usize,
}

impl Memory {
    fn of(tensor: &Tensor) -> Torch<Self> {
        let kind = tensor.f_kind()?;
        let dtype = match kind {
            Kind::Float => Some(DType::F32),
            Kind::BFloat16 => Some(DType::Bf16),
            _ => None,
        };
        let on_host = tensor.device() == Device::Cpu && tensor.is_contiguous();
        let (Some(dtype), true) = (dtype, on_host) else {
            return Err(TchError::Kind(format!(
                "wanted contiguous f32 or bf16 in host memory, found {kind:?} on {:?}",
                tensor.device()
            )));
        };
        let (pointer, len) = (tensor.data_ptr(), tensor.numel());
        if len > 0 && pointer.is_null() {
            return Err(TchError::Torch("the tensor's memory is freed".to_owned()));
        }
        Ok(Self {
            dtype,
            pointer,
            len,
        })
    }

    fn expect(self, dtype: DType) -> Torch<Self> {
        match self.dtype == dtype {
            true => Ok(self),
            false => Err(TchError::Kind(format!(
                "wanted {dtype}, found {}",
                self.dtype
            ))),
        }
    }

    /// # Safety
    /// `T` is the dtype's type, and for `'a` the memory lives and is not written.
    unsafe fn slice<'a, T>(self) -> &'a [T] {
        match self.len {
            0 => &[],
            // SAFETY: `of` found so many elements at a pointer that is not null; the rest is the caller's.
            len => unsafe { std::slice::from_raw_parts(self.pointer.cast(), len) },
        }
    }

    /// # Safety
    /// `T` is the dtype's type, and for `'a` the memory lives and is used through this slice alone.
    unsafe fn slice_mut<'a, T>(self) -> &'a mut [T] {
        match self.len {
            0 => &mut [],
            // SAFETY: as in `slice`.
            len => unsafe { std::slice::from_raw_parts_mut(self.pointer.cast(), len) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_contiguous_live_f32_is_lent() {
        let mut tensor = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0]).view([2, 2]);
        floats_mut(&mut tensor).unwrap()[3] = 9.0;
        assert_eq!(floats(&tensor).unwrap(), [1.0, 2.0, 3.0, 9.0]);
        assert!(floats(&tensor.tr()).is_err());
        assert!(floats(&Tensor::from_slice(&[1.0f64])).is_err());
        assert!(floats(&tensor.to_kind(Kind::BFloat16)).is_err());
        assert!(floats(&Tensor::from_slice::<f32>(&[])).unwrap().is_empty());
        crate::shim::resize_storage(&tensor, 0).unwrap();
        assert!(floats(&tensor).is_err());
    }

    #[test]
    fn a_shared_tensor_says_its_dtype() {
        let tensor = Tensor::from_slice(&[1.0f32, -2.5]);
        for (kind, dtype) in [(Kind::Float, DType::F32), (Kind::BFloat16, DType::Bf16)] {
            // SAFETY: nobody writes it.
            let shared = unsafe { SharedTensor::new(tensor.to_kind(kind)) }.unwrap();
            assert_eq!(shared.as_view().dtype(), dtype);
            assert_eq!(shared.as_view().to_f64().unwrap(), [1.0, -2.5]);
        }
    }
}
