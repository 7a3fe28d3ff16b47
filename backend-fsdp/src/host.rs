//! Host slices of CPU tensors: how a tensor meets a communicator, a reader or a writer.

use tch::{Device, Kind, TchError, Tensor};

use crate::error::Torch;

/// The elements of a contiguous f32 tensor in host memory.
pub(crate) fn floats(tensor: &Tensor) -> Torch<&[f32]> {
    let (pointer, len) = checked(tensor)?;
    if len == 0 {
        return Ok(&[]);
    }
    // SAFETY: `checked` found `len` contiguous f32 at `pointer`, which is not null; the tensor keeps the
    // storage alive, and this crate resizes or writes a storage only where no such slice is held (each rank's
    // tensors are used by its own thread alone).
    Ok(unsafe { std::slice::from_raw_parts(pointer, len) })
}

/// The elements of a contiguous f32 tensor in host memory, to be written. Moves no version counter.
pub(crate) fn floats_mut(tensor: &mut Tensor) -> Torch<&mut [f32]> {
    let (pointer, len) = checked(tensor)?;
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as in `floats`; and no other slice of this storage is held: the callers write buffers that they
    // made, or that they alone hold between two uses by libtorch.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer, len) })
}

fn checked(tensor: &Tensor) -> Torch<(*mut f32, usize)> {
    let kind = tensor.f_kind()?;
    if kind != Kind::Float || tensor.device() != Device::Cpu || !tensor.is_contiguous() {
        return Err(TchError::Kind(format!(
            "wanted contiguous f32 in host memory, found {kind:?} on {:?}",
            tensor.device()
        )));
    }
    let (pointer, len) = (tensor.data_ptr().cast::<f32>(), tensor.numel());
    if len > 0 && pointer.is_null() {
        return Err(TchError::Torch("the tensor's memory is freed".to_owned()));
    }
    Ok((pointer, len))
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
        assert!(floats(&Tensor::from_slice::<f32>(&[])).unwrap().is_empty());
        crate::shim::resize_storage(&tensor, 0).unwrap();
        assert!(floats(&tensor).is_err());
    }
}
