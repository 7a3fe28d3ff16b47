use super::{RopeDims, backward, fill_tables, forward, reference};
use crate::testing::{all_cpus, assert_close, assert_gradient, dot, random, wide};
use crate::{Cpu, RowsMut};

fn inv_freq(head_dim: usize) -> Vec<f64> {
    (0..head_dim / 2)
        .map(|i| 1e4f64.powf(-2.0 * i as f64 / head_dim as f64))
        .collect()
}

#[test]
fn reference_backward_is_the_derivative() {
    let dims = RopeDims {
        tokens: 3,
        heads: 2,
        head_dim: 4,
    };
    let (x, dy, f) = (wide(&random(1, 24)), wide(&random(2, 24)), inv_freq(4));
    let positions = [0, 7, 2];
    let dx = reference::rotate(&dims, &positions, &f, 1.2, -1.0, &dy);
    assert_gradient("dx", &x, &dx, |x| {
        dot(&reference::rotate(&dims, &positions, &f, 1.2, 1.0, x), &dy)
    });
}

#[test]
fn both_directions_agree_with_the_reference() {
    for cpu in all_cpus() {
        for (tokens, heads, head_dim) in
            [(1, 1, 2), (40, 3, 64), (5, 2, 20), (70, 1, 128), (0, 2, 4)]
        {
            let dims = RopeDims {
                tokens,
                heads,
                head_dim,
            };
            let f = inv_freq(head_dim);
            let mut cos = vec![0.0; 100 * head_dim / 2];
            let mut sin = cos.clone();
            fill_tables(&f, 1.1, &mut cos, &mut sin);
            let positions: Vec<u32> = (0..tokens as u32).map(|t| t * 7 % 100).collect();
            let x = random(3, tokens * heads * head_dim);
            for sign in [1.0, -1.0] {
                let mut y = x.clone();
                let band = RowsMut::contiguous(&mut y, heads * head_dim);
                if sign > 0.0 {
                    forward(cpu, &dims, &positions, &cos, &sin, band);
                } else {
                    backward(cpu, &dims, &positions, &cos, &sin, band);
                }
                let expected = reference::rotate(&dims, &positions, &f, 1.1, sign, &wide(&x));
                assert_close("x", &y, &expected, 3e-7);
            }
        }
    }
}

#[test]
fn tables_keep_f64_angles_at_long_context() {
    let f = inv_freq(64);
    let mut cos = vec![0.0; 4096 * 32];
    let mut sin = cos.clone();
    fill_tables(&f, 1.0, &mut cos, &mut sin);
    for i in 0..32 {
        let angle = 4095.0 * f[i];
        assert!((f64::from(cos[4095 * 32 + i]) - angle.cos()).abs() <= 6e-8);
        assert!((f64::from(sin[4095 * 32 + i]) - angle.sin()).abs() <= 6e-8);
    }
}

#[test]
#[should_panic(expected = "position 4 of token 1 is beyond the table of 4")]
fn a_position_beyond_the_table_is_named() {
    let dims = RopeDims {
        tokens: 2,
        heads: 1,
        head_dim: 2,
    };
    let mut x = [0.0; 4];
    let x = RowsMut::contiguous(&mut x, 2);
    forward(Cpu::new(1), &dims, &[3, 4], &[0.0; 4], &[0.0; 4], x);
}
