use super::{
    Order, PermuteDims, permute, permute_backward, reference, sort, unpermute, unpermute_backward,
};
use crate::Cpu;
use crate::testing::{all_cpus, assert_close, assert_gradient, dot, random, wide};

#[test]
fn reference_backward_is_the_derivative() {
    let dims = PermuteDims {
        tokens: 3,
        top_k: 2,
        width: 2,
    };
    let (x, w) = (wide(&random(1, 6)), wide(&random(2, 6)));
    let (dout, scale) = (wide(&random(3, 6)), wide(&random(4, 3)));
    let experts = [2, 0, 0, 2, 1, 2];
    let (dx, dw) = reference::round_trip_backward(&dims, &x, &experts, &w, &scale, &dout);
    assert_gradient("dx", &x, &dx, |x| {
        dot(
            &reference::round_trip(&dims, x, &experts, &w, &scale),
            &dout,
        )
    });
    assert_gradient("d_weights", &w, &dw, |w| {
        dot(
            &reference::round_trip(&dims, &x, &experts, w, &scale),
            &dout,
        )
    });
}

/// k different experts a token, some experts far more often than others and the last but one never.
fn experts(dims: &PermuteDims, num_experts: usize) -> Vec<u32> {
    let busy: Vec<u32> = (0..num_experts as u32)
        .filter(|&e| num_experts < 3 || e as usize != num_experts - 2)
        .collect();
    let pick = |t: usize, j: usize| busy[(t * t / 3 + j) % busy.len()];
    (0..dims.rows())
        .map(|slot| pick(slot / dims.top_k, slot % dims.top_k))
        .collect()
}

fn check(cpu: Cpu, dims: PermuteDims, num_experts: usize) {
    let (len, rows) = (dims.tokens * dims.width, dims.rows());
    let experts = experts(&dims, num_experts);
    let mut offsets = vec![usize::MAX; num_experts + 1];
    let (mut slots, mut row_of) = (vec![u32::MAX; rows], vec![u32::MAX; rows]);
    sort(&experts, &mut offsets, &mut slots, &mut row_of);
    let sorted: Vec<usize> = slots.iter().map(|&s| s as usize).collect();
    assert_eq!(sorted, reference::sorted_slots(&experts));
    assert_eq!((offsets[0], offsets[num_experts]), (0, rows));
    for (e, ends) in offsets.windows(2).enumerate() {
        let of_expert = |&s: &u32| experts[s as usize] == e as u32;
        assert!(slots[ends[0]..ends[1]].iter().all(of_expert));
    }

    let order = Order {
        slots: &slots,
        rows: &row_of,
    };
    let (x, w, dout) = (random(1, len), random(2, rows), random(3, len));
    let scale = random(4, num_experts);
    // The experts of the test scale their rows.
    let through_experts = |y: &mut [f32]| {
        for (row, &slot) in y.chunks_mut(dims.width).zip(&slots) {
            row.iter_mut()
                .for_each(|y| *y *= scale[experts[slot as usize] as usize]);
        }
    };
    let mut y = vec![f32::NAN; rows * dims.width];
    permute(cpu, &dims, &order, &x, &mut y);
    through_experts(&mut y);
    let mut out = vec![f32::NAN; len];
    unpermute(cpu, &dims, &order, &y, &w, false, &mut out);
    let mut added = vec![0.5; len];
    unpermute(cpu, &dims, &order, &y, &w, true, &mut added);
    let (mut dy, mut dw) = (vec![f32::NAN; y.len()], vec![f32::NAN; rows]);
    unpermute_backward(cpu, &dims, &order, &dout, &y, &w, &mut dy, &mut dw);
    through_experts(&mut dy);
    let mut dx = vec![f32::NAN; len];
    permute_backward(cpu, &dims, &order, &dy, false, &mut dx);
    let mut dx_added = vec![0.25; len];
    permute_backward(cpu, &dims, &order, &dy, true, &mut dx_added);

    let (x, w, dout, scale) = (wide(&x), wide(&w), wide(&dout), wide(&scale));
    let plus = |x: &[f64], add: f64| -> Vec<f64> { x.iter().map(|x| x + add).collect() };
    let expected = reference::round_trip(&dims, &x, &experts, &w, &scale);
    assert_close("out", &out, &expected, 5e-7);
    assert_close("out added", &added, &plus(&expected, 0.5), 5e-7);
    let (dx_ref, dw_ref) = reference::round_trip_backward(&dims, &x, &experts, &w, &scale, &dout);
    assert_close("dx", &dx, &dx_ref, 5e-7);
    assert_close("dx added", &dx_added, &plus(&dx_ref, 0.25), 5e-7);
    assert_close("d_weights", &dw, &dw_ref, 5e-7);
}

#[test]
fn rows_go_to_their_experts_and_back() {
    for cpu in all_cpus() {
        for (tokens, top_k, width, num_experts) in [
            (1, 1, 1, 1),
            (40, 2, 33, 8),
            (100, 8, 16, 128),
            (7, 3, 70, 4),
            (9, 1, 5, 3),
            (0, 2, 4, 4),
        ] {
            let dims = PermuteDims {
                tokens,
                top_k,
                width,
            };
            check(cpu, dims, num_experts);
        }
    }
}

#[test]
#[should_panic(expected = "expert 3 of slot 1 is not below 3")]
fn an_expert_out_of_range_is_named() {
    sort(&[0, 3], &mut [0; 4], &mut [0; 2], &mut [0; 2]);
}

#[test]
#[should_panic(expected = "slot 1 has row 0, which is not of that slot")]
fn two_slots_with_one_row_are_refused() {
    let dims = PermuteDims {
        tokens: 2,
        top_k: 1,
        width: 1,
    };
    let order = Order {
        slots: &[0, 1],
        rows: &[0, 0],
    };
    permute(Cpu::new(1), &dims, &order, &[0.0; 2], &mut [0.0; 2]);
}
