//! Choice of experts and its gradient, in f32 and f64.

use drivetrain_kernels::cuda::ops::router::{
    Derivatives, Float, Routing, backward, expert_loads, forward, project_f64, project_f64_backward,
};
use drivetrain_kernels::cuda::{Buffer, CudaError, Device};
use drivetrain_kernels::ops::router::{RouterDims, reference};

use crate::testing::{assert_close, dot, random, wide};
use crate::{Case, filled, poisoned};

pub(crate) const CASES: &[Case] = &[
    ("router::both_rules", both_rules),
    ("router::ties_biases_and_nan", ties),
    ("router::loads", loads),
    ("router::logits_in_f64", project),
];

/// What [`forward`] fills.
struct Routed<F: Float> {
    probs: Buffer<F>,
    lse: Buffer<F>,
    experts: Buffer<u32>,
    weights: Buffer<f32>,
}

fn route<F: Float + From<f32>>(
    device: &Device,
    dims: &RouterDims,
    logits: &[F],
    bias: Option<&[f32]>,
) -> Result<Routed<F>, CudaError> {
    let (all, chosen) = (dims.tokens * dims.experts, dims.tokens * dims.top_k);
    let nan = F::from(f32::NAN);
    let mut routed = Routed {
        probs: filled(device, all, nan)?,
        lse: filled(device, dims.tokens, nan)?,
        experts: filled(device, chosen, u32::MAX)?,
        weights: poisoned(device, chosen)?,
    };
    let bias = bias.map(|bias| device.upload(bias)).transpose()?;
    let routing = Routing {
        probs: routed.probs.view_mut(),
        lse: routed.lse.view_mut(),
        experts: routed.experts.view_mut(),
        weights: routed.weights.view_mut(),
    };
    let bias = bias.as_ref().map(|bias| bias.view());
    forward(device, dims, device.upload(logits)?.view(), bias, routing)?;
    Ok(routed)
}

fn check<F: Float + From<f32> + Into<f64>>(
    device: &Device,
    dims: RouterDims,
    bias: Option<&[f32]>,
    tolerance: f64,
) -> Result<(), CudaError> {
    let (x, k) = (dims.experts, dims.top_k);
    let narrow = |x: &[F]| -> Vec<f32> { x.iter().map(|&x| x.into() as f32).collect() };
    let cast = |x: Vec<f32>| -> Vec<F> { x.into_iter().map(F::from).collect() };
    let logits = cast(random(1, dims.tokens * x).iter().map(|x| 4.0 * x).collect());
    let routed = route(device, &dims, &logits, bias)?;

    let (dw, dp) = (random(2, dims.tokens * k), cast(random(3, dims.tokens * x)));
    let dl = cast(random(4, dims.tokens));
    let (dw_device, dp_device, dl_device) = (
        device.upload(&dw)?,
        device.upload(&dp)?,
        device.upload(&dl)?,
    );
    let derivatives = Derivatives {
        probs: routed.probs.view(),
        experts: routed.experts.view(),
        weights: routed.weights.view(),
        d_weights: dw_device.view(),
        d_probs: Some(dp_device.view()),
        d_lse: Some(dl_device.view()),
    };
    let plain = Derivatives {
        d_probs: None,
        d_lse: None,
        ..derivatives
    };
    let nan = F::from(f32::NAN);
    let (mut dlogits, mut alone) = (
        filled(device, logits.len(), nan)?,
        filled(device, logits.len(), nan)?,
    );
    backward(device, &dims, &derivatives, dlogits.view_mut())?;
    backward(device, &dims, &plain, alone.view_mut())?;
    let (dlogits, alone) = (narrow(&dlogits.read()?), narrow(&alone.read()?));
    let (probs, lse) = (narrow(&routed.probs.read()?), narrow(&routed.lse.read()?));
    let (experts, weights) = (routed.experts.read()?, routed.weights.read()?);

    let bias: Vec<f64> = bias.map_or(vec![0.0; x], wide);
    for t in 0..dims.tokens {
        let l: Vec<f64> = logits[t * x..][..x].iter().map(|&l| l.into()).collect();
        let chosen = reference::choose(&l, &bias, k);
        let found: Vec<usize> = experts[t * k..][..k].iter().map(|&e| e as usize).collect();
        assert_eq!(found, chosen, "{dims:?} token {t}");
        let (p, row_lse) = reference::softmax(&l);
        assert_close("p", &probs[t * x..][..x], &p, tolerance);
        assert_close("lse", &lse[t..=t], &[row_lse], tolerance);
        let expected = reference::weights(&l, &chosen, dims.renormalise);
        assert_close("weights", &weights[t * k..][..k], &expected, tolerance);
        let (dw, dp) = (wide(&dw[t * k..][..k]), wide(&narrow(&dp[t * x..][..x])));
        let expected =
            reference::backward_row(&l, &chosen, dims.renormalise, &dw, &dp, dl[t].into());
        assert_close(
            "dlogits",
            &dlogits[t * x..][..x],
            &expected,
            2.0 * tolerance,
        );
        let none = vec![0.0; x];
        let expected = reference::backward_row(&l, &chosen, dims.renormalise, &dw, &none, 0.0);
        assert_close(
            "dlogits of weights",
            &alone[t * x..][..x],
            &expected,
            2.0 * tolerance,
        );
    }
    Ok(())
}

fn both_rules(device: &Device) -> Result<(), CudaError> {
    for (tokens, experts, top_k) in [
        (1, 1, 1),
        (5, 4, 1),
        (50, 8, 2),
        (20, 128, 8),
        (3, 5, 5),
        (0, 4, 2),
    ] {
        let bias: Vec<f32> = random(9, experts).iter().map(|b| 0.3 * b).collect();
        for renormalise in [false, true] {
            let dims = RouterDims {
                tokens,
                experts,
                top_k,
                renormalise,
            };
            for bias in [None, Some(bias.as_slice())] {
                check::<f32>(device, dims, bias, 1e-6)?;
                // The weights alone are rounded to f32.
                check::<f64>(device, dims, bias, 2e-7)?;
            }
        }
    }
    Ok(())
}

