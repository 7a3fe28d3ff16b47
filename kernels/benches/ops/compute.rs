//! Ops bound by arithmetic.

use drivetrain_kernels::ops::attention::{self, AttentionDims, Gradients, Inputs, Saved, Span};
use drivetrain_kernels::ops::linear::{self, LinearDims};
use drivetrain_kernels::{Rows, RowsMut};

use crate::report::{Report, Work};
use crate::{D, E, F, H, K, SEQUENCES, T, V, values};

pub(crate) fn linear(report: &mut Report<'_>) {
    for (name, inputs, outputs) in [
        ("qkv", D, (H + 2 * K) * E),
        ("out", D, D),
        ("gate_up", D, 2 * F),
        ("down", F, D),
        ("head", D, V),
    ] {
        let dims = LinearDims::new(T, inputs, outputs);
        let (x, w, dy) = (
            values(T * inputs),
            values(outputs * inputs),
            values(T * outputs),
        );
        let (mut y, mut dx, mut dw) = (dy.clone(), x.clone(), w.clone());
        let work = Work::Flops(2.0 * (T * inputs * outputs) as f64);
        report.run(&format!("linear/{name}/forward"), work, |cpu| {
            linear::forward(cpu, &dims, &x, &w, None, &mut y);
        });
        report.run(&format!("linear/{name}/backward_input"), work, |cpu| {
            linear::backward_input(cpu, &dims, &dy, &w, false, &mut dx);
        });
        report.run(&format!("linear/{name}/backward_weight"), work, |cpu| {
            linear::backward_weight(cpu, &dims, &dy, &x, true, &mut dw);
        });
    }
}

pub(crate) fn attention(report: &mut Report<'_>) {
    let starts: Vec<usize> = (0..=SEQUENCES).map(|b| b * T / SEQUENCES).collect();
    let ragged = [0, 512, 572, 702, 1002, 1092, 1312, 1352, 1532];
    for (name, cu_seqlens, head_dim, window) in [
        ("e64", starts.as_slice(), E, None),
        ("e64_ragged", &ragged, E, None),
        ("e64_window128", &starts, E, Some(128)),
        ("e128", &starts, 2 * E, None),
        ("e16", &starts, E / 4, None),
    ] {
        let spans = Span::packed(cu_seqlens);
        let dims = AttentionDims {
            spans: &spans,
            heads: H,
            kv_heads: K,
            head_dim,
            scale: (head_dim as f32).sqrt().recip(),
            window,
        };
        let (tokens, q, kv) = (*cu_seqlens.last().unwrap(), H * head_dim, K * head_dim);
        let width = q + 2 * kv;
        let (qkv, dout) = (values(tokens * width), values(tokens * q));
        let rows = Rows::contiguous(&qkv, width);
        let inputs = Inputs {
            q: rows.columns(0..q),
            k: rows.columns(q..q + kv),
            v: rows.columns(q + kv..width),
        };
        let (mut out, mut lse) = (vec![0.0; tokens * q], vec![0.0; tokens * H]);
        let mut dqkv = vec![0.0; tokens * width];
        let mut scratch = vec![0.0; dims.backward_scratch_len(report.cpu)];
        let flops = dims.forward_flops();
        report.run(
            &format!("attention/{name}/forward"),
            Work::Flops(flops),
            |cpu| {
                let out = RowsMut::contiguous(&mut out, q);
                attention::forward(cpu, &dims, &inputs, false, out, &mut lse, &mut scratch);
            },
        );
        report.run(
            &format!("attention/{name}/backward"),
            Work::Flops(2.5 * flops),
            |cpu| {
                let saved = Saved {
                    out: Rows::contiguous(&out, q),
                    lse: &lse,
                    dout: Rows::contiguous(&dout, q),
                };
                let [dq, dk, dv] = RowsMut::contiguous(&mut dqkv, width).split_columns([q, kv, kv]);
                let gradients = Gradients { dq, dk, dv };
                attention::backward(cpu, &dims, &inputs, &saved, false, gradients, &mut scratch);
            },
        );
    }
}
