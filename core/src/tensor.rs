//! Typed views of tensor data in host or device memory: what crosses the contract's borders.
//!
//! Core never dereferences device memory: a [`DeviceSlice`] is an address that engines, collectives and
//! weight sinks understand.

use std::{fmt, marker::PhantomData, ops::Range};

use half::{bf16, f16};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Error, ErrorKind, Result};

/// Element type of a tensor.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary64.
    F64,
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// Signed 64-bit integer.
    I64,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned byte.
    U8,
}

impl DType {
    /// Bytes an element takes.
    pub const fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::U8 => 1,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::U8 => "u8",
        })
    }
}

/// Where a tensor's memory is.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub enum Device {
    /// Host memory.
    #[default]
    Cpu,
    /// Memory of the CUDA device with this ordinal (counted among the visible ones).
    Cuda(u32),
}

/// A rectangle of memory on a device: an address, not a reference.
#[derive(Debug, Clone, Copy)]
pub struct DeviceSlice<'a> {
    /// The device, never [`Device::Cpu`].
    pub device: Device,
    /// Element type.
    pub dtype: DType,
    /// Address in the device's memory.
    pub address: u64,
    /// Number of elements.
    pub len: usize,
    lifetime: PhantomData<&'a ()>,
}

impl DeviceSlice<'_> {
    /// Names `len` elements at `address`; whoever dereferences it vouches for it.
    pub fn new(device: Device, dtype: DType, address: u64, len: usize) -> Self {
        Self {
            device,
            dtype,
            address,
            len,
            lifetime: PhantomData,
        }
    }

    fn slice(self, range: Range<usize>) -> Self {
        Self {
            address: self.address + (range.start * self.dtype.size()) as u64,
            len: range.len(),
            ..self
        }
    }
}

macro_rules! views {
    ($($variant:ident: $type:ty = $dtype:expr),* $(,)?) => {
        /// A read-only view of contiguous elements.
        #[derive(Debug, Clone, Copy)]
        pub enum View<'a> {
            $(#[doc = concat!("Host memory of ", stringify!($type), ".")] $variant(&'a [$type]),)*
            /// Device memory.
            Device(DeviceSlice<'a>),
        }

        /// A writable view of contiguous elements.
        #[derive(Debug)]
        pub enum ViewMut<'a> {
            $(#[doc = concat!("Host memory of ", stringify!($type), ".")] $variant(&'a mut [$type]),)*
            /// Device memory.
            Device(DeviceSlice<'a>),
        }

        /// Contiguous elements in host memory that belong to whoever holds it.
        #[derive(Debug, Clone, PartialEq)]
        pub enum Buffer {
            $(#[doc = concat!("Of ", stringify!($type), ".")] $variant(Vec<$type>),)*
        }

        impl Buffer {
            /// Element type.
            pub fn dtype(&self) -> DType {
                match self { $(Self::$variant(_) => $dtype,)* }
            }
            /// Number of elements.
            pub fn len(&self) -> usize {
                match self { $(Self::$variant(v) => v.len(),)* }
            }
            /// What it holds, read-only.
            pub fn as_view(&self) -> View<'_> {
                match self { $(Self::$variant(v) => View::$variant(v),)* }
            }
            /// What it holds, writable.
            pub fn as_view_mut(&mut self) -> ViewMut<'_> {
                match self { $(Self::$variant(v) => ViewMut::$variant(v),)* }
            }
            /// Zeros.
            pub fn zeros(dtype: DType, len: usize) -> Self {
                match dtype { $(DType::$variant => Self::$variant(vec![bytemuck::Zeroable::zeroed(); len]),)* }
            }
            /// The bytes.
            pub fn host_bytes(&self) -> &[u8] {
                match self { $(Self::$variant(v) => bytemuck::cast_slice(v),)* }
            }
            /// The bytes, writable.
            pub fn host_bytes_mut(&mut self) -> &mut [u8] {
                match self { $(Self::$variant(v) => bytemuck::cast_slice_mut(v),)* }
            }
            /// A copy of a view, if that is of host memory.
            pub fn copy(view: View<'_>) -> Option<Self> {
                match view { $(View::$variant(s) => Some(Self::$variant(s.to_vec())),)* View::Device(_) => None }
            }
        }

        impl<'a> View<'a> {
            /// Element type.
            pub fn dtype(&self) -> DType {
                match self { $(Self::$variant(_) => $dtype,)* Self::Device(d) => d.dtype }
            }
            /// Number of elements.
            pub fn len(&self) -> usize {
                match self { $(Self::$variant(s) => s.len(),)* Self::Device(d) => d.len }
            }
            /// Where the memory is.
            pub fn device(&self) -> Device {
                match self { Self::Device(d) => d.device, _ => Device::Cpu }
            }
            /// The elements of a range, which lies within it.
            pub fn slice(self, range: Range<usize>) -> Self {
                match self {
                    $(Self::$variant(s) => Self::$variant(&s[range]),)*
                    Self::Device(d) => Self::Device(d.slice(range)),
                }
            }
            /// The bytes, if they are in host memory.
            pub fn host_bytes(&self) -> Option<&'a [u8]> {
                match *self { $(Self::$variant(s) => Some(bytemuck::cast_slice(s)),)* Self::Device(_) => None }
            }
        }

        impl ViewMut<'_> {
            /// Element type.
            pub fn dtype(&self) -> DType {
                match self { $(Self::$variant(_) => $dtype,)* Self::Device(d) => d.dtype }
            }
            /// Number of elements.
            pub fn len(&self) -> usize {
                match self { $(Self::$variant(s) => s.len(),)* Self::Device(d) => d.len }
            }
            /// Where the memory is.
            pub fn device(&self) -> Device {
                match self { Self::Device(d) => d.device, _ => Device::Cpu }
            }
            /// The bytes, if they are in host memory.
            pub fn host_bytes_mut(&mut self) -> Option<&mut [u8]> {
                match self { $(Self::$variant(s) => Some(bytemuck::cast_slice_mut(s)),)* Self::Device(_) => None }
            }
            /// The elements of a range, which lies within it.
            pub fn slice_mut(&mut self, range: Range<usize>) -> ViewMut<'_> {
                match self {
                    $(Self::$variant(s) => ViewMut::$variant(&mut s[range]),)*
                    Self::Device(d) => ViewMut::Device(d.slice(range)),
                }
            }
            /// The same memory, read-only.
            pub fn as_view(&self) -> View<'_> {
                match self { $(Self::$variant(s) => View::$variant(s),)* Self::Device(d) => View::Device(*d) }
            }
        }

        $(
            impl<'a> From<&'a [$type]> for View<'a> {
                fn from(slice: &'a [$type]) -> Self { Self::$variant(slice) }
            }
            impl<'a> From<&'a Vec<$type>> for View<'a> {
                fn from(vec: &'a Vec<$type>) -> Self { Self::$variant(vec) }
            }
            impl<'a> From<&'a mut [$type]> for ViewMut<'a> {
                fn from(slice: &'a mut [$type]) -> Self { Self::$variant(slice) }
            }
            impl<'a> From<&'a mut Vec<$type>> for ViewMut<'a> {
                fn from(vec: &'a mut Vec<$type>) -> Self { Self::$variant(vec) }
            }
            impl From<Vec<$type>> for Buffer {
                fn from(vec: Vec<$type>) -> Self { Self::$variant(vec) }
            }
            impl TryFrom<Buffer> for Vec<$type> {
                type Error = Error;

                fn try_from(buffer: Buffer) -> Result<Self> {
                    match buffer { Buffer::$variant(vec) => Ok(vec), other => Err(not($dtype, &other.as_view())) }
                }
            }
        )*
    };
}

