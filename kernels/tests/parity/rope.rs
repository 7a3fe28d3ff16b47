//! Rotation both ways, in bands of a wider buffer too.

use drivetrain_kernels::cuda::ops::rope::{backward, forward};
use drivetrain_kernels::cuda::{CudaError, Device};
use drivetrain_kernels::ops::rope::{RopeDims, fill_tables, reference};

use crate::Case;
use crate::testing::{assert_close, random, wide};

pub(crate) const CASES: &[Case] = &[
    ("rope::both_directions", both_directions),
    ("rope::a_position_beyond_the_table_is_nan", beyond),
];

fn both_directions(device: &Device) -> Result<(), CudaError> {
    for (tokens, heads, head_dim) in [(1, 1, 2), (40, 3, 64), (5, 2, 20), (70, 1, 128), (0, 2, 4)] {
        let dims = RopeDims {
            tokens,
            heads,
            head_dim,
        };
        let inv_freq: Vec<f64> = (0..head_dim / 2)
            .map(|i| 1e4f64.powf(-2.0 * i as f64 / head_dim as f64))
            .collect();
        let mut cos = vec![0.0; 100 * head_dim / 2];
        let mut sin = cos.clone();
        fill_tables(&inv_freq, 1.1, &mut cos, &mut sin);
        let positions: Vec<u32> = (0..tokens as u32).map(|t| t * 7 % 100).collect();
        let (cos, sin) = (device.upload(&cos)?, device.upload(&sin)?);
        let at = device.upload(&positions)?;
        // A band with a column before and two behind.
        let width = heads * head_dim;
        let x = random(3, tokens * (width + 3));
        let band = |x: &[f32]| -> Vec<f32> {
            x.chunks(width + 3)
                .flat_map(|row| row[1..=width].to_vec())
                .collect()
        };
        for sign in [1.0, -1.0] {
            let mut y = device.upload(&x)?;
            let [_, rows] = y.rows_mut(width + 3).split_columns([1, width]);
            let rotate = if sign > 0.0 { forward } else { backward };
            rotate(device, &dims, at.view(), cos.view(), sin.view(), rows)?;
            let y = y.read()?;
            let expected =
                reference::rotate(&dims, &positions, &inv_freq, 1.1, sign, &wide(&band(&x)));
            assert_close("x", &band(&y), &expected, 3e-7);
            for (before, after) in x.chunks(width + 3).zip(y.chunks(width + 3)) {
                assert_eq!(
                    (before[0], &before[width + 1..]),
                    (after[0], &after[width + 1..])
                );
            }
        }
    }
    Ok(())
}

fn beyond(device: &Device) -> Result<(), CudaError> {
    let dims = RopeDims {
        tokens: 2,
        heads: 1,
        head_dim: 2,
    };
    let (mut x, table) = (device.upload(&[1.0; 4])?, device.upload(&[1.0; 4])?);
    let positions = device.upload(&[3, 4])?;
    forward(
        device,
        &dims,
        positions.view(),
        table.view(),
        table.view(),
        x.rows_mut(2),
    )?;
    let x = x.read()?;
    assert!(
        x[..2] == [0.0, 2.0] && x[2].is_nan() && x[3].is_nan(),
        "{x:?}"
    );
    Ok(())
}
