//! Rows to their experts and back.

use drivetrain_kernels::cuda::ops::permute::{
    Order, permute, permute_backward, sort, unpermute, unpermute_backward,
};
use drivetrain_kernels::cuda::{CudaError, Device};
use drivetrain_kernels::ops::permute::{PermuteDims, reference};

use crate::testing::{assert_close, random, wide};
use crate::{Case, filled, poisoned};

pub(crate) const CASES: &[Case] = &[("permute::to_their_experts_and_back", round_trip)];

fn round_trip(device: &Device) -> Result<(), CudaError> {
    for (tokens, top_k, width, num_experts) in [
        (1, 1, 1, 1),
        (40, 2, 33, 8),
        (100, 8, 16, 128),
        (300, 3, 70, 4),
        (9, 1, 5, 3),
        (0, 2, 4, 4),
    ] {
        let dims = PermuteDims {
            tokens,
            top_k,
            width,
        };
        check(device, dims, num_experts)?;
    }
    Ok(())
}

/// k different experts a token, some far more often than others and the last but one never.
fn choose(dims: &PermuteDims, num_experts: usize) -> Vec<u32> {
    let busy: Vec<u32> = (0..num_experts as u32)
        .filter(|&e| num_experts < 3 || e as usize != num_experts - 2)
        .collect();
    let pick = |t: usize, j: usize| busy[(t * t / 3 + j) % busy.len()];
    (0..dims.rows())
        .map(|slot| pick(slot / dims.top_k, slot % dims.top_k))
        .collect()
}

fn check(device: &Device, dims: PermuteDims, num_experts: usize) -> Result<(), CudaError> {
    let (len, rows) = (dims.tokens * dims.width, dims.rows());
    let experts = choose(&dims, num_experts);
    let experts_device = device.upload(&experts)?;
    let mut offsets = filled(device, num_experts + 1, u32::MAX)?;
    let (mut slots, mut row_of) = (
        filled(device, rows, u32::MAX)?,
        filled(device, rows, u32::MAX)?,
    );
    let views = (offsets.view_mut(), slots.view_mut(), row_of.view_mut());
    sort(device, experts_device.view(), views.0, views.1, views.2)?;
    let sorted = slots.read()?;
    let expected: Vec<u32> = reference::sorted_slots(&experts)
        .into_iter()
        .map(|slot| slot as u32)
        .collect();
    assert_eq!(sorted, expected);
    for (slot, row) in row_of.read()?.into_iter().enumerate() {
        assert_eq!(sorted[row as usize] as usize, slot);
    }
    let offsets = offsets.read()?;
    assert_eq!((offsets[0], offsets[num_experts] as usize), (0, rows));
    for (e, ends) in offsets.windows(2).enumerate() {
        let of_expert = |&s: &u32| experts[s as usize] == e as u32;
        assert!(
            sorted[ends[0] as usize..ends[1] as usize]
                .iter()
                .all(of_expert)
        );
    }

    let order = Order {
        slots: slots.view(),
        rows: row_of.view(),
    };
    let (x, w, dout) = (random(1, len), random(2, rows), random(3, len));
    let scale = random(4, num_experts);
    let (x_device, w_device) = (device.upload(&x)?, device.upload(&w)?);
    let dout_device = device.upload(&dout)?;
    // The experts of the test scale their rows, on the host.
    let through_experts = |mut y: Vec<f32>| {
        for (row, &slot) in y.chunks_mut(dims.width).zip(&sorted) {
            let factor = scale[experts[slot as usize] as usize];
            row.iter_mut().for_each(|y| *y *= factor);
        }
        device.upload(&y)
    };
    let mut y = poisoned(device, rows * dims.width)?;
    permute(device, &dims, &order, x_device.view(), y.view_mut())?;
    let y = through_experts(y.read()?)?;
    let (mut out, mut added) = (poisoned(device, len)?, filled(device, len, 0.5)?);
    unpermute(
        device,
        &dims,
        &order,
        y.view(),
        w_device.view(),
        false,
        out.view_mut(),
    )?;
    unpermute(
        device,
        &dims,
        &order,
        y.view(),
        w_device.view(),
        true,
        added.view_mut(),
    )?;
    let (mut dy, mut dw) = (
        poisoned(device, rows * dims.width)?,
        poisoned(device, rows)?,
    );
    unpermute_backward(
        device,
        &dims,
        &order,
        dout_device.view(),
        y.view(),
        w_device.view(),
        dy.view_mut(),
        dw.view_mut(),
    )?;
    let dy = through_experts(dy.read()?)?;
    let (mut dx, mut dx_added) = (poisoned(device, len)?, filled(device, len, 0.25)?);
    permute_backward(device, &dims, &order, dy.view(), false, dx.view_mut())?;
    permute_backward(device, &dims, &order, dy.view(), true, dx_added.view_mut())?;

    let (x, w, dout, scale) = (wide(&x), wide(&w), wide(&dout), wide(&scale));
    let plus = |x: &[f64], add: f64| -> Vec<f64> { x.iter().map(|x| x + add).collect() };
    let expected = reference::round_trip(&dims, &x, &experts, &w, &scale);
    assert_close("out", &out.read()?, &expected, 5e-7);
    assert_close("out added", &added.read()?, &plus(&expected, 0.5), 5e-7);
    let (dx_ref, dw_ref) = reference::round_trip_backward(&dims, &x, &experts, &w, &scale, &dout);
    assert_close("dx", &dx.read()?, &dx_ref, 5e-7);
    assert_close("dx added", &dx_added.read()?, &plus(&dx_ref, 0.25), 5e-7);
    assert_close("d_weights", &dw.read()?, &dw_ref, 5e-7);
    Ok(())
}
