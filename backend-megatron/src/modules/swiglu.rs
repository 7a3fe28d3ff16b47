//! silu(gate) x up, of products that lie side by side: a dense layer's, or those of all experts of a rank.

use drivetrain_kernels::{Rows, RowsMut, ops::swiglu};

use super::Context;
use crate::workspace::Buffer;

/// [R, F] of gate and up [R, 2F].
pub(super) fn forward(cx: &Context<'_>, gate_up: &[f32], ffn_size: usize) -> Buffer {
    let mut activation = cx.workspace.take(gate_up.len() / 2);
    let bands = Rows::contiguous(gate_up, 2 * ffn_size);
    let (gate, up) = (
        bands.columns(0..ffn_size),
        bands.columns(ffn_size..2 * ffn_size),
    );
    swiglu::forward(cx.cpu, gate, up, &mut activation);
    activation
}

/// The gradient of gate and up, [R, 2F], from that of the activation, [R, F].
pub(super) fn backward(
    cx: &Context<'_>,
    gate_up: &[f32],
    dactivation: &[f32],
    ffn_size: usize,
) -> Buffer {
    let mut dgate_up = cx.workspace.take(gate_up.len());
    let bands = Rows::contiguous(gate_up, 2 * ffn_size);
    let (gate, up) = (
        bands.columns(0..ffn_size),
        bands.columns(ffn_size..2 * ffn_size),
    );
    let [dgate, dup] =
        RowsMut::contiguous(&mut dgate_up, 2 * ffn_size).split_columns([ffn_size, ffn_size]);
    swiglu::backward(cx.cpu, dactivation, gate, up, dgate, dup);
    dgate_up
}
