//! Rows of logits, whole and in shards of the vocabulary.

use drivetrain_kernels::cuda::ops::cross_entropy::{
    Derivatives, backward, backward_in_place, combine, forward, forward_partial,
};
use drivetrain_kernels::cuda::{Buffer, CudaError, Device};
use drivetrain_kernels::ops::cross_entropy::{CrossEntropyDims, PARTIALS, reference};

use crate::testing::{assert_close, assert_within, random, wide};
use crate::{Case, filled, poisoned};

pub(crate) const CASES: &[Case] = &[
    ("cross_entropy::awkward_rows", awkward_rows),
    ("cross_entropy::shards", shards),
    (
        "cross_entropy::impossible_tokens_and_masked_rows",
        impossible,
    ),
    (
        "cross_entropy::a_sure_prediction_keeps_its_small_gradient",
        sure,
    ),
];

/// log_prob, entropy and lse of the rows.
struct Scores {
    log_prob: Buffer<f32>,
    entropy: Buffer<f32>,
    lse: Buffer<f64>,
}

impl Scores {
    fn new(device: &Device, rows: usize) -> Result<Self, CudaError> {
        Ok(Self {
            log_prob: poisoned(device, rows)?,
            entropy: poisoned(device, rows)?,
            lse: filled(device, rows, f64::NAN)?,
        })
    }

    fn forward(
        &mut self,
        device: &Device,
        dims: &CrossEntropyDims,
        logits: &Buffer<f32>,
        targets: &Buffer<u32>,
    ) -> Result<(), CudaError> {
        let (log_prob, lse) = (self.log_prob.view_mut(), self.lse.view_mut());
        let entropy = Some(self.entropy.view_mut());
        forward(
            device,
            dims,
            logits.view(),
            targets.view(),
            log_prob,
            entropy,
            lse,
        )
    }

    fn check(&self, rows: &[(f64, f64, f64)]) -> Result<(), CudaError> {
        let (log_prob, entropy, lse) = (
            self.log_prob.read()?,
            self.entropy.read()?,
            self.lse.read()?,
        );
        for (r, expected) in rows.iter().enumerate() {
            for (what, found, expected) in [
                ("log_prob", f64::from(log_prob[r]), expected.0),
                ("entropy", f64::from(entropy[r]), expected.1),
                ("lse", lse[r], expected.2),
            ] {
                let error = (found - expected).abs() / expected.abs().max(1e-2);
                assert!(
                    error <= 1e-6,
                    "{what}[{r}] {found} for {expected}, {error:e}"
                );
            }
        }
        Ok(())
    }
}

