//! Typed memory of a device, and what ops take: views, and rows of a wider buffer.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::driver::{Arg, Driver, Launch};
use super::{CudaError, Module};
use crate::ops::gemm::Gemm;

/// A handle on a device and its stream. Clones share both.
#[derive(Debug, Clone)]
pub struct Device(Arc<dyn Driver>);

impl Device {
    /// Over a GPU, or whatever else runs kernels.
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        Self(driver)
    }

    /// Memory for `len` elements, contents undefined: for what an op overwrites.
    pub fn uninit<T: Element>(&self, len: usize) -> Result<Buffer<T>, CudaError> {
        let address = match len {
            0 => 0,
            _ => self.0.allocate(len, size_of::<T>())?,
        };
        Ok(Buffer {
            device: self.clone(),
            address,
            len,
            element: PhantomData,
        })
    }

    /// `len` zeros.
    pub fn zeros<T: Element>(&self, len: usize) -> Result<Buffer<T>, CudaError> {
        let buffer = self.uninit::<T>(len)?;
        if len > 0 {
            // SAFETY: the buffer was allocated with this length.
            unsafe { self.0.zero(buffer.address, len * size_of::<T>())? };
        }
        Ok(buffer)
    }

    /// A copy of `data`.
    pub fn upload<T: Element>(&self, data: &[T]) -> Result<Buffer<T>, CudaError> {
        let mut buffer = self.uninit(data.len())?;
        buffer.write(data)?;
        Ok(buffer)
    }

    /// Memory for `len` elements that the host addresses too, each of some value.
    pub(super) fn allocate_unified<T: Element>(&self, len: usize) -> Result<u64, CudaError> {
        self.0.allocate_unified(len, size_of::<T>())
    }

    /// Gives it back.
    ///
    /// # Safety
    /// As [`Driver::free_unified`].
    pub(super) unsafe fn free_unified(&self, address: u64) {
        // SAFETY: the caller's.
        unsafe { self.0.free_unified(address) }
    }

    /// Waits for all work given so far.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.0.synchronize()
    }

    /// Starts a kernel; a grid of no blocks is no work.
    ///
    /// # Safety
    /// As [`Driver::launch`].
    pub(crate) unsafe fn launch(
        &self,
        module: &'static Module,
        kernel: &'static str,
        grid: [u32; 3],
        block: [u32; 3],
        args: &[Arg],
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.launch_with(module, kernel, (grid, block, 0), args) }
    }

    /// As [`Device::launch`], with bytes of dynamic shared memory after grid and block.
    ///
    /// # Safety
    /// As [`Driver::launch`].
    pub(crate) unsafe fn launch_with(
        &self,
        module: &'static Module,
        kernel: &'static str,
        (grid, block, shared_bytes): ([u32; 3], [u32; 3], u32),
        args: &[Arg],
    ) -> Result<(), CudaError> {
        if grid.contains(&0) {
            return Ok(());
        }
        debug_assert!(module.kernels.contains(&kernel), "{kernel} is not listed");
        let launch = Launch {
            module,
            kernel,
            grid,
            block,
            shared_bytes,
            args,
        };
        // SAFETY: the caller's.
        unsafe { self.0.launch(&launch) }
    }
}

impl Device {
    /// C = alpha op(A) op(B) + beta C. An empty sum is 0.
    ///
    /// # Safety
    /// As [`Driver::gemm`], but sizes may be 0.
    pub(crate) unsafe fn gemm(&self, dims: &Gemm, operands: [u64; 3]) -> Result<(), CudaError> {
        if dims.m == 0 || dims.n == 0 || (dims.k == 0 && dims.beta == 1.0) {
            return Ok(());
        }
        if dims.k > 0 {
            // SAFETY: the caller's.
            return unsafe { self.0.gemm(dims, operands) };
        }
        assert!(
            dims.beta == 0.0,
            "gemm: an empty sum with beta {} on a device",
            dims.beta
        );
        for row in 0..dims.m {
            let address = operands[2] + (row * dims.ldc * size_of::<f32>()) as u64;
            // SAFETY: the caller's: a row of C.
            unsafe { self.0.zero(address, dims.n * size_of::<f32>())? };
        }
        Ok(())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// What a buffer may hold: plain numbers, of which every bit pattern is one.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {}

macro_rules! elements {
    ($($t:ty),+) => { $(impl sealed::Sealed for $t {} impl Element for $t {})+ };
}
elements!(f32, f64, u32, bf16);

/// Memory of a device, given back when dropped.
#[derive(Debug)]
pub struct Buffer<T: Element> {
    device: Device,
    address: u64,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// It holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Overwrites all of it.
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn write(&mut self, data: &[T]) -> Result<(), CudaError> {
        crate::check::len("data", data, self.len);
        if self.len == 0 {
            return Ok(());
        }
        // SAFETY: elements are plain numbers.
        let bytes = unsafe {
            std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), std::mem::size_of_val(data))
        };
        // SAFETY: the buffer has this length.
        unsafe { self.device.0.upload(bytes, self.address) }
    }

