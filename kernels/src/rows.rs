//! Rows of a wider buffer: a band of columns such as q in a fused `[T, (H + 2K) E]` projection.

use std::marker::PhantomData;
use std::ops::Range;

/// Read access to `rows` rows of `width` elements, `stride` elements apart.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    data: &'a [f32],
    rows: usize,
    width: usize,
    stride: usize,
}

impl<'a> Rows<'a> {
    /// Rows of `width` elements, each starting `stride` after the one before; the first starts at `data[0]`.
    ///
    /// # Panics
    /// If `stride < width` or the last row ends beyond `data`.
    #[track_caller]
    pub fn new(data: &'a [f32], rows: usize, width: usize, stride: usize) -> Self {
        check_bounds(data.len(), rows, width, stride);
        Self {
            data,
            rows,
            width,
            stride,
        }
    }

    /// All of `data`, cut into rows of `width`.
    ///
    /// # Panics
    /// If `width` does not divide the length.
    #[track_caller]
    pub fn contiguous(data: &'a [f32], width: usize) -> Self {
        Self::new(data, whole_rows(data.len(), width), width, width)
    }

    /// The columns `range` of every row.
    ///
    /// # Panics
    /// If the range exceeds the width.
    #[track_caller]
    pub fn columns(self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.width,
            "columns {range:?} of rows of width {}",
            self.width
        );
        let skip = if self.rows == 0 { 0 } else { range.start };
        Self {
            data: &self.data[skip..],
            rows: self.rows,
            width: range.len(),
            stride: self.stride,
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Elements between the starts of two rows.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// From the first element of the first row to the last of the last.
    pub(crate) fn data(&self) -> &'a [f32] {
        &self.data[..extent(self.rows, self.width, self.stride)]
    }

    /// Row `index`.
    #[inline(always)]
    pub fn row(&self, index: usize) -> &'a [f32] {
        &self.data[index * self.stride..][..self.width]
    }
}

/// Write access to `rows` rows of `width` elements, `stride` elements apart.
///
/// Bands of one buffer can be held at once, since [`RowsMut::split_columns`] proves them disjoint.
#[derive(Debug)]
pub struct RowsMut<'a> {
    start: *mut f32,
    rows: usize,
    width: usize,
    stride: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: a RowsMut is an exclusive borrow of its elements, as `&mut [f32]` is; f32 is Send and Sync.
unsafe impl Send for RowsMut<'_> {}
// SAFETY: through `&RowsMut` elements are reached only by the crate's unsafe `row_shared`, whose callers
// keep rows disjoint between threads.
unsafe impl Sync for RowsMut<'_> {}

impl<'a> RowsMut<'a> {
    /// Rows of `width` elements, each starting `stride` after the one before; the first starts at `data[0]`.
    ///
    /// # Panics
    /// If `stride < width` or the last row ends beyond `data`.
    #[track_caller]
    pub fn new(data: &'a mut [f32], rows: usize, width: usize, stride: usize) -> Self {
        check_bounds(data.len(), rows, width, stride);
        Self {
            start: data.as_mut_ptr(),
            rows,
            width,
            stride,
            borrow: PhantomData,
        }
    }

    /// All of `data`, cut into rows of `width`.
    ///
    /// # Panics
    /// If `width` does not divide the length.
    #[track_caller]
    pub fn contiguous(data: &'a mut [f32], width: usize) -> Self {
        let rows = whole_rows(data.len(), width);
        Self::new(data, rows, width, width)
    }

    /// Neighbouring bands of these widths, from the first column on; columns that remain are dropped.
    ///
    /// # Panics
    /// If the widths sum to more than the width.
    #[track_caller]
    pub fn split_columns<const N: usize>(self, widths: [usize; N]) -> [RowsMut<'a>; N] {
        let sum: usize = widths.iter().sum();
        assert!(
            sum <= self.width,
            "bands of {widths:?} columns in rows of width {}",
            self.width
        );
        let mut column = 0;
        widths.map(|width| {
            let skip = if self.rows == 0 { 0 } else { column };
            column += width;
            RowsMut {
                // SAFETY: column + width <= self.width, so with at least one row the start is inside
                // the buffer; with none it is the buffer's start. Bands do not overlap.
                start: unsafe { self.start.add(skip) },
                rows: self.rows,
                width,
                stride: self.stride,
                borrow: PhantomData,
            }
        })
    }

