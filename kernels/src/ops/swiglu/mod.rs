//! SwiGLU (Shazeer 2020): y = silu(gate) up, with silu(x) = x / (1 + e^-x).
//!
//! gate, up `[T, F]`, two buffers or bands of one `[T, 2F]`; y `[T, F]` contiguous. f32. Backward, with
//! s = sigmoid(gate): dgate = dy up s (1 + gate (1 - s)), dup = dy gate s. No scratch.

mod cpu;
pub mod reference;
#[cfg(test)]
mod tests;

use crate::{Cpu, Rows, RowsMut};

/// y = silu(gate) up.
#[track_caller]
pub fn forward(
    cpu: Cpu,
    gate: Rows<'_>, // [T, F]
    up: Rows<'_>,   // [T, F]
    y: &mut [f32],  // [T, F]
) {
    let (tokens, width) = (gate.rows(), gate.width());
    check_rows("up", (up.rows(), up.width()), (tokens, width));
    crate::check::len("y", y, tokens * width);
    cpu::forward(cpu, gate, up, y);
}

/// dgate and dup from dy and the inputs of the forward pass; both overwritten.
#[track_caller]
pub fn backward(
    cpu: Cpu,
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
    cpu::backward(cpu, dy, gate, up, dgate, dup);
}

#[track_caller]
fn check_rows(name: &str, found: (usize, usize), expected: (usize, usize)) {
    assert!(
        found == expected,
        "swiglu: {name} is {found:?}, gate is {expected:?}"
    );
}