fn ties(device: &Device) -> Result<(), CudaError> {
    let dims = RouterDims {
        tokens: 2,
        experts: 5,
        top_k: 3,
        renormalise: true,
    };
    let logits = [1.0, 2.0, 1.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    let routed = route::<f32>(device, &dims, &logits, None)?;
    assert_eq!(routed.experts.read()?, [1, 3, 0, 0, 1, 2]);
    assert_close("even", &routed.weights.read()?[3..], &[1.0 / 3.0; 3], 1e-7);

    // A bias decides who is chosen and not the weight, also of an expert whose p is 0.
    let dims = RouterDims {
        tokens: 1,
        experts: 3,
        top_k: 2,
        renormalise: false,
    };
    let routed = route::<f32>(device, &dims, &[1.0, 0.0, -200.0], Some(&[0.0, 0.0, 5.0]))?;
    assert_eq!(routed.experts.read()?, [2, 0]);
    assert_close(
        "weights",
        &routed.weights.read()?,
        &[0.0, 0.731_058_578_6],
        1e-6,
    );
    let dims = RouterDims {
        top_k: 1,
        renormalise: true,
        ..dims
    };
    let routed = route::<f32>(device, &dims, &[1.0, 0.0, -200.0], Some(&[0.0, 0.0, 5.0]))?;
    assert_eq!(
        (routed.experts.read()?, routed.weights.read()?),
        (vec![2], vec![1.0])
    );

    let dims = RouterDims {
        tokens: 1,
        experts: 4,
        top_k: 3,
        renormalise: true,
    };
    for logits in [[f32::NAN; 4], [0.0, f32::NAN, 1.0, 2.0]] {
        let mut experts = route::<f32>(device, &dims, &logits, None)?.experts.read()?;
        experts.sort_unstable();
        experts.dedup();
        assert!(experts.len() == 3 && experts[2] < 4, "{experts:?}");
    }
    Ok(())
}

fn loads(device: &Device) -> Result<(), CudaError> {
    let dims = RouterDims {
        tokens: 300,
        experts: 6,
        top_k: 2,
        renormalise: false,
    };
    let logits = random(1, dims.tokens * dims.experts);
    let routed = route::<f32>(device, &dims, &logits, None)?;
    let (experts, probs) = (routed.experts.read()?, routed.probs.read()?);
    for tokens in [0..300, 7..9, 4..4] {
        let (mut counts, mut sums) = (filled(device, 6, 1u32)?, filled(device, 6, 0.5f64)?);
        let views = (counts.view_mut(), sums.view_mut());
        let (chosen, p) = (routed.experts.view(), routed.probs.view());
        expert_loads(device, &dims, tokens.clone(), chosen, p, views.0, views.1)?;
        let (counts, sums) = (counts.read()?, sums.read()?);
        for e in 0..6 {
            let slots = &experts[tokens.start * 2..tokens.end * 2];
            let count = slots.iter().filter(|&&chosen| chosen == e as u32).count();
            assert_eq!(counts[e] as usize, 1 + count, "{tokens:?}");
            let sum: f64 = tokens.clone().map(|t| f64::from(probs[t * 6 + e])).sum();
            assert!(
                (sums[e] - 0.5 - sum).abs() <= 1e-12 * (1.0 + sum),
                "{tokens:?}"
            );
        }
    }
    Ok(())
}

fn project(device: &Device) -> Result<(), CudaError> {
    for (tokens, experts, width) in [(1, 1, 1), (40, 3, 70), (5, 33, 300), (0, 4, 8)] {
        let dims = RouterDims {
            tokens,
            experts,
            top_k: 1,
            renormalise: false,
        };
        let (x, w) = (random(1, tokens * width), random(2, experts * width));
        let (x_device, w_device) = (device.upload(&x)?, device.upload(&w)?);
        let mut logits = filled(device, tokens * experts, f64::NAN)?;
        project_f64(
            device,
            &dims,
            x_device.view(),
            w_device.view(),
            logits.view_mut(),
        )?;
        let logits = logits.read()?;
        let dlogits = wide(&random(3, tokens * experts));
        let d_device = device.upload(&dlogits)?;
        let mut dx = filled(device, tokens * width, 0.5)?;
        let mut dw = filled(device, experts * width, 0.25)?;
        let (dx_view, dw_view) = (dx.view_mut(), Some(dw.view_mut()));
        let inputs = (d_device.view(), x_device.view(), w_device.view());
        project_f64_backward(
            device, &dims, inputs.0, inputs.1, inputs.2, dx_view, dw_view,
        )?;

        let (x, w) = (wide(&x), wide(&w));
        let (mut dx_ref, mut dw_ref) = (vec![0.5; x.len()], vec![0.25; w.len()]);
        for t in 0..tokens {
            for e in 0..experts {
                let at = t * experts + e;
                let sum = dot(&x[t * width..][..width], &w[e * width..][..width]);
                assert!((logits[at] - sum).abs() <= 1e-12);
                for d in 0..width {
                    dx_ref[t * width + d] += dlogits[at] * w[e * width + d];
                    dw_ref[e * width + d] += dlogits[at] * x[t * width + d];
                }
            }
        }
        assert_close("dx", &dx.read()?, &dx_ref, 1e-7);
        assert_close("dweight", &dw.read()?, &dw_ref, 1e-7);
    }
    Ok(())
}
