//! Linear layers of several experts over rows sorted by expert: y of row r = x of r times W^T of its expert.
//!
//! Expert e has the rows `offsets[e]`..`offsets[e + 1]` of x `[R, D]` and y `[R, N]`, as many as came (dropless),
//! possibly none, and the weight e of `[X, N, D]`.
//!
//! | function | computes, for the rows of every expert e |
//! |---|---|
//! | [`forward`] | y = x W_e^T |
//! | [`backward_input`] | dx = dy W_e |
//! | [`backward_weight`] | dW_e = dy^T x |
//!
//! `accumulate` adds to the output instead of overwriting it: the weight gradient of an expert without rows is
//! then left alone, otherwise set to 0. f32, sums in f32; no scratch.

pub mod reference;
#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::ops::linear::{self, LinearDims};
use crate::{On, check};

/// Shape of the experts, and their rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupedDims<'a> {
    /// Rows of each expert `[X + 1]`: from 0 to R, never falling.
    pub offsets: &'a [usize],
    /// D.
    pub inputs: usize,
    /// N.
    pub outputs: usize,
}

/// y = x W^T, each row with the weight of its expert.
#[track_caller]
pub fn forward<'on>(
    on: impl Into<On<'on>>,
    dims: &GroupedDims<'_>,
    x: &[f32],      // [R, D]
    weight: &[f32], // [X, N, D]
    y: &mut [f32],  // [R, N]
) {
    let on = on.into();
    dims.check(("x", x), ("weight", weight), ("y", y));
    for group in dims.groups().filter(|group| group.linear.tokens > 0) {
        let (x, y) = (&x[group.x], &mut y[group.y]);
        linear::forward(on, &group.linear, x, &weight[group.weight], None, y);
    }
}

/// dx = dy W, each row with the weight of its expert; added to dx if `accumulate`.
#[track_caller]
pub fn backward_input<'on>(
    on: impl Into<On<'on>>,
    dims: &GroupedDims<'_>,
    dy: &[f32],     // [R, N]
    weight: &[f32], // [X, N, D]
    accumulate: bool,
    dx: &mut [f32], // [R, D]
) {
    let on = on.into();
    dims.check(("dx", dx), ("weight", weight), ("dy", dy));
    for group in dims.groups().filter(|group| group.linear.tokens > 0) {
        let (dy, weight, dx) = (&dy[group.y], &weight[group.weight], &mut dx[group.x]);
        linear::backward_input(on, &group.linear, dy, weight, accumulate, dx);
    }
}

/// dW = dy^T x over the rows of each expert; added to dW if `accumulate`.
#[track_caller]
pub fn backward_weight<'on>(
    on: impl Into<On<'on>>,
    dims: &GroupedDims<'_>,
    dy: &[f32], // [R, N]
    x: &[f32],  // [R, D]
    accumulate: bool,
    dweight: &mut [f32], // [X, N, D]
) {
    let on = on.into();
    dims.check(("x", x), ("dweight", dweight), ("dy", dy));
    for group in dims.groups() {
        let dweight = &mut dweight[group.weight];
        match group.linear.tokens {
            0 if accumulate => {}
            0 => dweight.fill(0.0),
            _ => linear::backward_weight(
                on,
                &group.linear,
                &dy[group.y],
                &x[group.x],
                accumulate,
                dweight,
            ),
        }
    }
}

/// Where the operands of one expert lie.
struct Group {
    linear: LinearDims,
    x: Range<usize>,
    y: Range<usize>,
    weight: Range<usize>,
}

impl GroupedDims<'_> {
    /// R.
    pub fn rows(&self) -> usize {
        self.offsets.last().copied().unwrap_or(0)
    }

    /// X.
    pub fn experts(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    fn groups(&self) -> impl Iterator<Item = Group> {
        let (d, n) = (self.inputs, self.outputs);
        self.offsets
            .windows(2)
            .enumerate()
            .map(move |(e, ends)| Group {
                linear: LinearDims::new(ends[1] - ends[0], d, n),
                x: ends[0] * d..ends[1] * d,
                y: ends[0] * n..ends[1] * n,
                weight: e * n * d..(e + 1) * n * d,
            })
    }

    #[track_caller]
    fn check(&self, x: (&str, &[f32]), weight: (&str, &[f32]), y: (&str, &[f32])) {
        assert!(
            self.offsets.first() == Some(&0) && self.offsets.is_sorted(),
            "grouped_gemm: offsets must rise from 0, found {:?}",
            self.offsets
        );
        check::len(x.0, x.1, self.rows() * self.inputs);
        check::len(
            weight.0,
            weight.1,
            self.experts() * self.outputs * self.inputs,
        );
        check::len(y.0, y.1, self.rows() * self.outputs);
    }
}