    /// A copy on the host, once all work given so far is done.
    pub fn read(&self) -> Result<Vec<T>, CudaError> {
        let mut data: Vec<T> = Vec::with_capacity(self.len);
        // SAFETY: the vector has room for the elements, zeros are elements, and so all of them have a value.
        unsafe {
            std::ptr::write_bytes(data.as_mut_ptr(), 0, self.len);
            data.set_len(self.len);
        }
        self.read_into(&mut data)?;
        Ok(data)
    }

    /// Copies all of it to the host, once all work given so far is done.
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn read_into(&self, data: &mut [T]) -> Result<(), CudaError> {
        crate::check::len("data", data, self.len);
        if self.len == 0 {
            return Ok(());
        }
        let bytes = std::mem::size_of_val(data);
        // SAFETY: elements are plain numbers, for which any bytes will do.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast::<u8>(), bytes) };
        // SAFETY: the buffer has this length.
        unsafe { self.device.0.download(self.address, bytes) }
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// All of it, to read.
    pub fn view(&self) -> View<'_, T> {
        View {
            address: self.address,
            len: self.len,
            borrow: PhantomData,
        }
    }

    /// All of it, to write.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut {
            address: self.address,
            len: self.len,
            borrow: PhantomData,
        }
    }
}

impl Buffer<f32> {
    /// Cut into rows of `width`.
    ///
    /// # Panics
    /// If `width` does not divide the length.
    #[track_caller]
    pub fn rows(&self, width: usize) -> Rows<'_> {
        Rows(RowsMut::over(self.address, self.len, width).shape)
    }

    /// Cut into rows of `width`, to write.
    ///
    /// # Panics
    /// As [`Buffer::rows`].
    #[track_caller]
    pub fn rows_mut(&mut self, width: usize) -> RowsMut<'_> {
        RowsMut::over(self.address, self.len, width)
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated by this device; nobody borrows the buffer any more.
            unsafe { self.device.0.free(self.address) };
        }
    }
}

/// Elements of a buffer, to read.
#[derive(Debug, Clone, Copy)]
pub struct View<'a, T> {
    address: u64,
    len: usize,
    borrow: PhantomData<&'a T>,
}

/// Elements of a buffer, to write; nobody else has them.
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    address: u64,
    len: usize,
    borrow: PhantomData<&'a mut T>,
}

macro_rules! view {
    ($view:ident) => {
        impl<T> $view<'_, T> {
            /// Of `len` elements that lie there on the device as long as the view is used.
            pub(super) fn at(address: u64, len: usize) -> Self {
                Self {
                    address,
                    len,
                    borrow: PhantomData,
                }
            }

            /// Elements.
            pub fn len(&self) -> usize {
                self.len
            }

            /// It covers nothing.
            pub fn is_empty(&self) -> bool {
                self.len == 0
            }

            /// Panics unless it has `expected` elements, naming it.
            #[track_caller]
            pub(crate) fn check(&self, name: &str, expected: usize) {
                assert!(
                    self.len == expected,
                    "{name} has {} elements, its dimensions say {expected}",
                    self.len
                );
            }

            /// The kernel's argument.
            pub(crate) fn arg(&self) -> Arg {
                Arg::Pointer {
                    address: self.address,
                    reach: (self.len * size_of::<T>()) as u64,
                }
            }
        }
    };
}
view!(View);
view!(ViewMut);

impl<'a, T> View<'a, T> {
    /// Of elements in unified memory; of none, wherever.
    pub(super) fn of(slice: &'a [T]) -> Self {
        Self::at(address_of(slice.as_ptr(), slice.len()), slice.len())
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl<'a, T> ViewMut<'a, T> {
    /// Of elements in unified memory; of none, wherever.
    pub(super) fn of(slice: &'a mut [T]) -> Self {
        Self::at(address_of(slice.as_ptr(), slice.len()), slice.len())
    }
}

/// An empty slice lies in no buffer.
fn address_of<T>(start: *const T, len: usize) -> u64 {
    if len == 0 { 0 } else { start as u64 }
}

impl<T> ViewMut<'_, T> {
    /// The same for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut {
            borrow: PhantomData,
            ..*self
        }
    }
}

