//! Sequence parallelism (Korthikanti et al. 2022): between the products of tensor parallelism the rows of the
//! residual stream, its norms and all that they keep are split over the tensor ranks.
//!
//! A rank has neighbouring rows, as many as any other or one more or less; a reduce-scatter and an all-gather take
//! the place of an all-reduce and move as much.

use drivetrain_core::{
    Result,
    communicator::{Communicator, ReduceOp},
};

use crate::workspace::{Buffer, Workspace};

/// The rows of all ranks, [T, W], of x [S, W]. Rank r has `rows[r]`.
///
/// # Errors
/// The communicator's.
pub(crate) fn gather(
    group: &dyn Communicator,
    workspace: &Workspace,
    x: &[f32],
    (rows, width): (&[usize], usize),
) -> Result<Buffer> {
    let counts = counts(rows, width);
    let mut all = workspace.take(counts.iter().sum());
    let own = workspace.copy(x).give();
    group.all_gather(own, (&mut *all).into(), &counts)?.wait()?;
    Ok(all)
}

/// This rank's rows, [S, W], of the sum of all ranks' x [T, W].
///
/// # Errors
/// The communicator's.
pub(crate) fn reduce(
    group: &dyn Communicator,
    workspace: &Workspace,
    x: Buffer,
    (rows, width): (&[usize], usize),
) -> Result<Buffer> {
    let counts = counts(rows, width);
    let x = x.give();
    let mut own = workspace.take(counts[group.rank()]);
    group
        .reduce_scatter(x, (&mut *own).into(), &counts, ReduceOp::Sum)?
        .wait()?;
    Ok(own)
}

fn counts(rows: &[usize], width: usize) -> Vec<usize> {
    rows.iter().map(|n| n * width).collect()
}