fn awkward_rows(device: &Device) -> Result<(), CudaError> {
    for (rows, vocab, temperature, spread) in [
        (1, 1, 1.0, 1.0),
        (5, 97, 1.0, 5.0),
        (4, 1009, 0.5, 20.0),
        (2, 5003, 1.0, 9.0),
        (3, 33, 2.0, 80.0),
        (0, 5, 1.0, 1.0),
    ] {
        let dims = CrossEntropyDims::whole(rows, vocab, temperature);
        let x: Vec<f32> = random(1, rows * vocab).iter().map(|x| spread * x).collect();
        let targets: Vec<u32> = (0..rows).map(|r| (r * 31 % vocab) as u32).collect();
        let (dl, de) = (random(2, rows), random(3, rows));
        let (mut logits, targets_device) = (device.upload(&x)?, device.upload(&targets)?);
        let mut scores = Scores::new(device, rows)?;
        scores.forward(device, &dims, &logits, &targets_device)?;
        assert_eq!(logits.read()?, x);
        let (mut alone, mut lse) = (poisoned(device, rows)?, filled(device, rows, f64::NAN)?);
        let (alone_view, lse_view) = (alone.view_mut(), lse.view_mut());
        forward(
            device,
            &dims,
            logits.view(),
            targets_device.view(),
            alone_view,
            None,
            lse_view,
        )?;
        assert_eq!(alone.read()?, scores.log_prob.read()?);

        let (dl_device, de_device) = (device.upload(&dl)?, device.upload(&de)?);
        let saved = Derivatives {
            lse: scores.lse.view(),
            d_log_prob: dl_device.view(),
            entropy: Some((scores.entropy.view(), de_device.view())),
        };
        let only_log_prob = Derivatives {
            entropy: None,
            ..saved
        };
        let (mut both, mut first) = (
            poisoned(device, rows * vocab)?,
            poisoned(device, rows * vocab)?,
        );
        let targets_view = targets_device.view();
        backward(
            device,
            &dims,
            logits.view(),
            targets_view,
            &saved,
            both.view_mut(),
        )?;
        backward(
            device,
            &dims,
            logits.view(),
            targets_view,
            &only_log_prob,
            first.view_mut(),
        )?;
        backward_in_place(device, &dims, logits.view_mut(), targets_view, &saved)?;
        let (both, first) = (both.read()?, first.read()?);
        assert_eq!(logits.read()?, both);

        let mut expected_rows = Vec::new();
        for r in 0..rows {
            let (x, t) = (wide(&x[r * vocab..][..vocab]), targets[r] as usize);
            let t64 = f64::from(temperature);
            expected_rows.push(reference::forward_row(&x, t, t64));
            let (dl, de) = (f64::from(dl[r]), f64::from(de[r]));
            let expected = reference::backward_row(&x, t, t64, dl, de);
            assert_close("dlogits", &both[r * vocab..][..vocab], &expected, 1e-6);
            let expected = reference::backward_row(&x, t, t64, dl, 0.0);
            assert_close(
                "dlogits of log_prob",
                &first[r * vocab..][..vocab],
                &expected,
                1e-6,
            );
        }
        scores.check(&expected_rows)?;
    }
    Ok(())
}

fn shards(device: &Device) -> Result<(), CudaError> {
    let (rows, vocab, temperature) = (12, 97, 0.6);
    let whole = CrossEntropyDims::whole(rows, vocab, temperature);
    let x: Vec<f32> = random(1, rows * vocab).iter().map(|x| 60.0 * x).collect();
    // The first and last id of every shard, and some between.
    let targets = [0, 24, 25, 32, 33, 47, 48, 49, 64, 65, 72, 96];
    let (dl, de) = (random(2, rows), random(3, rows));
    let targets_device = device.upload(&targets)?;
    let (dl_device, de_device) = (device.upload(&dl)?, device.upload(&de)?);
    for ends in [&[0, 97][..], &[0, 33, 65, 97], &[0, 0, 97, 97]] {
        let shards: Vec<CrossEntropyDims> = ends
            .windows(2)
            .map(|pair| CrossEntropyDims {
                first_id: pair[0],
                columns: pair[1] - pair[0],
                ..whole
            })
            .collect();
        let columns = |dims: &CrossEntropyDims| -> Vec<f32> {
            let span = dims.first_id..dims.first_id + dims.columns;
            x.chunks(vocab)
                .flat_map(|row| row[span.clone()].to_vec())
                .collect()
        };
        let mut partials = Vec::new();
        for dims in &shards {
            let mut part = filled(device, rows * PARTIALS, f64::NAN)?;
            let logits = device.upload(&columns(dims))?;
            let out = part.view_mut();
            forward_partial(
                device,
                dims,
                logits.view(),
                targets_device.view(),
                true,
                out,
            )?;
            partials.extend(part.read()?);
        }
        let partials = device.upload(&partials)?;
        let mut scores = Scores::new(device, rows)?;
        let (log_prob, lse) = (scores.log_prob.view_mut(), scores.lse.view_mut());
        let entropy = Some(scores.entropy.view_mut());
        combine(device, rows, partials.view(), log_prob, entropy, lse)?;
        let derivatives = Derivatives {
            lse: scores.lse.view(),
            d_log_prob: dl_device.view(),
            entropy: Some((scores.entropy.view(), de_device.view())),
        };
        let mut gradients = Vec::new();
        for dims in &shards {
            let mut logits = device.upload(&columns(dims))?;
            backward_in_place(
                device,
                dims,
                logits.view_mut(),
                targets_device.view(),
                &derivatives,
            )?;
            gradients.push(logits.read()?);
        }
        let mut expected_rows = Vec::new();
        for r in 0..rows {
            let (x, t) = (wide(&x[r * vocab..][..vocab]), targets[r] as usize);
            let t64 = f64::from(temperature);
            expected_rows.push(reference::forward_row(&x, t, t64));
            let gradient: Vec<f32> = shards
                .iter()
                .zip(&gradients)
                .flat_map(|(dims, g)| g[r * dims.columns..][..dims.columns].to_vec())
                .collect();
            let (dl, de) = (f64::from(dl[r]), f64::from(de[r]));
            let expected = reference::backward_row(&x, t, t64, dl, de);
            assert_close(
                &format!("dlogits[{r}] {ends:?}"),
                &gradient,
                &expected,
                1e-6,
            );
        }
        scores.check(&expected_rows)?;
    }
    Ok(())
}