/// Where rows lie.
#[derive(Debug, Clone, Copy)]
struct Shape<'a> {
    address: u64,
    rows: usize,
    width: usize,
    stride: usize,
    borrow: PhantomData<&'a f32>,
}

/// Rows of a buffer or a band of their columns, to read.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a>(Shape<'a>);

/// Rows of a buffer or a band of their columns, to write; nobody else has them.
#[derive(Debug)]
pub struct RowsMut<'a> {
    shape: Shape<'a>,
    borrow: PhantomData<&'a mut f32>,
}

impl<'a> Rows<'a> {
    /// Rows, width and stride of what lies there on the device as long as the rows are used.
    pub(super) fn at(address: u64, shape: (usize, usize, usize)) -> Self {
        Self(Shape::at(address, shape))
    }

    /// The columns `range` of every row.
    ///
    /// # Panics
    /// If the range exceeds the width.
    #[track_caller]
    pub fn columns(self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.0.width,
            "columns {range:?} of rows of width {}",
            self.0.width
        );
        Self(self.0.band(range.start, range.len()))
    }

    pub(crate) fn shape(&self) -> (usize, usize) {
        (self.0.rows, self.0.width)
    }

    pub(crate) fn address(&self) -> u64 {
        self.0.address
    }

    /// Elements between the starts of two rows.
    pub(crate) fn stride(&self) -> usize {
        self.0.stride
    }

    /// Address and stride, as kernels take them.
    pub(crate) fn args(&self) -> [Arg; 2] {
        self.0.args()
    }
}

impl<'a> RowsMut<'a> {
    /// As [`Rows::at`]; nobody else has them.
    pub(super) fn at(address: u64, shape: (usize, usize, usize)) -> Self {
        Self {
            shape: Shape::at(address, shape),
            borrow: PhantomData,
        }
    }

    #[track_caller]
    fn over(address: u64, len: usize, width: usize) -> Self {
        assert!(
            width > 0 && len.is_multiple_of(width),
            "{len} elements are not whole rows of width {width}"
        );
        Self::at(address, (len / width, width, width))
    }

    /// Neighbouring bands of these widths, from the first column on; columns that remain are dropped.
    ///
    /// # Panics
    /// If the widths sum to more than the width.
    #[track_caller]
    pub fn split_columns<const N: usize>(self, widths: [usize; N]) -> [RowsMut<'a>; N] {
        let sum: usize = widths.iter().sum();
        assert!(
            sum <= self.shape.width,
            "bands of {widths:?} columns in rows of width {}",
            self.shape.width
        );
        let mut column = 0;
        widths.map(|width| {
            let shape = self.shape.band(column, width);
            column += width;
            RowsMut {
                shape,
                borrow: PhantomData,
            }
        })
    }

    pub(crate) fn shape(&self) -> (usize, usize) {
        (self.shape.rows, self.shape.width)
    }

    pub(crate) fn address(&self) -> u64 {
        self.shape.address
    }

    /// Elements between the starts of two rows.
    pub(crate) fn stride(&self) -> usize {
        self.shape.stride
    }

    /// Address and stride, as kernels take them.
    pub(crate) fn args(&self) -> [Arg; 2] {
        self.shape.args()
    }
}

impl Shape<'_> {
    fn at(address: u64, (rows, width, stride): (usize, usize, usize)) -> Self {
        Self {
            address,
            rows,
            width,
            stride,
            borrow: PhantomData,
        }
    }

    fn band(self, start: usize, width: usize) -> Self {
        // Without rows there is no buffer to start in.
        let skip = if self.rows == 0 { 0 } else { start };
        Self {
            address: self.address + (skip * size_of::<f32>()) as u64,
            width,
            ..self
        }
    }

    fn args(&self) -> [Arg; 2] {
        let elements = match self.rows {
            0 => 0,
            rows => (rows - 1) * self.stride + self.width,
        };
        let pointer = Arg::Pointer {
            address: self.address,
            reach: (elements * size_of::<f32>()) as u64,
        };
        [pointer, Arg::from(self.stride)]
    }
}
