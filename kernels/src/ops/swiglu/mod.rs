//! SwiGLU (Shazeer 2020): y = silu(gate) up, with silu(x) = x / (1 + e^-x).
//!
//! gate, up `[T, F]`, two buffers or bands of one `[T, 2F]`; y `[T, F]` contiguous. f32. Backward, with
//! s = sigmoid(gate): dgate = dy up s (1 + gate (1 - s)), dup = dy gate s. No scratch.

mod cpu;
pub mod reference;
#[cfg(test)]
mod tests;

use crate::cuda::ops::swiglu as device;
use crate::{On, Rows, RowsMut};

/// y = silu(gate) up.
#[track_caller]
pub fn forward<'on>(
    on: impl Into<On<'on>>,
    gate: Rows<'_>, // [T, F]
    up: Rows<'_>,   // [T, F]
    y: &mut [f32],  // [T, F]
) {
    let (tokens, width) = (gate.rows(), gate.width());
    check_rows("up", (up.rows(), up.width()), (tokens, width));
    crate::check::len("y", y, tokens * width);
    match on.into() {
        On::Cpu(cpu) => cpu::forward(cpu, gate, up, y),
        On::Device(unified) => unified.run(|call| {
            let (gate, up, y) = (call.rows(gate)?, call.rows(up)?, call.output(y)?);
            device::forward(call.device(), gate, up, y)
        }),
    }
}

/// dgate and dup from dy and the inputs of the forward pass; both overwritten.
#[track_caller]
pub fn backward<'on>(
    on: impl Into<On<'on>>,
    dy: &[f32],         // [T, F]
    gate: Rows<'_>,     // [T, F]
    up: Rows<'_>,       // [T, F]
    dgate: RowsMut<'_>, // [T, F]
    dup: RowsMut<'_>,   // [T, F]
) {
    let (tokens, width) = (gate.rows(), gate.width());
    check_rows("up", (up.rows(), up.width()), (tokens, width));
    check_rows("dgate", (dgate.rows(), dgate.width()), (tokens, width));
    check_rows("dup", (dup.rows(), dup.width()), (tokens, width));
    crate::check::len("dy", dy, tokens * width);
    match on.into() {
        On::Cpu(cpu) => cpu::backward(cpu, dy, gate, up, dgate, dup),
        On::Device(unified) => unified.run(|call| {
            let (dy, gate, up) = (call.input(dy)?, call.rows(gate)?, call.rows(up)?);
            let (dgate, dup) = (call.rows_mut(dgate)?, call.rows_mut(dup)?);
            device::backward(call.device(), dy, gate, up, dgate, dup)
        }),
    }
}

#[track_caller]
fn check_rows(name: &str, found: (usize, usize), expected: (usize, usize)) {
    assert!(
        found == expected,
        "swiglu: {name} is {found:?}, gate is {expected:?}"
    );
}
