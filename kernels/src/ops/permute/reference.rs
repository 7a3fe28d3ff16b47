//! The op in f64, without sorting: by the expert of every slot.

use super::PermuteDims;

/// Slots in the order of their experts, within an expert in their own order.
pub fn sorted_slots(experts: &[u32]) -> Vec<usize> {
    let mut slots: Vec<usize> = (0..experts.len()).collect();
    slots.sort_by_key(|&slot| experts[slot]);
    slots
}

/// out, where every token's rows went through f and came back weighted: f(x) is `scale[expert]` x.
pub fn round_trip(
    dims: &PermuteDims,
    x: &[f64],
    experts: &[u32],
    weights: &[f64],
    scale: &[f64],
) -> Vec<f64> {
    let mut out = vec![0.0; x.len()];
    for (slot, (&e, w)) in experts.iter().zip(weights).enumerate() {
        let t = slot / dims.top_k;
        for d in t * dims.width..(t + 1) * dims.width {
            out[d] += w * scale[e as usize] * x[d];
        }
    }
    out
}

/// dx and d_weights of [`round_trip`].
pub fn round_trip_backward(
    dims: &PermuteDims,
    x: &[f64],
    experts: &[u32],
    weights: &[f64],
    scale: &[f64],
    dout: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let (mut dx, mut d_weights) = (vec![0.0; x.len()], vec![0.0; weights.len()]);
    for (slot, (&e, w)) in experts.iter().zip(weights).enumerate() {
        let t = slot / dims.top_k;
        for d in t * dims.width..(t + 1) * dims.width {
            dx[d] += w * scale[e as usize] * dout[d];
            d_weights[slot] += scale[e as usize] * x[d] * dout[d];
        }
    }
    (dx, d_weights)
}