views! {
    F64: f64 = DType::F64,
    F32: f32 = DType::F32,
    Bf16: bf16 = DType::Bf16,
    F16: f16 = DType::F16,
    I64: i64 = DType::I64,
    I32: i32 = DType::I32,
    U8: u8 = DType::U8,
}

impl Buffer {
    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes the elements take.
    pub fn num_bytes(&self) -> usize {
        self.len() * self.dtype().size()
    }
}

fn not(expected: DType, found: &View<'_>) -> Error {
    let message = "a buffer has another dtype or place";
    Error::new(ErrorKind::Defect, "read_buffer", message)
        .with("expected", expected)
        .with(
            "found",
            format!("{} on {:?}", found.dtype(), found.device()),
        )
}

impl View<'_> {
    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes the elements take.
    pub fn num_bytes(&self) -> usize {
        self.len() * self.dtype().size()
    }

    /// Whether no element is infinite or a NaN, as far as they are in host memory.
    pub fn all_finite(&self) -> bool {
        match self {
            Self::F64(s) => s.iter().all(|x| x.is_finite()),
            Self::F32(s) => s.iter().all(|x| x.is_finite()),
            Self::Bf16(s) => s.iter().all(|x| x.is_finite()),
            Self::F16(s) => s.iter().all(|x| x.is_finite()),
            Self::I64(_) | Self::I32(_) | Self::U8(_) | Self::Device(_) => true,
        }
    }

    /// The elements, which must be f32 in host memory.
    ///
    /// # Errors
    /// `Defect` if they are not.
    pub fn as_f32(&self) -> Result<&[f32]> {
        match self {
            Self::F32(s) => Ok(s),
            other => Err(not(DType::F32, other)),
        }
    }

    /// The elements as f64, if they are in host memory. Exact for every dtype but large `i64`.
    pub fn to_f64(&self) -> Option<Vec<f64>> {
        Some(match self {
            Self::F64(s) => s.to_vec(),
            Self::F32(s) => s.iter().map(|&x| x.into()).collect(),
            Self::Bf16(s) => s.iter().map(|x| x.to_f64()).collect(),
            Self::F16(s) => s.iter().map(|x| x.to_f64()).collect(),
            Self::I64(s) => s.iter().map(|&x| x as f64).collect(),
            Self::I32(s) => s.iter().map(|&x| x.into()).collect(),
            Self::U8(s) => s.iter().map(|&x| x.into()).collect(),
            Self::Device(_) => return None,
        })
    }

    /// The elements rounded to f32, if they are in host memory. Exact from bf16 and f16.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        Some(match self {
            Self::F32(s) => s.to_vec(),
            Self::Bf16(s) => s.iter().map(|x| x.to_f32()).collect(),
            Self::F16(s) => s.iter().map(|x| x.to_f32()).collect(),
            other => other.to_f64()?.iter().map(|&x| x as f32).collect(),
        })
    }
}

impl ViewMut<'_> {
    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes the elements take.
    pub fn num_bytes(&self) -> usize {
        self.len() * self.dtype().size()
    }
}
