//! Ops bound by memory: bytes count every operand once for each time it is read or written.

use drivetrain_kernels::ops::adamw::{self, AdamW};
use drivetrain_kernels::ops::cross_entropy::{self, CrossEntropyDims, Derivatives};
use drivetrain_kernels::ops::embedding::{self, EmbeddingDims};
use drivetrain_kernels::ops::rms_norm::{self, RmsNormDims};
use drivetrain_kernels::ops::rope::{self, RopeDims};
use drivetrain_kernels::ops::{elementwise, linear, swiglu};
use drivetrain_kernels::{Rows, RowsMut};

use crate::report::{Report, Work};
use crate::{D, E, F, H, K, T, V, values};

/// Bytes of this many f32.
fn floats(count: usize) -> Work {
    Work::Bytes(4 * count)
}

pub(crate) fn rows(report: &mut Report<'_>) {
    let dims = RmsNormDims::new(T, D, 1e-5);
    let (x, residual, w, dy) = (values(T * D), values(T * D), values(D), values(T * D));
    let (mut h, mut y, mut inv_rms) = (x.clone(), x.clone(), vec![1.0; T]);
    let (mut dx, mut dw) = (x.clone(), w.clone());
    report.run("rms_norm/forward_residual", floats(4 * T * D), |cpu| {
        rms_norm::forward_residual(cpu, &dims, &x, &residual, &w, &mut h, &mut y, &mut inv_rms);
    });
    report.run("rms_norm/backward", floats(4 * T * D), |cpu| {
        let (dy, h) = (Rows::contiguous(&dy, D), Rows::contiguous(&h, D));
        let dx = RowsMut::contiguous(&mut dx, D);
        rms_norm::backward(cpu, &dims, dy, h, &w, &inv_rms, true, dx, true, &mut dw);
    });

    let dims = RopeDims {
        tokens: T,
        heads: H + K,
        head_dim: E,
    };
    let inv_freq: Vec<f64> = (0..E / 2)
        .map(|i| 1e4f64.powf(-2.0 * i as f64 / E as f64))
        .collect();
    let (mut cos, mut sin) = (vec![0.0; T * E / 2], vec![0.0; T * E / 2]);
    rope::fill_tables(&inv_freq, 1.0, &mut cos, &mut sin);
    let positions: Vec<u32> = (0..T as u32).map(|t| t % 512).collect();
    let width = (H + 2 * K) * E;
    let mut qkv = values(T * width);
    report.run("rope/forward", floats(2 * T * (H + K) * E), |cpu| {
        let qk = RowsMut::new(&mut qkv, T, (H + K) * E, width);
        rope::forward(cpu, &dims, &positions, &cos, &sin, qk);
    });

    let (fused, dy) = (values(T * 2 * F), values(T * F));
    let (mut y, mut dfused) = (dy.clone(), fused.clone());
    let rows = Rows::contiguous(&fused, 2 * F);
    let (gate, up) = (rows.columns(0..F), rows.columns(F..2 * F));
    report.run("swiglu/forward", floats(3 * T * F), |cpu| {
        swiglu::forward(cpu, gate, up, &mut y);
    });
    report.run("swiglu/backward", floats(5 * T * F), |cpu| {
        let [dgate, dup] = RowsMut::contiguous(&mut dfused, 2 * F).split_columns([F, F]);
        swiglu::backward(cpu, &dy, gate, up, dgate, dup);
    });

    let dims = linear::LinearDims::new(T, D, 2 * F);
    let mut dbias = vec![0.0; 2 * F];
    report.run("linear/backward_bias", floats(T * 2 * F), |cpu| {
        linear::backward_bias(cpu, &dims, &fused, true, &mut dbias);
    });

    let dims = EmbeddingDims::whole(T, V, D);
    let ids: Vec<u32> = (0..T as u32).map(|t| t * 7919 % V as u32).collect();
    let mut table = values(V * D);
    let mut y = values(T * D);
    report.run("embedding/forward", floats(2 * T * D), |cpu| {
        embedding::forward(cpu, &dims, &table, &ids, &mut y);
    });
    report.run("embedding/backward", floats(3 * T * D), |cpu| {
        embedding::backward(cpu, &dims, &y, &ids, &mut table);
    });
}

/// A chunk of 256 rows of logits, 8 MiB.
pub(crate) fn cross_entropy(report: &mut Report<'_>) {
    let rows = 256;
    let dims = CrossEntropyDims::whole(rows, V, 1.0);
    let logits = values(rows * V);
    let targets: Vec<u32> = (0..rows as u32).map(|r| r * 31).collect();
    let (mut log_prob, mut entropy, mut lse) = (vec![0.0; rows], vec![0.0; rows], vec![0.0; rows]);
    report.run("cross_entropy/forward", floats(2 * rows * V), |cpu| {
        cross_entropy::forward(cpu, &dims, &logits, &targets, &mut log_prob, None, &mut lse);
    });
    report.run(
        "cross_entropy/forward_entropy",
        floats(2 * rows * V),
        |cpu| {
            let entropy = Some(entropy.as_mut_slice());
            cross_entropy::forward(
                cpu,
                &dims,
                &logits,
                &targets,
                &mut log_prob,
                entropy,
                &mut lse,
            );
        },
    );
    let d_log_prob = vec![-1e-3; rows];
    let derivatives = Derivatives {
        lse: &lse,
        d_log_prob: &d_log_prob,
        entropy: None,
    };
    let mut dlogits = logits.clone();
    report.run("cross_entropy/backward", floats(2 * rows * V), |cpu| {
        cross_entropy::backward(cpu, &dims, &logits, &targets, &derivatives, &mut dlogits);
    });
}

/// Eight million parameters.
pub(crate) fn flat(report: &mut Report<'_>) {
    let len = 8 << 20;
    let config = AdamW {
        lr: 1e-4,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 3,
        grad_scale: 0.7,
    };
    let (mut p, g) = (values(len), values(len));
    let (mut m, mut v) = (vec![0.0; len], vec![1e-3; len]);
    report.run("adamw/update", floats(7 * len), |cpu| {
        adamw::update(cpu, &config, &mut p, &g, &mut m, &mut v);
    });
    report.run("elementwise/sum_of_squares", floats(len), |cpu| {
        std::hint::black_box(elementwise::sum_of_squares(cpu, &g));
    });
    report.run("elementwise/axpy", floats(3 * len), |cpu| {
        elementwise::axpy(cpu, 0.5, &g, &mut p);
    });
    let mut half = vec![half::bf16::ZERO; len];
    report.run("elementwise/f32_to_bf16", Work::Bytes(6 * len), |cpu| {
        elementwise::f32_to_bf16(cpu, &g, &mut half);
    });
    report.run("elementwise/bf16_to_f32", Work::Bytes(6 * len), |cpu| {
        elementwise::bf16_to_f32(cpu, &half, &mut p);
    });
}