fn impossible(device: &Device) -> Result<(), CudaError> {
    let dims = CrossEntropyDims::whole(3, 20, 0.7);
    let mut x = [0.5; 60];
    x[3] = f32::NEG_INFINITY;
    x[20..40].fill(f32::NAN);
    x[40..].fill(f32::NEG_INFINITY);
    x[59] = f32::NAN; // beside logits that cannot occur
    let (logits, targets) = (device.upload(&x)?, device.upload(&[0, 1, 2])?);
    let mut scores = Scores::new(device, 3)?;
    scores.forward(device, &dims, &logits, &targets)?;
    let (log_prob, entropy) = (scores.log_prob.read()?, scores.entropy.read()?);
    assert!(
        (f64::from(entropy[0]) - 19f64.ln()).abs() <= 1e-6,
        "{entropy:?}"
    );
    assert!(log_prob[1].is_nan() && entropy[1].is_nan() && log_prob[2].is_nan());
    let (dl, de) = (
        device.upload(&[1.0, 0.0, 0.0])?,
        device.upload(&[0.5, 0.0, 0.0])?,
    );
    let derivatives = Derivatives {
        lse: scores.lse.view(),
        d_log_prob: dl.view(),
        entropy: Some((scores.entropy.view(), de.view())),
    };
    let mut dlogits = poisoned(device, 60)?;
    backward(
        device,
        &dims,
        logits.view(),
        targets.view(),
        &derivatives,
        dlogits.view_mut(),
    )?;
    let dlogits = dlogits.read()?;
    assert!(dlogits[..20].iter().all(|x| x.is_finite()));
    assert_eq!(dlogits[3], 0.0);
    assert_eq!(dlogits[20..], [0.0; 40]);
    Ok(())
}

fn sure(device: &Device) -> Result<(), CudaError> {
    let dims = CrossEntropyDims::whole(1, 4, 1.0);
    let x = [30.0, 9.0, 8.0, 7.0];
    let (logits, targets) = (device.upload(&x)?, device.upload(&[0])?);
    let mut scores = Scores::new(device, 1)?;
    scores.forward(device, &dims, &logits, &targets)?;
    let dl = device.upload(&[1.0])?;
    let derivatives = Derivatives {
        lse: scores.lse.view(),
        d_log_prob: dl.view(),
        entropy: None,
    };
    let mut dlogits = poisoned(device, 4)?;
    backward(
        device,
        &dims,
        logits.view(),
        targets.view(),
        &derivatives,
        dlogits.view_mut(),
    )?;
    let expected = reference::backward_row(&wide(&x), 0, 1.0, 1.0, 0.0);
    assert_within("dlogits", &dlogits.read()?, &expected, 1e-6 * expected[0]);
    Ok(())
}
