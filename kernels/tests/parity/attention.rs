//! Attention over whole sequences and over pieces that are merged.

use drivetrain_kernels::cuda::ops::attention::{Gradients, Inputs, Plan, Saved, backward, forward};
use drivetrain_kernels::cuda::{CudaError, Device};
use drivetrain_kernels::ops::attention::{AttentionDims, Span, reference};

use crate::testing::{assert_close, random, wide};
use crate::{Case, filled, poisoned};

pub(crate) const CASES: &[Case] = &[
    ("attention::packed_heads_and_windows", packed),
    ("attention::wide_heads", wide_heads),
    ("attention::large_scores_stay_stable", large_scores),
    ("attention::pieces_are_merged", pieces),
    (
        "attention::rows_without_anything_to_see_are_zero",
        idle_rows,
    ),
];

const BASE: AttentionDims<'static> = AttentionDims {
    spans: &[],
    heads: 4,
    kv_heads: 2,
    head_dim: 3,
    scale: 0.6,
    window: None,
};

/// q, k and v in one fused buffer, as a projection leaves them, and the gradient of out.
struct Data {
    tokens: usize,
    widths: [usize; 3],
    qkv: Vec<f32>,
    dout: Vec<f32>,
}

impl Data {
    fn new(dims: &AttentionDims<'_>, tokens: usize, stretch: f32) -> Self {
        let (width, kv_width) = (dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim);
        let qkv = random(1, tokens * (width + 2 * kv_width));
        Self {
            tokens,
            widths: [width, kv_width, kv_width],
            qkv: qkv.iter().map(|x| x * stretch).collect(),
            dout: random(2, tokens * width),
        }
    }

    fn row(&self) -> usize {
        self.widths.iter().sum()
    }

    /// The columns of q, k or v in a fused buffer.
    fn band(&self, which: usize, fused: &[f32]) -> Vec<f32> {
        let start: usize = self.widths[..which].iter().sum();
        let band = start..start + self.widths[which];
        fused
            .chunks(self.row())
            .flat_map(|row| row[band.clone()].to_vec())
            .collect()
    }