    /// The same rows for a shorter time.
    pub fn reborrow(&mut self) -> RowsMut<'_> {
        RowsMut {
            start: self.start,
            rows: self.rows,
            width: self.width,
            stride: self.stride,
            borrow: PhantomData,
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Elements between the starts of two rows.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Where the first row starts.
    pub(crate) fn start(&self) -> *mut f32 {
        self.start
    }

    /// Elements from the first of the first row to the last of the last.
    pub(crate) fn extent(&self) -> usize {
        extent(self.rows, self.width, self.stride)
    }

    /// Row `index`.
    pub fn row(&mut self, index: usize) -> &mut [f32] {
        // SAFETY: `&mut self` is exclusive.
        unsafe { self.row_shared(index) }
    }

    /// Row `index`, through a shared borrow.
    ///
    /// # Safety
    /// No other reference to this row may live at the same time.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn row_shared(&self, index: usize) -> &mut [f32] {
        assert!(index < self.rows, "row {index} of {} rows", self.rows);
        // SAFETY: the constructors checked that every row lies inside the borrowed buffer.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(index * self.stride), self.width) }
    }

    /// Columns `columns` of row `index`, through a shared borrow.
    ///
    /// # Safety
    /// No other reference to these elements may live at the same time.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn band_shared(&self, index: usize, columns: Range<usize>) -> &mut [f32] {
        assert!(
            index < self.rows && columns.start <= columns.end && columns.end <= self.width,
            "columns {columns:?} of row {index} in [{}, {}]",
            self.rows,
            self.width
        );
        // SAFETY: the row lies inside the borrowed buffer, and the band inside the row.
        unsafe {
            let start = self.start.add(index * self.stride + columns.start);
            std::slice::from_raw_parts_mut(start, columns.len())
        }
    }
}

/// A slice whose disjoint parts several threads write.
pub(crate) struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: elements are reached only by the unsafe `range`, whose callers keep ranges disjoint.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub(crate) fn new(data: &'a mut [T]) -> Self {
        Self {
            start: data.as_mut_ptr(),
            len: data.len(),
            borrow: PhantomData,
        }
    }

    /// # Safety
    /// No other reference to elements of `range` may live at the same time.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn range(&self, range: Range<usize>) -> &mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "range {range:?} of {} elements",
            self.len
        );
        // SAFETY: the range lies inside the borrowed slice.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

/// Of rows that a buffer was found to hold.
fn extent(rows: usize, width: usize, stride: usize) -> usize {
    match (rows, width) {
        (0, _) | (_, 0) => 0,
        _ => (rows - 1) * stride + width,
    }
}

#[track_caller]
fn check_bounds(len: usize, rows: usize, width: usize, stride: usize) {
    assert!(
        width <= stride,
        "rows of width {width} overlap at stride {stride}"
    );
    let needed = rows
        .checked_sub(1)
        .map_or(Some(0), |last| last.checked_mul(stride)?.checked_add(width));
    assert!(
        needed.is_some_and(|needed| needed <= len),
        "{rows} rows of width {width} at stride {stride} need {needed:?} elements, found {len}"
    );
}

#[track_caller]
fn whole_rows(len: usize, width: usize) -> usize {
    assert!(
        width > 0 && len.is_multiple_of(width),
        "{len} elements are not whole rows of width {width}"
    );
    len / width
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bands_of_one_buffer_are_disjoint_and_complete() {
        let mut data: Vec<f32> = vec![0.0; 3 * 6];
        let [mut a, mut b] = RowsMut::new(&mut data, 3, 5, 6).split_columns([2, 3]);
        for i in 0..3 {
            a.row(i).fill(1.0);
            b.row(i).fill(2.0);
        }
        assert_eq!(data, [1., 1., 2., 2., 2., 0.].repeat(3));
        assert_eq!(Rows::new(&data, 3, 5, 6).columns(1..3).row(2), &[1., 2.]);
    }

    #[test]
    #[should_panic(expected = "need Some(17) elements, found 16")]
    fn a_short_buffer_is_named() {
        Rows::new(&[0.0; 16], 3, 5, 6);
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn overlapping_rows_are_refused() {
        RowsMut::new(&mut [0.0; 16], 3, 5, 4);
    }
}
