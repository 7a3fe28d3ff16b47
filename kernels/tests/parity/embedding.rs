//! Rows by id, over whole tables and shards of them.

use drivetrain_kernels::cuda::ops::embedding::{backward, forward};
use drivetrain_kernels::cuda::{CudaError, Device};
use drivetrain_kernels::ops::embedding::{EmbeddingDims, reference};

use crate::testing::{assert_close, random, wide};
use crate::{Case, filled, poisoned};

pub(crate) const CASES: &[Case] = &[
    ("embedding::repeated_ids", repeated_ids),
    ("embedding::shards", shards),
    ("embedding::an_id_out_of_the_table_is_nan", out_of_the_table),
];

fn repeated_ids(device: &Device) -> Result<(), CudaError> {
    for (tokens, vocab, width) in [
        (1, 1, 1),
        (300, 13, 70),
        (33, 97, 3),
        (600, 2, 300),
        (0, 5, 8),
    ] {
        let dims = EmbeddingDims::whole(tokens, vocab, width);
        let (table, dy) = (random(1, vocab * width), random(2, tokens * width));
        let ids: Vec<u32> = (0..tokens).map(|t| (t * t % vocab) as u32).collect();
        let ids_device = device.upload(&ids)?;
        let mut y = poisoned(device, tokens * width)?;
        forward(
            device,
            &dims,
            device.upload(&table)?.view(),
            ids_device.view(),
            y.view_mut(),
        )?;
        assert_close(
            "y",
            &y.read()?,
            &reference::forward(&dims, &wide(&table), &ids),
            0.0,
        );
        let mut dtable = filled(device, vocab * width, 0.5)?;
        backward(
            device,
            &dims,
            device.upload(&dy)?.view(),
            ids_device.view(),
            dtable.view_mut(),
        )?;
        let expected: Vec<f64> = reference::backward(&dims, &wide(&dy), &ids)
            .iter()
            .map(|x| x + 0.5)
            .collect();
        assert_close("dtable", &dtable.read()?, &expected, 1e-6);
    }
    Ok(())
}

fn shards(device: &Device) -> Result<(), CudaError> {
    let (tokens, vocab, width) = (40, 13, 5);
    let whole = EmbeddingDims::whole(tokens, vocab, width);
    let ids: Vec<u32> = (0..tokens).map(|t| (t * t % vocab) as u32).collect();
    let (table, dy) = (random(1, vocab * width), random(2, tokens * width));
    let (ids_device, dy_device) = (device.upload(&ids)?, device.upload(&dy)?);
    let (mut sum, mut gradient) = (vec![0.0; tokens * width], Vec::new());
    for pair in [0, 5, 5, 9, 13].windows(2) {
        let dims = EmbeddingDims {
            first_id: pair[0],
            rows: pair[1] - pair[0],
            ..whole
        };
        let part = device.upload(&table[pair[0] * width..pair[1] * width])?;
        let mut y = poisoned(device, tokens * width)?;
        forward(device, &dims, part.view(), ids_device.view(), y.view_mut())?;
        sum.iter_mut().zip(y.read()?).for_each(|(sum, y)| *sum += y);
        let mut dtable = device.zeros(dims.rows * width)?;
        backward(
            device,
            &dims,
            dy_device.view(),
            ids_device.view(),
            dtable.view_mut(),
        )?;
        gradient.extend(dtable.read()?);
    }
    assert_close(
        "y",
        &sum,
        &reference::forward(&whole, &wide(&table), &ids),
        0.0,
    );
    assert_close(
        "dtable",
        &gradient,
        &reference::backward(&whole, &wide(&dy), &ids),
        1e-6,
    );
    Ok(())
}

fn out_of_the_table(device: &Device) -> Result<(), CudaError> {
    let dims = EmbeddingDims::whole(2, 3, 2);
    let (table, ids) = (device.upload(&[1.0; 6])?, device.upload(&[3, 2])?);
    let mut y = poisoned(device, 4)?;
    forward(device, &dims, table.view(), ids.view(), y.view_mut())?;
    let found = y.read()?;
    assert!(
        found[0].is_nan() && found[1].is_nan() && found[2..] == [1.0; 2],
        "{found:?}"
    );
    let mut dtable = device.zeros(6)?;
    backward(
        device,
        &dims,
        device.upload(&[1.0; 4])?.view(),
        ids.view(),
        dtable.view_mut(),
    )?;
    assert_eq!(dtable.read()?, [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]);
    Ok(())
}