    /// Runs the spans of `dims`, once, or piece by piece in calls of their own, and compares with `whole`.
    fn check(
        &self,
        device: &Device,
        calls: &[AttentionDims<'_>],
        whole: &AttentionDims<'_>,
        tolerance: f64,
    ) -> Result<(), CudaError> {
        let merge = calls.len() > 1 || calls[0].spans != whole.spans;
        let what = format!("{whole:?}, {} calls", calls.len());
        let [width, kv_width, _] = self.widths;
        let qkv = device.upload(&self.qkv)?;
        let rows = qkv.rows(self.row());
        let inputs = Inputs {
            q: rows.columns(0..width),
            k: rows.columns(width..width + kv_width),
            v: rows.columns(width + kv_width..width + 2 * kv_width),
        };
        let start = |empty: f32| if merge { empty } else { f32::NAN };
        let mut out = filled(device, self.tokens * width, start(0.0))?;
        let mut lse = filled(device, self.tokens * whole.heads, start(f32::NEG_INFINITY))?;
        let mut d = filled(device, self.qkv.len(), start(0.0))?;
        let dout = device.upload(&self.dout)?;
        let plans = calls
            .iter()
            .map(|dims| Plan::new(device, dims, self.tokens, self.tokens));
        let plans: Vec<Plan> = plans.collect::<Result<_, _>>()?;
        for plan in &plans {
            forward(
                device,
                plan,
                &inputs,
                merge,
                out.rows_mut(width),
                lse.view_mut(),
            )?;
        }
        for plan in &plans {
            let [dq, dk, dv] = d.rows_mut(self.row()).split_columns(self.widths);
            let saved = Saved {
                out: out.rows(width),
                lse: lse.view(),
                dout: dout.rows(width),
            };
            let mut scratch = poisoned(device, plan.backward_scratch_len())?;
            let gradients = Gradients { dq, dk, dv };
            backward(
                device,
                plan,
                &inputs,
                &saved,
                merge,
                gradients,
                scratch.view_mut(),
            )?;
        }
        let [q, k, v] = [0, 1, 2].map(|which| wide(&self.band(which, &self.qkv)));
        let (out_ref, lse_ref) = reference::forward(whole, &q, &k, &v);
        assert_close(&format!("out {what}"), &out.read()?, &out_ref, tolerance);
        assert_close(&format!("lse {what}"), &lse.read()?, &lse_ref, tolerance);
        let expected = reference::backward(whole, &q, &k, &v, &wide(&self.dout));
        let d = d.read()?;
        for (which, (name, expected)) in
            [("dq", expected.0), ("dk", expected.1), ("dv", expected.2)]
                .into_iter()
                .enumerate()
        {
            assert_close(
                &format!("{name} {what}"),
                &self.band(which, &d),
                &expected,
                tolerance,
            );
        }
        Ok(())
    }
}

/// Starts of the sequences, H, K, E and the window.
type Shape = (&'static [usize], usize, usize, usize, Option<usize>);

fn whole_sequences(device: &Device, cases: &[Shape]) -> Result<(), CudaError> {
    for &(cu_seqlens, heads, kv_heads, head_dim, window) in cases {
        let spans = Span::packed(cu_seqlens);
        let dims = AttentionDims {
            spans: &spans,
            heads,
            kv_heads,
            head_dim,
            scale: (head_dim as f32).sqrt().recip(),
            window,
        };
        let tokens = cu_seqlens.last().copied().unwrap_or(0);
        Data::new(&dims, tokens, 1.0).check(device, &[dims], &dims, 2e-6)?;
    }
    Ok(())
}

fn packed(device: &Device) -> Result<(), CudaError> {
    whole_sequences(
        device,
        &[
            (&[0, 3, 3, 8], 4, 2, 3, None),
            (&[0, 1], 1, 1, 1, None),
            (&[0, 64, 129], 2, 1, 16, None),
            (&[0, 40, 41, 130], 2, 2, 20, Some(7)),
            (&[0, 150], 1, 1, 20, Some(70)),
            (&[0, 100], 1, 1, 48, Some(1)),
            (&[0, 0], 2, 1, 8, None),
        ],
    )
}

/// The forms for head dims above 64 and above 128.
fn wide_heads(device: &Device) -> Result<(), CudaError> {
    whole_sequences(
        device,
        &[
            (&[0, 70, 70], 2, 1, 80, None),
            (&[0, 66], 1, 1, 128, Some(1000)),
            (&[0, 40], 2, 2, 200, None),
            (&[0, 35], 1, 1, 256, Some(9)),
        ],
    )
}

fn large_scores(device: &Device) -> Result<(), CudaError> {
    let spans = Span::packed(&[0, 100]);
    let dims = AttentionDims {
        spans: &spans,
        head_dim: 16,
        scale: 1.0,
        ..BASE
    };
    // Scores reach hundreds, so their own f32 rounding is some 1e-5.
    Data::new(&dims, 100, 8.0).check(device, &[dims], &dims, 1e-4)
}

/// Keys that arrive in three pieces, as spans of one call and as calls of their own.
fn pieces(device: &Device) -> Result<(), CudaError> {
    for window in [None, Some(30)] {
        let packed = Span::packed(&[0, 75, 90]);
        let whole = AttentionDims {
            spans: &packed,
            window,
            ..BASE
        };
        let piece = |keys: std::ops::Range<usize>| Span {
            queries: 0..75,
            offset: -(keys.start as isize),
            keys,
        };
        let parts = [
            vec![piece(0..20), Span::causal(75..90)],
            vec![piece(20..46)],
            vec![piece(46..75)],
        ];
        let together = parts.concat();
        let data = Data::new(&whole, 90, 1.0);
        let dims = |spans| AttentionDims { spans, ..whole };
        data.check(device, &[dims(&together)], &whole, 2e-6)?;
        let apart: Vec<_> = parts.iter().map(|spans| dims(spans)).collect();
        data.check(device, &apart, &whole, 2e-6)?;
    }
    Ok(())
}

fn idle_rows(device: &Device) -> Result<(), CudaError> {
    // Queries 0, 1 and keys 0, 1 are in no span; 2 and 3 lie before every key; keys 7, 8 after every query.
    let spans = [Span {
        queries: 2..8,
        keys: 2..9,
        offset: -2,
    }];
    let dims = AttentionDims {
        spans: &spans,
        ..BASE
    };
    let data = Data::new(&dims, 9, 1.0);
    let [q, k, v] = [0, 1, 2].map(|which| wide(&data.band(which, &data.qkv)));
    let (_, lse) = reference::forward(&dims, &q, &k, &v);
    assert!(lse[3 * BASE.heads] == f64::NEG_INFINITY && lse[4 * BASE.heads].is_finite());
    let (out, _) = run_idle(device, &dims, &data)?;
    for t in 0..9 {
        let row = &out[t * 12..][..12];
        assert_eq!(
            row.iter().all(|&x| x == 0.0),
            !(4..8).contains(&t),
            "out[{t}] {row:?}"
        );
    }
    Ok(())
}

/// out and lse where not every query sees something; gradients are finite and idle where they should be.
fn run_idle(
    device: &Device,
    dims: &AttentionDims<'_>,
    data: &Data,
) -> Result<(Vec<f32>, Vec<f32>), CudaError> {
    let plan = Plan::new(device, dims, data.tokens, data.tokens)?;
    let [width, kv_width, _] = data.widths;
    let qkv = device.upload(&data.qkv)?;
    let rows = qkv.rows(data.row());
    let inputs = Inputs {
        q: rows.columns(0..width),
        k: rows.columns(width..width + kv_width),
        v: rows.columns(width + kv_width..width + 2 * kv_width),
    };
    let (mut out, mut lse) = (
        poisoned(device, data.tokens * width)?,
        poisoned(device, data.tokens * dims.heads)?,
    );
    forward(
        device,
        &plan,
        &inputs,
        false,
        out.rows_mut(width),
        lse.view_mut(),
    )?;
    let mut d = poisoned(device, data.qkv.len())?;
    let [dq, dk, dv] = d.rows_mut(data.row()).split_columns(data.widths);
    let dout = device.upload(&data.dout)?;
    let saved = Saved {
        out: out.rows(width),
        lse: lse.view(),
        dout: dout.rows(width),
    };
    let mut scratch = poisoned(device, plan.backward_scratch_len())?;
    let gradients = Gradients { dq, dk, dv };
    backward(
        device,
        &plan,
        &inputs,
        &saved,
        false,
        gradients,
        scratch.view_mut(),
    )?;
    let d = d.read()?;
    for t in 0..data.tokens {
        let idle = |which: usize| {
            let band = data.band(which, &d);
            let width = data.widths[which];
            band[t * width..][..width].iter().all(|&x| x == 0.0)
        };
        assert_eq!(idle(0), !(4..8).contains(&t), "dq[{t}]");
        assert_eq!(idle(1), !(2..6).contains(&t), "dk[{t}]");
        assert_eq!(idle(2), !(2..6).contains(&t), "dv[{t}]");
    }
    Ok((out.read()?, lse.read()?))
}
